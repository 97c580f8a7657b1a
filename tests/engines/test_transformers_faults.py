"""What befalls the daemon, its media or the model never becomes wrong KV, and costs little."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kvtier_client as kv
from kvtier_client.engines.transformers import KvtierCache, model_identity
from kvtier_client.engines.transformers.pages import gather, new_stage, shape_of
from kvtierd.tiers.spill_files import PAYLOAD_NAME
from tests.engines.tiny_chat import (
    PAGE_BYTES,
    PAGE_TOKENS,
    extend,
    kv_of,
    prompt,
    same,
    tiny_llama,
)
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import MakeDaemon, daemon, make_daemon  # noqa: F401
from tests.support.wait import until

MODEL = tiny_llama()


@contextlib.contextmanager
def client_of(daemon: DaemonProcess) -> Iterator[kv.Client]:  # noqa: F811
    """A client; what its test has saved is forgotten by then, and nothing is held after it."""
    with kv.Client(daemon.client_path) as client:
        yield client
    tenant = daemon.tenant()
    assert tenant["held_blocks"] == tenant["sessions"] == 0


def to_nvme(daemon: DaemonProcess, blocks: int) -> None:  # noqa: F811
    """All blocks leave DRAM."""
    daemon.admin("evict", "t")
    until(lambda: daemon.tenant()["nvme"]["blocks"] == blocks, "all is on NVMe")
    until(lambda: daemon.tenant()["dram"]["blocks"] == 0, "nothing is in DRAM")


# ------------------------------------------------------------- another model


class Adapter(nn.Module):
    """What peft leaves on a layer, as far as it can be switched at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.disable_adapters = False
        self.active_adapters = ["tone"]
        self.scaling = {"tone": 2.0}


def _adapted() -> Any:
    model = tiny_llama()
    model.model.layers[0].adapter = Adapter()
    return model


def _touched() -> Any:
    model = tiny_llama()
    model_identity(model)  # known by now
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-3
    return model


OTHERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "other weights": ("weights", lambda: tiny_llama(seed=1)),
    "weights that were trained on": ("weights", _touched),
    "another dtype": ("weights", lambda: tiny_llama(dtype=torch.bfloat16)),
    "another rope": (
        "config",
        lambda: tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    ),
    "another norm": ("config", lambda: tiny_llama(rms_norm_eps=1e-5)),
    "an adapter": ("adapters", _adapted),
}


def test_another_model_is_refused_and_its_own_is_not(daemon: DaemonProcess) -> None:  # noqa: F811
    with client_of(daemon) as client:
        cache = KvtierCache(MODEL, client)
        extend(MODEL, prompt(20), cache, 1)
        before = kv_of(cache)
        token = cache.suspend()
        for what, other in OTHERS.values():
            with pytest.raises(kv.LayoutMismatch, match=f"another model: it differs in .*{what}"):
                KvtierCache.resume(token, other(), client)
        assert same(kv_of(KvtierCache.resume(token, tiny_llama(), client)), before)
        KvtierCache.forget(token, client)


def test_an_adapter_that_is_switched_off_makes_another_model() -> None:
    model = _adapted()
    before = model_identity(model)
    assert model_identity(model) == before
    for change in ({"disable_adapters": True}, {"scaling": {"tone": 1.0}}):
        vars(model.model.layers[0].adapter).update(change)
        after = model_identity(model)
        assert after.adapters != before.adapters and after.weights == before.weights
        before = after


def test_weights_can_be_named_and_must_be_where_they_cannot_be_read(
    daemon: DaemonProcess,  # noqa: F811
) -> None:
    with torch.device("meta"):
        unread = type(MODEL)(MODEL.config)
    with pytest.raises(kv.InvalidArgument, match="identity="):
        model_identity(unread)
    with client_of(daemon) as client:
        cache = KvtierCache(MODEL, client, identity="tiny@1")
        extend(MODEL, prompt(20), cache, 1)
        token = cache.suspend()
        assert KvtierCache.resume(token, MODEL, client, identity="tiny@1").get_seq_length() == 20
        for identity in ("tiny@2", None):
            with pytest.raises(kv.LayoutMismatch, match="weights"):
                KvtierCache.resume(token, MODEL, client, identity=identity)
        KvtierCache.forget(token, client)


# ---------------------------------------------------------------- the daemon


def test_the_daemon_may_die_while_a_cache_is_suspended_or_resident(
    daemon: DaemonProcess,  # noqa: F811
) -> None:
    with kv.Client(daemon.client_path) as client:
        expected = extend(MODEL, prompt(20), KvtierCache(MODEL, client), 60)
        cache = KvtierCache(MODEL, client)
        ids = extend(MODEL, prompt(20), cache, 20)
        token = cache.suspend(input_ids=ids)
        daemon.restart()
        cache = KvtierCache.resume(token, MODEL, client)
        ids = extend(MODEL, ids, cache, 20)
        daemon.restart()
        token = cache.save(input_ids=ids)
        daemon.restart()
        assert cache.save() == token
    with client_of(daemon) as client:
        cache = KvtierCache.resume(token, MODEL, client)
        assert torch.equal(extend(MODEL, cache.saved["input_ids"], cache, 20), expected)
        cache.close()
        KvtierCache.forget(token, client, conversation=True)


def test_a_save_that_fails_leaves_the_cache_and_what_was_saved(
    daemon: DaemonProcess,  # noqa: F811
) -> None:
    with kv.Client(daemon.client_path) as client:
        cache = KvtierCache(MODEL, client)
        ids = extend(MODEL, prompt(20), cache, 20)
        before = kv_of(cache)
        first = cache.save(input_ids=ids)
    with kv.Client(daemon.client_path) as client:
        cache = KvtierCache.resume(first, MODEL, client)
        later = extend(MODEL, ids, cache, 20)
        after = kv_of(cache)
        daemon.kill()
        patience_s, client._core.deadline_s = client._core.deadline_s, 0.5
        with pytest.raises(kv.ConnectionLost):
            cache.suspend(input_ids=later)
        assert same(kv_of(cache), after) and cache.token == first
        daemon.start()
        client._core.deadline_s = patience_s
        second = until(lambda: _saved(cache), "the daemon is back")
    with client_of(daemon) as client:
        assert same(kv_of(KvtierCache.resume(first, MODEL, client)), before)
        assert same(kv_of(KvtierCache.resume(second, MODEL, client)), after)
        KvtierCache.forget(second, client, conversation=True)


def _saved(cache: KvtierCache) -> str | None:
    try:
        return cache.save()
    except kv.TransportError:
        return None


def test_a_cache_goes_on_under_a_new_token_when_its_conversation_was_forgotten(
    daemon: DaemonProcess,  # noqa: F811
) -> None:
    with client_of(daemon) as client, kv.Client(daemon.client_path) as other:
        cache = KvtierCache(MODEL, client)
        ids = extend(MODEL, prompt(20), cache, 1)
        first = cache.save()
        KvtierCache.forget(first, other)
        extend(MODEL, ids, cache, 20)
        before = kv_of(cache)
        second = cache.suspend()
        assert second != first
        assert same(kv_of(KvtierCache.resume(second, MODEL, other)), before)
        KvtierCache.forget(second, other)


def test_a_cache_without_room_in_the_daemon_stays_usable(make_daemon: MakeDaemon) -> None:  # noqa: F811
    small = make_daemon(
        tenants=[{"name": "t", "uids": ["self"], "arena_bytes": 1 << 20, "spill_bytes": 1 << 20}]
    ).start()
    with client_of(small) as client:
        cache = KvtierCache(MODEL, client, page_tokens=256, wait_s=0.1)
        ids = extend(MODEL, prompt(400), cache, 1)
        token = cache.suspend()
        others: list[str] = []
        full = False
        while not full:  # each save takes a page of 96 KiB
            cache = KvtierCache.resume(token, MODEL, client, wait_s=0.1)
            extend(MODEL, ids, cache, 2)
            try:
                others.append(cache.save())
            except kv.SpillFull:
                full = True
            except kv.ArenaFull:  # what leaves DRAM is on its way
                cache.close()
        before = kv_of(cache)
        with pytest.raises(kv.CapacityError):
            cache.save()
        for other in others:
            KvtierCache.forget(other, client)
        last = cache.suspend()
        assert same(kv_of(KvtierCache.resume(last, MODEL, client)), before)
        KvtierCache.forget(last, client, conversation=True)


def test_what_went_wrong_is_told_although_the_cache_cannot_be_closed(
    daemon: DaemonProcess,  # noqa: F811
) -> None:
    with kv.Client(daemon.client_path) as client:
        cache = KvtierCache(MODEL, client)
        extend(MODEL, prompt(20), cache, 1)
        _fail_at_the_blob(cache)
        daemon.kill()
        client._core.deadline_s = 0.2
        with pytest.raises(ZeroDivisionError), cache:
            raise ZeroDivisionError
        with pytest.raises(kv.InvalidArgument, match="closed"):
            cache.get_seq_length()


def test_close_leaves_nothing_that_no_token_names(daemon: DaemonProcess) -> None:  # noqa: F811
    with client_of(daemon) as client:
        first = KvtierCache(MODEL, client)
        ids = extend(MODEL, prompt(40), first, 1)
        token = first.suspend()
        second = KvtierCache.resume(token, MODEL, client)
        extend(MODEL, ids, second, 30)
        third = KvtierCache(MODEL, client)
        extend(MODEL, ids, third, 1)
        for cache in (second, third):
            _fail_at_the_blob(cache)
        assert daemon.tenant()["held_blocks"] == 3 + 3 + 3
        for cache in (second, third):
            cache.close()
        assert daemon.tenant()["held_blocks"] == 3
        KvtierCache.forget(token, client)


def _fail_at_the_blob(cache: KvtierCache) -> None:
    """Save, and lose heart between the pages and the blob."""

    class Interrupt(Exception):
        """As Ctrl-C would be."""

    real = kv.Session.put_blob

    def interrupted(*_: Any, **__: Any) -> None:
        raise Interrupt

    try:
        kv.Session.put_blob = interrupted  # type: ignore[method-assign]
        with pytest.raises(Interrupt):
            cache.save()
    finally:
        kv.Session.put_blob = real  # type: ignore[method-assign]


# ------------------------------------------------------------------ the media


def test_pages_that_went_with_the_memory_are_named_and_computed_again(
    make_daemon: MakeDaemon,  # noqa: F811
) -> None:
    forgetful = make_daemon(recovery={"memory": "off"}).start()
    with kv.Client(forgetful.client_path) as client:
        expected = extend(MODEL, prompt(2 * PAGE_TOKENS), KvtierCache(MODEL, client), 41)
        cache = KvtierCache(MODEL, client)
        ids = extend(MODEL, prompt(2 * PAGE_TOKENS), cache, 1)
        cache.save()
        to_nvme(forgetful, 2)
        ids = extend(MODEL, ids, cache, 20)
        before = kv_of(cache)
        token = cache.suspend(input_ids=ids)
    forgetful.restart()
    with client_of(forgetful) as client:
        with pytest.raises(
            kv.BlockLost, match=r"of 52 tokens, 32\.\.48, 48\.\.52 are lost"
        ) as lost:
            KvtierCache.resume(token, MODEL, client)
        assert lost.value.pages == (2, 3)
        cache = KvtierCache.resume(token, MODEL, client, partial=True)
        assert same(kv_of(cache), [part[:, :, :32] for part in before])
        assert torch.equal(extend(MODEL, cache.saved["input_ids"], cache, 20), expected)
        after = kv_of(cache)
        later = cache.suspend()
        assert client.stats.swapped_out_bytes == 3 * PAGE_BYTES  # pages 2, 3 and 4
        assert same(kv_of(KvtierCache.resume(later, MODEL, client)), after)
        KvtierCache.forget(later, client, conversation=True)


@pytest.mark.parametrize("page", [0, 2])
def test_a_page_that_was_damaged_on_disk_is_lost_and_never_used(
    make_daemon: MakeDaemon,  # noqa: F811
    page: int,
) -> None:
    disk = make_daemon(spill={"direct_io": "off"}).start()
    with client_of(disk) as client:
        cache = KvtierCache(MODEL, client)
        ids = extend(MODEL, prompt(60), cache, 1)
        content, before = _page_bytes(cache, page), kv_of(cache)
        expected = extend(MODEL, ids, cache.fork(), 12)
        token = cache.suspend(input_ids=ids)
        to_nvme(disk, 4)
        _damage(disk.state_path / "spill" / PAYLOAD_NAME, content)
        for _ in range(2):  # found when it is read; then known
            with pytest.raises(kv.BlockLost, match=f"the first {page * PAGE_TOKENS} are") as lost:
                KvtierCache.resume(token, MODEL, client)
            assert lost.value.pages[0] == page
        back = KvtierCache.resume(token, MODEL, client, partial=True)
        kept = page * PAGE_TOKENS
        assert back.get_seq_length() == kept
        assert not kept or same(kv_of(back), [part[:, :, :kept] for part in before])
        assert torch.equal(extend(MODEL, ids, back, 12), expected)
        after = kv_of(back)
        later = back.suspend()
        assert same(kv_of(KvtierCache.resume(later, MODEL, client)), after)
        KvtierCache.forget(later, client, conversation=True)


def test_a_page_found_damaged_while_it_is_read_cuts_a_partial_resume_short(
    make_daemon: MakeDaemon,  # noqa: F811
) -> None:
    disk = make_daemon(spill={"direct_io": "off"}).start()
    with client_of(disk) as client:
        cache = KvtierCache(MODEL, client)
        ids = extend(MODEL, prompt(60), cache, 1)
        content = _page_bytes(cache, 2)
        before = kv_of(cache)
        token = cache.suspend(input_ids=ids)
        to_nvme(disk, 4)
        _damage(disk.state_path / "spill" / PAYLOAD_NAME, content)
        back = KvtierCache.resume(token, MODEL, client, partial=True)
        assert same(kv_of(back), [part[:, :, : 2 * PAGE_TOKENS] for part in before])
        back.close()
        KvtierCache.forget(token, client)


def _page_bytes(cache: KvtierCache, page: int) -> bytes:
    shape = shape_of(cache.layers, PAGE_TOKENS)
    stage = new_stage(shape, 1)
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    gather(shape, tensors, page, cache.get_seq_length(), stage)
    return stage.numpy().tobytes()


def _damage(payload: Path, content: bytes) -> None:
    """Change one bit of a block that a file holds."""
    data = payload.read_bytes()
    at = data.index(content) + len(content) // 2
    with payload.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
