"""Folded steps come back from a real daemon bit by bit; without them the thought goes on."""

from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
import torch

import kvtier_client as kv
from kvtier_client import blocking
from kvtier_client.admin import AdminClient
from kvtier_worker.daemon import OwnDaemon, sizes_for
from kvtier_worker.engine import Engine
from kvtier_worker.errors import CannotSuspend, CannotUnfold, PoolTooSmall
from kvtier_worker.folding import FoldPolicy
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.steps import StepRules
from kvtier_worker.swap import DaemonStore
from kvtier_worker.thoughts import Form, Step
from kvtier_worker.tile import Slots
from tests.worker.test_fold import (
    FOLDING,
    KEEP,
    MODEL,
    NEW_TOKENS,
    RULES,
    finish,
    submit_all,
)
from tests.worker.test_scheduler import check_books
from tests.worker.test_swap import fill_up, step_until
from tests.worker.tiny import ROOMY, SHAPE, WAIT_S, slots_of, tiny_engine, tiny_pool

ROOM: Final = 200
TIGHT: Final = 14


@pytest.fixture(scope="module")
def unpressured() -> list[list[int]]:
    return finish(tiny_engine(MODEL, ROOM, folding=FOLDING))


def fold_engine(
    client: kv.Client,
    pages: int = ROOM,
    folding: FoldPolicy = FOLDING,
    grace_s: float = float("inf"),
) -> Engine:
    pool = tiny_pool(MODEL, pages)
    store = DaemonStore(client, pool, MODEL.config.name, WAIT_S, grace_s)
    return Engine(MODEL, pool, store, folding=folding)


def step_to_folds(engine: Engine, sequence: Sequence, count: int = 1) -> list[int]:
    """Step until so many steps are folded; returns their numbers."""

    def folded() -> list[int]:
        return [s.number for s in sequence.thoughts.steps if s.form is Form.FOLDED]

    step_until(engine, lambda: len(folded()) >= count)
    return folded()


def test_folds_are_the_same_with_a_daemon_and_leave_nothing_there(
    daemon: OwnDaemon, client: kv.Client, unpressured: list[list[int]]
) -> None:
    engine = fold_engine(client)
    assert finish(engine) == unpressured
    figures = engine.figures("fold")
    assert figures.folding.unkept == 0
    assert figures.swap.kept_steps == figures.folding.folds > 0
    with AdminClient(daemon.admin_path) as admin:
        tenant = admin.call("stats")["tenants"]["worker"]
    assert tenant["sessions"] == tenant["held_blocks"] == 0


def test_folded_sequences_are_swapped_and_nothing_is_recomputed(
    client: kv.Client, unpressured: list[list[int]]
) -> None:
    engine = fold_engine(client, TIGHT)
    assert finish(engine) == unpressured
    figures = engine.figures("fold")
    assert figures.preemptions >= 2
    assert figures.recomputed_tokens == figures.folding.repeated == 0
    assert figures.swap.hashes_checked == figures.swap.in_blocks > 0
    assert figures.swap.hashes_wrong == figures.swap.lost == figures.swap.refused == 0


def test_an_unfolded_step_has_the_bits_that_were_folded(client: kv.Client) -> None:
    engine = fold_engine(client)
    sequence = submit_all(engine, 1)[0]
    whole: dict[int, torch.Tensor] = {}
    store = engine.store
    keep_step = store.keep_step

    def keep(sequence: Sequence, step: object, slots: object) -> bool:
        whole[step.number] = engine.pool.read_entries(slots)  # type: ignore[attr-defined,arg-type]
        return keep_step(sequence, step, slots)  # type: ignore[arg-type]

    store.keep_step = keep  # type: ignore[method-assign]
    folded = step_to_folds(engine, sequence, 3)
    steps = sequence.thoughts.steps
    before = engine.pool.read_entries(sequence.kv.slots)
    for number in folded:
        engine.unfold(sequence, number, pinned=True)
    engine.step()
    for number in folded:
        step = steps[number]
        assert step.form is Form.UNFOLDED
        first = sequence.thoughts.first_entry(step)
        slots = sequence.kv.slots[first : first + step.tokens]
        assert torch.equal(engine.pool.read_entries(slots), whole[number])
    for number in folded:
        engine.refold(sequence, number)
    again = engine.pool.read_entries(sequence.kv.slots)
    assert torch.equal(again[:, :, : before.shape[2]], before)
    check_books(engine)
    engine.run(on_step=check_books)
    assert engine.pool.free_pages == engine.pool.pages


def test_every_step_is_there_right_after_its_fold(client: kv.Client) -> None:
    engine = fold_engine(client)
    store, pool = engine.store, engine.pool
    whole: dict[int, torch.Tensor] = {}
    keep_step, folded = store.keep_step, store.folded
    compared = 0

    def keep(sequence: Sequence, step: Step, slots: Slots) -> bool:
        whole[sequence.id] = pool.read_entries(slots)
        return keep_step(sequence, step, slots)

    def look(sequence: Sequence, step: Step) -> None:
        nonlocal compared
        folded(sequence, step)
        pages = pool.take(pool.shape.blocks(step.tokens))
        slots = slots_of(pages, step.tokens)
        assert store.bring_step(sequence, step, slots)
        assert torch.equal(pool.read_entries(slots), whole[sequence.id])
        pool.give_back(pages)
        compared += 1

    store.keep_step, store.folded = keep, look  # type: ignore[method-assign]
    submit_all(engine)
    engine.run(on_step=check_books)
    assert compared == engine.figures("fold").folding.folds > 8


@pytest.mark.parametrize("memory", ["holder", "off"])
def test_steps_that_a_dying_daemon_had_not_heard_of_are_there_or_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    monkeypatch.setattr(blocking, "TEND_PERIOD_S", 3600.0)  # what waits for company waits
    with (
        OwnDaemon(str(tmp_path), ROOMY, memory) as daemon,
        kv.Client(daemon.socket_path, name="test", deadline_s=WAIT_S) as client,
    ):
        engine = fold_engine(client)
        sequence = submit_all(engine, 1)[0]
        step_to_folds(engine, sequence)
        second = step_to_folds(engine, sequence, 2)[-1]
        assert client._core.protocol.sending
        daemon.kill()
        daemon.start()
        engine.unfold(sequence, second)
        engine.run(on_step=check_books)
        assert [note.restored for note in engine.folder.notes] == [memory == "holder"]
        assert engine.figures("fold").swap.hashes_wrong == 0
        assert sequence.state is State.FINISHED and sequence.failure is None


def unfolding_run(engine: Engine) -> list[list[int]]:
    """Every sequence asks for one of its steps again and again, at fixed tokens."""
    sequences = submit_all(engine)
    asked: set[tuple[int, int]] = set()
    while engine.step():
        check_books(engine)
        for s in sequences:
            at = len(s.tokens)
            folded = [step.number for step in s.thoughts.steps if step.form is not Form.WHOLE]
            if s.state is not State.FINISHED and at % 7 == 0 and (s.id, at) not in asked and folded:
                asked.add((s.id, at))
                if s.state is State.RUNNING:
                    engine.unfold(s, folded[at % len(folded)])
    assert engine.pool.free_pages == engine.pool.pages
    return [s.generated for s in sequences]


def test_unfolds_change_what_follows_and_come_through_pressure(client: kv.Client) -> None:
    roomy = fold_engine(client)
    expected = unfolding_run(roomy)
    assert roomy.figures("fold").folding.unfolds > 4
    tight = fold_engine(client, 12)
    assert unfolding_run(tight) == expected
    figures = tight.figures("fold")
    assert figures.preemptions > 2
    assert figures.recomputed_tokens == 0
    assert expected != finish(tiny_engine(MODEL, ROOM, folding=FOLDING))


def test_a_token_triggers_the_unfold_of_the_step_that_it_names(client: kv.Client) -> None:
    def trigger(token: int, steps: object) -> int | None:
        return 0 if token % 5 == 1 else None

    folding = FoldPolicy(RULES, keep=KEEP, trigger=trigger)
    engine = fold_engine(client, folding=folding)
    sequences = submit_all(engine)
    engine.run(on_step=check_books)
    notes = list(engine.folder.notes)
    assert notes
    for note in notes:
        tokens = next(s.tokens for s in sequences if s.id == note.sequence)
        assert note.cause == "trigger" and note.restored
        assert note.step == 0
        assert tokens[note.at] % 5 == 1  # before the token itself is computed
    figures = engine.figures("fold").folding
    assert figures.unfolds == len(notes)
    assert figures.refolds > 0


def test_a_step_dropped_after_its_grace_is_a_miss_and_the_thought_goes_on(
    tmp_path: Path, unpressured: list[list[int]]
) -> None:
    small = sizes_for(SHAPE.block_bytes, 1 << 20, 1 << 20)
    with (
        OwnDaemon(str(tmp_path), small) as daemon,
        kv.Client(daemon.socket_path, name="test", deadline_s=WAIT_S) as client,
        kv.Client(daemon.socket_path, name="hog") as hog,
    ):
        engine = fold_engine(client, grace_s=0.0)
        sequences = submit_all(engine)
        number = step_to_folds(engine, sequences[0])[0]
        fill_up(hog).close()
        engine.unfold(sequences[0], number)
        engine.run(on_step=check_books)
        assert [s.generated for s in sequences] == unpressured
        figures = engine.figures("fold").folding
        assert (figures.misses, figures.unfolds) == (1, 0)
        assert [note.restored for note in engine.folder.notes] == [False]


def test_within_its_grace_a_step_is_there(client: kv.Client) -> None:
    engine = fold_engine(client, grace_s=600.0)
    sequence = submit_all(engine, 1)[0]
    engine.unfold(sequence, step_to_folds(engine, sequence)[0])
    engine.run()
    assert engine.figures("fold").folding.unfolds == 1


@pytest.mark.parametrize("unfolded", [False, True])
@pytest.mark.parametrize("restart", [False, True])
def test_a_suspended_fold_is_resumed_by_another_worker(
    tmp_path: Path, unpressured: list[list[int]], restart: bool, unfolded: bool
) -> None:
    expected = unpressured
    with OwnDaemon(str(tmp_path), ROOMY, memory="holder") as daemon:
        if unfolded:
            with kv.Client(daemon.socket_path, name="test", deadline_s=WAIT_S) as client:
                engine = fold_engine(client)
                sequences = submit_all(engine)
                unfold_all_at_60(engine, sequences)
                engine.run()
                expected = [s.generated for s in sequences]
        with kv.Client(daemon.socket_path, name="test", deadline_s=WAIT_S) as client:
            engine = fold_engine(client, TIGHT)
            sequences = submit_all(engine)
            if unfolded:
                unfold_all_at_60(engine, sequences)
            else:
                step_to_folds(engine, sequences[0], 2)
            left = [i for i, s in enumerate(sequences) if s.state is not State.FINISHED]
            tokens = [engine.suspend(sequences[i]) for i in left]
            assert engine.pool.free_pages == engine.pool.pages
        if restart:
            daemon.stop()
            daemon.start()
        with kv.Client(daemon.socket_path, name="test", deadline_s=WAIT_S) as client:
            other = fold_engine(client, 14)
            resumed = [other.resume(token) for token in tokens]
            other.run(on_step=check_books)
            assert [s.generated for s in resumed] == [expected[i] for i in left]
            assert len(left) >= 2
            assert other.figures("fold").recomputed_tokens == 0
            assert other.pool.free_pages == other.pool.pages
        with AdminClient(daemon.admin_path) as admin:
            tenant = admin.call("stats")["tenants"]["worker"]
        assert tenant["sessions"] == tenant["held_blocks"] == 0


def test_steps_that_other_rules_end_begin_behind_those_that_were_there(client: kv.Client) -> None:
    engine = fold_engine(client)
    sequence = submit_all(engine, 1)[0]
    step_to_folds(engine, sequence, 2)
    before = [(step.first, step.end) for step in sequence.thoughts.steps]
    anything = StepRules(delimiters=tuple((token,) for token in range(256)), least_tokens=23)
    other = fold_engine(client, folding=FoldPolicy(anything, keep=KEEP))
    resumed = other.resume(engine.suspend(sequence))
    other.run(on_step=check_books)
    steps = [(step.first, step.end) for step in resumed.thoughts.steps]
    assert steps[: len(before)] == before and len(steps) > len(before)
    assert all(end <= first for (_, end), (first, _) in pairwise(steps))


def test_a_token_that_was_refused_is_still_good(client: kv.Client) -> None:
    engine = fold_engine(client)
    sequence = submit_all(engine, 1)[0]
    step_to_folds(engine, sequence, 2)
    token = engine.suspend(sequence)
    small = fold_engine(client, pages=3)
    with pytest.raises(PoolTooSmall):
        small.resume(token)
    resumed = engine.resume(token)
    engine.run(on_step=check_books)
    assert resumed.state is State.FINISHED and len(resumed.generated) == NEW_TOKENS
    assert engine.figures("fold").recomputed_tokens == 0


def unfold_all_at_60(engine: Engine, sequences: list[Sequence]) -> None:
    """When a sequence has 60 new tokens its first folded step is unfolded, and pinned."""
    waiting = set(sequences)
    while waiting:
        assert engine.step()
        for s in list(waiting):
            if len(s.generated) >= 60:
                waiting.remove(s)
                folded = [t.number for t in s.thoughts.steps if t.form is Form.FOLDED]
                engine.unfold(s, folded[0], pinned=True)


def test_an_unfold_of_a_pruned_sequence_is_refused(client: kv.Client) -> None:
    engine = fold_engine(client)
    sequence = submit_all(engine, 1)[0]
    step_to_folds(engine, sequence)
    engine.prune(sequence)
    with pytest.raises(CannotUnfold, match="pruned"):
        engine.unfold(sequence, 0)
    with pytest.raises(CannotSuspend, match="pruned"):
        engine.suspend(sequence)
    assert engine.pool.free_pages == engine.pool.pages
