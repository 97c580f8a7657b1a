"""The parts of the vLLM connector, one by one."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier_client.engines.vllm import config, fingerprint, paged, paged_cuda, stats
from kvtier_client.engines.vllm.groups import Group, Groups
from kvtier_client.engines.vllm.keys import KeyChain
from kvtier_client.engines.vllm.messages import Report
from kvtier_client.errors import InvalidArgument
from kvtier_client.wire import Layout
from tests.engines.small_vllm import plain

# ---------------------------------------------------------------- settings


def test_the_defaults_need_no_key() -> None:
    assert config.settings_of({}, "recompute") == config.Settings()


@pytest.mark.parametrize(
    ("extra", "policy", "told"),
    [
        ({"sokcet": "x"}, "recompute", "sokcet"),
        ({"write_through": "yes"}, "recompute", "write_through"),
        ({"socket": ""}, "recompute", "socket is empty"),
        ({"deadline_s": 0}, "recompute", "deadline_s is 0"),
        ({"deadline_s": 61}, "recompute", "deadline_s is 61"),
        ({}, "fail", '"kv_load_failure_policy": "recompute"'),
    ],
)
def test_what_is_set_wrongly_is_refused_by_name(
    extra: dict[str, Any], policy: str, told: str
) -> None:
    with pytest.raises(InvalidArgument, match=told):
        config.settings_of(extra, policy)


# -------------------------------------------------------------------- keys


def chain(tokens: list[int], size: int = 4, seed: bytes = b"", extras: Any = plain) -> KeyChain:
    return KeyChain(SimpleNamespace(all_token_ids=tokens), size, extras, seed)


def test_a_key_names_its_block_and_all_before_it() -> None:
    keys = chain(list(range(16))).full(4)
    other = chain([*range(8), 99, *range(9, 16)]).full(4)
    assert [a == b for a, b in zip(keys, other, strict=True)] == [True, True, False, False]
    assert len({*keys, *other}) == 6 and {len(key) for key in keys} == {16}


def test_keys_are_the_same_however_they_are_asked_for() -> None:
    tokens = list(range(19))
    whole = chain(tokens).full(4)
    piecewise = chain(tokens)
    piecewise.full(1)
    assert piecewise.full(4, 2) == whole[2:]
    assert piecewise.span(19, 1) == [*whole[1:], chain(tokens).tail(19)]


def test_a_tail_of_other_tokens_or_length_has_another_key() -> None:
    tokens = list(range(16))
    tails = {chain(tokens).tail(end) for end in (13, 14, 15)} | {chain([9, *tokens]).tail(14)}
    assert len(tails) == 4 and not tails & set(chain(tokens).full(4))


def test_extras_and_seeds_separate_equal_tokens() -> None:
    def adapter(request: Any, start: int, end: int) -> bytes:
        return b"adapter"

    tokens = list(range(8))
    chains = [chain(tokens), chain(tokens, seed=b"s"), chain(tokens, extras=adapter)]
    assert len({key for one in chains for key in one.full(2)}) == 6


# ------------------------------------------------------------------ groups


def layout(group: int, rank: int, **fields: Any) -> Layout:
    return Layout("m", "uint8", 1, 1, 1, 4, 8, group=group, tp_rank=rank, tp_size=4, **fields)


def test_a_window_needs_what_the_next_token_sees() -> None:
    window = Group(4, window_tokens=4)
    assert [window.first_block(end) for end in (3, 6, 7, 11)] == [0, 0, 1, 2]
    assert Group(4).first_block(100) == 0


def test_only_what_every_group_has_can_be_restored() -> None:
    groups = Groups([Group(4), Group(8)], [[layout(0, r), layout(1, r)] for r in range(4)])
    assert [len(part) for part in groups.parts] == [4, 4]
    assert groups.saved_tokens(21, (6, 3)) == 21
    assert groups.saved_tokens(21, (5, 3)) == 16
    assert groups.saved_tokens(21, (6, 1)) == 8
    assert groups.hit_tokens((5, 3)) == 16


def test_a_window_that_is_not_whole_restores_nothing() -> None:
    groups = Groups([Group(4), Group(4, 5)], [[layout(0, 0), layout(1, 0)]])
    assert groups.saved_tokens(21, (6, 2)) == 21
    assert groups.saved_tokens(21, (6, 1)) == 0


def test_ranks_that_have_the_same_bytes_share_one_layout() -> None:
    same = layout(0, 0, replicated=True)
    groups = Groups([Group(4)], [[same]] * 4)
    assert groups.parts == [[same]] and groups.ranks == 4


# ------------------------------------------------------- reports and counts


def test_reports_of_ranks_add_up() -> None:
    report = Report({1: 1, 2: 1}, {2}, {"a": 8}).aggregate(Report({1: 1}, {1}, {"a": 4, "b": 0}))
    assert report == Report({1: 2, 2: 1}, {1, 2}, {"a": 4, "b": 0})
    assert report and not Report()


def test_counts_are_taken_once_and_add_up() -> None:
    tally = stats.Tally()
    tally.add("saved_blocks", 3)
    tally.add("saved_blocks", 2)
    tally.add("lookups", 0)
    counts = tally.take()
    assert counts == {"saved_blocks": 5} and tally.take() == {}
    stats.add_up(counts, {"saved_blocks": 1, "lookups": 2})
    assert counts == {"saved_blocks": 6, "lookups": 2}


# ------------------------------------------------------------- fingerprints


def engine_config(model: str = "hub/model") -> Any:
    hf_config = SimpleNamespace(
        to_dict=lambda: {"layers": 2, "rope_parameters": {"rope_type": "default", "theta": 1e4}}
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model, revision="r", code_revision=None, hf_config=hf_config, hf_overrides={},
            seed=0, dtype="torch.bfloat16", quantization=None, quantization_config=None,
            max_model_len=1024,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", kv_cache_dtype_skip_layers=[], kv_cache_layout="LBHNC",
            block_size=32,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None, speculative_config=None,
    )  # fmt: skip


def layout_for(config: Any, version: str = "1", **changed: Any) -> Layout:
    spec = SimpleNamespace(
        block_size=32, dtype="torch.bfloat16", num_kv_heads=3, head_size=64, max_tp_shards=2
    )
    place: dict[str, Any] = {
        "group": 0, "spec": spec, "layers": ["l0", "l1"], "kernels": ["k"], "block_bytes": 4096,
        "rank": (0, 1),
    }  # fmt: skip
    return fingerprint.layout_of(fingerprint.facts_of(config, version), **(place | changed))


CHANGES: dict[str, Callable[[Any], object]] = {
    "model": lambda c: setattr(c.model_config, "model", "other"),
    "revision": lambda c: setattr(c.model_config, "revision", "other"),
    "dtype": lambda c: setattr(c.model_config, "dtype", "torch.float16"),
    "quantisation": lambda c: setattr(c.model_config, "quantization", "awq"),
    "KV dtype": lambda c: setattr(c.cache_config, "cache_dtype", "fp8"),
    "KV layout": lambda c: setattr(c.cache_config, "kv_cache_layout", "BLHNC"),
    "block size": lambda c: setattr(c.cache_config, "block_size", 16),
    "tensor parallelism": lambda c: setattr(c.parallel_config, "tensor_parallel_size", 4),
    "device": lambda c: setattr(c.device_config, "device_type", "cuda"),
    "LoRA": lambda c: setattr(c, "lora_config", {"rank": 8}),
    "RoPE": lambda c: setattr(
        c.model_config, "hf_config",
        SimpleNamespace(to_dict=lambda: {"layers": 2, "rope_parameters": {"theta": 1e6}}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_the_bytes_changes_the_layout(what: str) -> None:
    other = engine_config()
    CHANGES[what](other)
    assert layout_for(engine_config()).fingerprint() != layout_for(other).fingerprint()


def test_equal_engines_have_equal_layouts() -> None:
    assert layout_for(engine_config()) == layout_for(engine_config())


@pytest.mark.parametrize(
    "changed", [{"group": 1}, {"rank": (0, 0)}, {"rank": (1, 1)}, {"kernels": ["other"]}]
)
def test_parts_of_one_engine_have_different_layouts(changed: dict[str, Any]) -> None:
    assert layout_for(engine_config()) != layout_for(engine_config(), **changed)


def test_weights_that_changed_in_place_are_another_model(tmp_path: Any) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * 10)
    before = layout_for(engine_config(str(tmp_path)))
    assert layout_for(engine_config(str(tmp_path))) == before
    weights.write_bytes(b"b" * 11)
    assert layout_for(engine_config(str(tmp_path))) != before


def test_scaled_rope_depends_on_the_longest_context() -> None:
    plain_config = {"rope_parameters": {"rope_type": "default"}}
    assert fingerprint.rope_types(plain_config) == {"default"}
    assert fingerprint.rope_types({"text": {"rope_scaling": {"type": "longrope"}}}) == {"longrope"}


# -------------------------------------------------------------------- pages


def pool(layer_first: bool, layers: int = 3, blocks: int = 5) -> tuple[torch.Tensor, list[Any]]:
    """A pool of 2 heads, 4 states, 8 numbers, and each layer's view [blocks, 2, 4, 8]."""
    shape = (layers, blocks, 2, 4, 8) if layer_first else (blocks, layers, 2, 4, 8)
    whole = torch.arange(layers * blocks * 64, dtype=torch.int32).reshape(shape)
    return whole, list(whole if layer_first else whole.unbind(1))


@pytest.mark.parametrize("layer_first", [True, False])
def test_gathered_blocks_scatter_back(layer_first: bool) -> None:
    whole, views = pool(layer_first)
    before = whole.clone()
    stacks = paged.stacks_of([paged.pages_of(view, 5) for view in views])
    assert len(stacks) == 1 and stacks[0].layers == (3 if layer_first else 1)
    size = paged.record_bytes(stacks)
    assert size == 3 * 64 * 4
    seen = [(stack, paged_cuda.stack_view(stack, 5, views)) for stack in stacks]
    index, buffer = torch.tensor([3, 1]), torch.empty((2, size), dtype=torch.uint8)
    paged_cuda.gather(seen, index, buffer)
    wanted = torch.stack([torch.stack([view[i] for view in views]) for i in (3, 1)])
    assert buffer.numpy().tobytes() == wanted.numpy().tobytes()
    for view in views:
        view[3], view[1] = 0, 0
    paged_cuda.scatter(seen, index, buffer)
    assert torch.equal(whole, before)


def test_kernel_blocks_make_up_a_block() -> None:
    whole = torch.zeros((10, 2, 4, 8), dtype=torch.int32)
    pages = paged.pages_of(whole, 5)
    assert pages.page_bytes == pages.block_stride == 2 * 64 * 4


def test_layers_that_share_their_memory_are_stored_once() -> None:
    _, views = pool(True)
    pages = [paged.pages_of(view, 5) for view in [*views, views[0]]]
    assert paged.record_bytes(paged.stacks_of(pages)) == 3 * 64 * 4


def test_pages_in_several_pieces_are_refused() -> None:
    scattered = torch.zeros((5, 2, 4, 8)).transpose(0, 1)
    with pytest.raises(InvalidArgument, match="VLLM_KV_CACHE_LAYOUT"):
        paged.pages_of(scattered, 2)
    with pytest.raises(InvalidArgument, match="for 3 blocks"):
        paged.pages_of(torch.zeros((5, 2)), 3)


def test_dtypes_have_the_names_of_layouts() -> None:
    names = [fingerprint.dtype_of(d) for d in (torch.bfloat16, torch.float8_e4m3fn, torch.int32)]
    assert names == ["bfloat16", "float8_e4m3", "uint8"]
