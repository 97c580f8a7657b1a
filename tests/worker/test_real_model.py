"""The default model, from its GGUF file: it answers, and its decode is invariant too."""

from pathlib import Path

import pytest
import torch

from kvtier_worker.engine import Engine, block_shape
from kvtier_worker.load import LoadedModel, load_model
from kvtier_worker.pool import PagedPool
from kvtier_worker.sampler import Sampling
from kvtier_worker.store import RecomputeStore
from kvtier_worker.tile import Row
from tests.worker.tiny import BLOCK_TOKENS, CPU, forward, slots_of

MODEL = Path(__file__).parents[2] / "build" / "model"
TOKENS = 24

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """The model that `make model` fetches; reading it the first time takes half a minute."""
    assert list(MODEL.glob("*.gguf")), "the model is missing: run `make model`"
    return load_model(str(MODEL), CPU)


def test_it_answers_a_question(loaded: LoadedModel) -> None:
    pool = PagedPool(block_shape(loaded.model, BLOCK_TOKENS), 8 << 20, CPU)
    engine = Engine(loaded.model, pool, RecomputeStore())
    prompt = loaded.tokenizer.encode_prompt("What is the capital of France?")
    sequence = engine.submit(prompt, 12, Sampling(), loaded.tokenizer.end_token)
    engine.run()
    assert "Paris" in loaded.tokenizer.decode(sequence.generated)


def test_prefill_decode_and_neighbours_give_the_same_bits(loaded: LoadedModel) -> None:
    model, shape = loaded.model, block_shape(loaded.model, BLOCK_TOKENS)
    tokens = loaded.tokenizer.encode_prompt("Is 221 a prime number?")[:TOKENS]

    def run(pool: PagedPool, rows: list[Row]) -> torch.Tensor:
        return forward(model, pool, rows)[: len(rows)]

    def row(i: int, pages: list[int]) -> Row:
        return Row(tokens[i], i, slots_of(pages, i + 1))

    pool = PagedPool(shape, 20 * shape.block_bytes, CPU)
    alone, chunked, mixed, neighbour = (pool.take(4) for _ in range(4))
    decoded = torch.cat([run(pool, [row(i, alone)]) for i in range(len(tokens))])
    prefilled = torch.cat(
        [
            run(pool, [row(i, chunked) for i in range(first, end)])
            for first, end in ((0, 7), (7, 23), (23, TOKENS))
        ]
    )
    near = [slots_of(neighbour, 4), *(slots_of(neighbour, 41 + i) for i in range(len(tokens)))]
    beside = [
        run(pool, [Row(5, 40 + i, near[1 + i]), row(i, mixed), Row(9, 3, near[0])])[1]
        for i in range(len(tokens))
    ]
    assert torch.equal(decoded, prefilled)
    assert torch.equal(decoded, torch.stack(beside))
