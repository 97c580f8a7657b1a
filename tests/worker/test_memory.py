"""What has ended is gone at once: nothing of it waits for the garbage collector.

A pool is large, and the collector looks at what has lived for long rarely: an engine that is part
of a reference cycle would stay until then.
"""

import gc
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch

import kvtier_client as kv
from kvtier_worker.branches import Family, Node
from kvtier_worker.cot.answers import Answerer
from kvtier_worker.cot.shipped import shipped_model_path
from kvtier_worker.cot.task import Problem, Size, sample_problem
from kvtier_worker.engine import Engine
from kvtier_worker.entries import Entries
from kvtier_worker.errors import SearchFailed
from kvtier_worker.load import load_model
from kvtier_worker.metrics import GAPS_MAX, Clock
from kvtier_worker.pool import PagedPool
from kvtier_worker.scheduler import Limits
from kvtier_worker.sequence import Sequence
from kvtier_worker.swap import DaemonStore
from tests.worker.searching import MODEL, NAMES, QUESTION, strategies
from tests.worker.test_search_daemon import FOLDING, engine_on
from tests.worker.test_swap import PROMPTS, finish
from tests.worker.tiny import WAIT_S, tiny_pool

KINDS = (Engine, PagedPool, DaemonStore, Sequence, Entries, Family, Node, kv.Session)


def objects() -> Counter[str]:
    """How many objects there are of each kind that should not outlive its use."""
    kinds = (type(one) for one in gc.get_objects())  # others may say that they are what they wrap
    return Counter(kind.__name__ for kind in kinds if issubclass(kind, KINDS))


def assert_leaves_nothing(work: Callable[[], object]) -> None:
    gc.collect()
    before = objects()
    gc.disable()
    try:
        work()
        assert objects() == before
    finally:
        gc.enable()


def test_preempted_and_forked_sequences_leave_nothing(client: kv.Client) -> None:
    def work() -> None:
        pool = tiny_pool(MODEL, 14)
        store = DaemonStore(client, pool, MODEL.config.name, WAIT_S)
        engine = Engine(MODEL, pool, store, Limits(running=8), FOLDING)
        finish(engine)
        figures = engine.figures("swap")
        assert figures.preemptions and figures.folding.folds

    assert_leaves_nothing(work)


def test_an_engine_remembers_nothing_of_what_has_ended(client: kv.Client) -> None:
    pool = tiny_pool(MODEL, 14)
    engine = Engine(MODEL, pool, DaemonStore(client, pool, MODEL.config.name, WAIT_S))
    finish(engine)
    assert_leaves_nothing(lambda: finish(engine))
    assert engine.figures("swap").sessions == 2 * len(PROMPTS)


def test_a_clock_knows_the_last_gaps_only() -> None:
    clock, last_s = Clock(), None
    for _ in range(GAPS_MAX + 9):
        last_s = clock.token(last_s)
    assert len(clock._gaps_s) == GAPS_MAX and clock.tokens == GAPS_MAX + 9


@pytest.mark.parametrize("name", NAMES)
def test_a_search_leaves_nothing(client: kv.Client, name: str) -> None:
    def work() -> None:
        engine = engine_on(client, pages=5, folding=FOLDING, running=3)
        strategies()[name].search(engine, QUESTION)

    assert_leaves_nothing(work)


@pytest.mark.parametrize("name", NAMES)
def test_a_search_whose_verifier_raises_leaves_nothing(client: kv.Client, name: str) -> None:
    def odd(prompt: Seq[int], generated: Seq[int]) -> float:
        if generated[-1] % 2:
            raise ValueError("odd")
        return 1.0

    def never(prompt: Seq[int], generated: Seq[int]) -> float:
        raise ValueError("never")

    def work() -> None:
        engine = engine_on(client, folding=FOLDING)
        outcome = strategies(odd)[name].search(engine, QUESTION)
        assert outcome.figures.verifier_failures
        with pytest.raises(SearchFailed, match="never"):
            strategies(never)[name].search(engine, QUESTION)

    assert_leaves_nothing(work)


@pytest.mark.parametrize("mode", [Answerer.full, Answerer.folded, Answerer.attended])
def test_a_chunk_of_an_evaluation_leaves_nothing(
    client: kv.Client, mode: Callable[[Answerer, list[Problem]], object]
) -> None:
    model = load_model(shipped_model_path(), torch.device("cpu")).model
    answerer = Answerer(model, client)
    random = np.random.default_rng(1)
    problems = [sample_problem(random, Size(3, 9)) for _ in range(3)]
    mode(answerer, problems)  # what is made once is there
    assert_leaves_nothing(lambda: mode(answerer, problems))
