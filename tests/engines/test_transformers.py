"""A cache of transformers comes back from the daemon as it was, and only what is new is written."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import kvtier_client as kv
from kvtier_client.engines.transformers import KvtierCache, pages
from tests.engines.tiny_chat import (
    PAGE_BYTES,
    PAGE_TOKENS,
    SIZES,
    extend,
    kv_of,
    prompt,
    same,
    tiny_llama,
)
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import shared_daemon  # noqa: F401
from tests.support.wait import until

MODEL = tiny_llama()


@pytest.fixture
def client(shared_daemon: DaemonProcess) -> Iterator[kv.Client]:  # noqa: F811
    """A client; what a test has saved is forgotten in the end, and then nothing is held."""
    with kv.Client(shared_daemon.client_path) as client:
        yield client
    until(shared_daemon.is_empty, "nothing is left")


@pytest.fixture
def other(shared_daemon: DaemonProcess) -> Iterator[kv.Client]:  # noqa: F811
    """Another process's client, as far as the daemon can tell."""
    with kv.Client(shared_daemon.client_path) as client:
        yield client


def written_pages(client: kv.Client) -> int:
    return client.stats.swapped_out_bytes // PAGE_BYTES


@pytest.mark.parametrize("tokens", [7, 16, 40])
def test_greedy_output_is_the_same_with_a_suspend_in_the_middle(
    client: kv.Client, other: kv.Client, tokens: int
) -> None:
    ids = prompt(9)
    expected = extend(MODEL, ids, KvtierCache(MODEL, client), 60)
    cache = KvtierCache(MODEL, client)
    token = cache.suspend(input_ids=extend(MODEL, ids, cache, tokens))
    resumed = KvtierCache.resume(token, MODEL, other)
    assert torch.equal(extend(MODEL, resumed.saved["input_ids"], resumed, 60 - tokens), expected)
    KvtierCache.forget(token, client)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_bit_comes_back(
    client: kv.Client, other: kv.Client, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "WINDOW_BYTES", 2 * PAGE_BYTES)  # as long ones: in several windows
    model = tiny_llama(dtype=dtype)
    cache = KvtierCache(model, client)
    extend(model, prompt(90), cache, 5)
    before = kv_of(cache)
    token = cache.suspend()
    resumed = KvtierCache.resume(token, model, other)
    assert resumed.get_seq_length() == 94 and same(kv_of(resumed), before)
    assert resumed.layers[0].keys.dtype == dtype
    KvtierCache.forget(token, client)


def test_only_new_pages_are_written(client: kv.Client, other: kv.Client) -> None:
    cache = KvtierCache(MODEL, client)
    ids = extend(MODEL, prompt(3 * PAGE_TOKENS), cache, 2)
    token = cache.suspend()
    assert written_pages(client) == 4
    cache = KvtierCache.resume(token, MODEL, other)
    ids = extend(MODEL, ids, cache, PAGE_TOKENS)
    later = cache.save()
    assert written_pages(other) == 2  # the one that was partly filled, and a new one
    assert cache.save() == later and written_pages(other) == 2
    extend(MODEL, ids, cache, 3)
    assert cache.suspend() == later and written_pages(other) == 3
    KvtierCache.forget(later, client, conversation=True)


def test_pages_that_are_shared_are_kept_once(client: kv.Client, other: kv.Client) -> None:
    ids = prompt(4 * PAGE_TOKENS + 1)
    cache = KvtierCache(MODEL, client)
    trunk = extend(MODEL, ids, cache, 1)
    token = cache.suspend()
    expected = extend(MODEL, trunk, KvtierCache(MODEL, client), 20)
    ends = []
    for client_ in (client, other, client):
        branch = KvtierCache.resume(token, MODEL, client_)
        assert torch.equal(extend(MODEL, trunk, branch, 20), expected)
        ends.append(branch.suspend())
    assert len({token, *ends}) == 4
    assert written_pages(client) + written_pages(other) == 5 + 3 * 2
    KvtierCache.forget(token, client)
    assert KvtierCache.resume(ends[1], MODEL, client).get_seq_length() == expected.shape[1] - 1
    for end in ends:
        KvtierCache.forget(end, client)


@pytest.mark.parametrize("cut", [3, 14, 40])
def test_what_is_computed_after_a_crop_replaces_nothing_that_was_saved(
    client: kv.Client, other: kv.Client, cut: int
) -> None:
    cache = KvtierCache(MODEL, client)
    ids = extend(MODEL, prompt(30), cache, 25)
    before = kv_of(cache)
    first = cache.save()
    cache.crop(-cut)
    ids = torch.cat([ids[:, : 54 - cut], prompt(5, seed=1)], dim=1)
    extend(MODEL, ids, cache, 30)
    after = kv_of(cache)
    second = cache.save()
    cache.crop(-cut - 20)  # now below where the second branch begins, too
    extend(MODEL, ids[:, : cache.get_seq_length() + 1], cache, 8)
    third, last = cache.suspend(), kv_of
    assert same(kv_of(KvtierCache.resume(first, MODEL, other)), before)
    assert same(kv_of(KvtierCache.resume(second, MODEL, other)), after)
    assert not same(last(KvtierCache.resume(third, MODEL, other)), after)
    KvtierCache.forget(first, client, conversation=True)


def test_a_copy_goes_its_own_way(client: kv.Client) -> None:
    cache = KvtierCache(MODEL, client)
    ids = extend(MODEL, prompt(20), cache, 1)
    trunk = cache.save(input_ids=ids)
    twin: Any = copy.deepcopy(cache)
    one = extend(MODEL, torch.cat([ids, prompt(4, seed=1)], 1), cache, 10)
    two = extend(MODEL, torch.cat([ids, prompt(4, seed=2)], 1), twin, 10)
    kept = kv_of(cache), kv_of(twin)
    tokens = cache.suspend(input_ids=one), twin.suspend(input_ids=two)
    for token, ids, before in zip(tokens, (one, two), kept, strict=True):
        back = KvtierCache.resume(token, MODEL, client)
        assert torch.equal(back.saved["input_ids"], ids) and same(kv_of(back), before)
    KvtierCache.forget(trunk, client, conversation=True)


def test_a_padded_batch_goes_on_with_its_mask(client: kv.Client, other: kv.Client) -> None:
    ids, mask = prompt(20, batch=3), torch.ones(3, 20, dtype=torch.long)
    ids[1, :7], mask[1, :7] = 0, 0
    expected = extend(MODEL, ids, KvtierCache(MODEL, client), 30, mask)
    cache = KvtierCache(MODEL, client)
    half = extend(MODEL, ids, cache, 12, mask)
    mask = torch.cat([mask, torch.ones(3, 12, dtype=torch.long)], dim=1)
    token = cache.suspend(input_ids=half, attention_mask=mask)
    back = KvtierCache.resume(token, MODEL, other)
    saved = back.saved
    assert saved["attention_mask"].dtype == torch.long
    out = extend(MODEL, saved["input_ids"], back, 18, saved["attention_mask"])
    assert torch.equal(out, expected)
    KvtierCache.forget(token, client)


def test_beams_and_other_changes_of_the_batch_are_saved_as_they_are(client: kv.Client) -> None:
    cache = KvtierCache(MODEL, client)
    extend(MODEL, prompt(20, batch=2), cache, 1)
    tokens = [cache.save()]
    cache.reorder_cache(torch.tensor([1, 0]))
    tokens.append(cache.save())
    reordered = kv_of(cache)
    cache.batch_select_indices(torch.tensor([1]))
    tokens.append(cache.save())
    cache.batch_repeat_interleave(3)
    repeated = kv_of(cache)
    tokens.append(cache.suspend())
    assert same(kv_of(KvtierCache.resume(tokens[1], MODEL, client)), reordered)
    assert same(kv_of(KvtierCache.resume(tokens[3], MODEL, client)), repeated)
    for token in tokens:
        KvtierCache.forget(token, client)


def test_keys_and_values_of_several_widths_are_kept(client: kv.Client, other: kv.Client) -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}), q_lora_rank=8, kv_lora_rank=8, v_head_dim=8,
        qk_nope_head_dim=16, qk_rope_head_dim=4, first_k_dense_replace=3,
    )  # fmt: skip
    model: Any = DeepseekV3ForCausalLM(config).eval()
    cache = KvtierCache(model, client)
    extend(model, prompt(20), cache, 4)
    before = kv_of(cache)
    assert before[0].shape[3] != before[1].shape[3]
    token = cache.suspend()
    assert same(kv_of(KvtierCache.resume(token, model, other)), before)
    KvtierCache.forget(token, client)


def test_a_forward_that_was_interrupted_is_cut_off(client: kv.Client) -> None:
    cache = KvtierCache(MODEL, client)
    extend(MODEL, prompt(20), cache, 1)
    before = kv_of(cache)
    cache.layers[0].update(*(torch.zeros(1, 2, 1, 8) for _ in range(2)))
    token = cache.save()
    assert cache.get_seq_length() == 20 and same(kv_of(cache), before)
    assert same(kv_of(KvtierCache.resume(token, MODEL, client)), before)
    KvtierCache.forget(token, client)


def test_what_was_forgotten_is_gone(client: kv.Client) -> None:
    cache = KvtierCache(MODEL, client)
    ids = extend(MODEL, prompt(20), cache, 1)
    first = cache.suspend()
    cache = KvtierCache.resume(first, MODEL, client)
    extend(MODEL, ids, cache, 4)
    second = cache.suspend()
    KvtierCache.forget(first, client)
    with pytest.raises(kv.UnknownBranch, match="forgotten"):
        KvtierCache.resume(first, MODEL, client)
    KvtierCache.forget(second, client)
    with pytest.raises(kv.UnknownSession):
        KvtierCache.resume(second, MODEL, client)
    KvtierCache.forget(second, client)


def test_a_suspended_or_closed_cache_cannot_be_used(client: kv.Client) -> None:
    with KvtierCache(MODEL, client) as cache:
        with pytest.raises(kv.InvalidArgument, match="empty"):
            cache.save()
        ids = extend(MODEL, prompt(20), cache, 1)
        token = cache.suspend()
        assert cache.layers == []
        for use in (cache.get_seq_length, cache.save, cache.suspend, cache.fork):
            with pytest.raises(kv.InvalidArgument, match="suspended"):
                use()
        with pytest.raises(kv.InvalidArgument, match="suspended"):
            extend(MODEL, ids, cache, 1)
    back = KvtierCache.resume(token, MODEL, client)
    back.close()
    with pytest.raises(kv.InvalidArgument, match="closed"):
        extend(MODEL, ids, back, 1)
    KvtierCache.forget(token, client)


def test_kv_of_another_dtype_or_batch_is_not_mixed_in(client: kv.Client) -> None:
    cache = KvtierCache(MODEL, client)
    extend(MODEL, prompt(20), cache, 1)
    more = torch.zeros(1, 2, 1, 8)
    for wrong in (more.bfloat16(), more.expand(2, -1, -1, -1)):
        with pytest.raises(kv.LayoutMismatch, match="layer 0 holds"):
            cache.update(wrong, wrong, 0)


def test_what_is_no_token_is_refused_without_showing_it(client: kv.Client) -> None:
    for wrong in (
        "",
        "secret",
        "0" * 32,
        "0" * 31 + "-0",
        "G" * 32 + "-0",
        "0" * 32 + "-123456789",
    ):
        with pytest.raises(kv.InvalidArgument, match="no token") as refused:
            KvtierCache.resume(wrong, MODEL, client)
        assert not wrong or wrong not in str(refused.value)
    with pytest.raises(kv.UnknownSession):
        KvtierCache.resume("0" * 32 + "-0", MODEL, client)


def test_another_programs_session_is_refused(client: kv.Client) -> None:
    layout = kv.Layout("m", "float32", 1, 1, 4, 16, 2 * 4 * 16 * 4)
    session = client.open_session([layout])
    for blob in (b"", b"\xc1", b"\x81\xa6format\x02"):
        if blob:
            session.put_blob(blob, 0, version=len(blob))
        with pytest.raises(kv.InvalidArgument, match="another program's"):
            KvtierCache.resume(session.token.hex() + "-0", MODEL, client)
    session.close()


def test_state_that_cannot_be_kept_is_refused_before_anything_is_written(
    client: kv.Client,
) -> None:
    cache = KvtierCache(MODEL, client)
    extend(MODEL, prompt(20), cache, 1)
    state: dict[str, Any]
    for state, error in (
        ({"input_ids": [1, 2]}, kv.InvalidArgument),
        ({"input_ids": torch.zeros(2, dtype=torch.complex64)}, kv.InvalidArgument),
        ({"logits": torch.rand(1 << 19)}, kv.QuotaExceeded),
    ):
        with pytest.raises(error):
            cache.save(**state)
    assert client.stats.swapped_out_bytes == 0
    kept = {
        "ids": torch.tensor([[-5, 300], [2**40, 0]]),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
    }
    token = cache.suspend(**kept)
    saved = KvtierCache.resume(token, MODEL, client).saved
    assert saved.keys() == kept.keys()
    for name, tensor in kept.items():
        assert saved[name].dtype == tensor.dtype and torch.equal(saved[name], tensor)
    KvtierCache.forget(token, client)


def test_models_whose_kv_is_no_pages_of_tokens_are_refused(client: kv.Client) -> None:
    sliding = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=64))
    encoder = T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=1))
    for model, why in ((sliding, "DynamicSlidingWindowLayer"), (encoder, "encoder")):
        with pytest.raises(kv.InvalidArgument, match=why):
            KvtierCache(model, client)
    with pytest.raises(kv.InvalidArgument, match="page_tokens"):
        KvtierCache(MODEL, client, page_tokens=0)
    double = tiny_llama(dtype=torch.float64)
    cache = KvtierCache(double, client)
    extend(double, prompt(20), cache, 1)
    with pytest.raises(kv.InvalidArgument, match="float64"):
        cache.save()
