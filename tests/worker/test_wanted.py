"""An unfold that was asked for happens before its token, whatever happens to the KV until then."""

import pytest
import torch

import kvtier_client as kv
from kvtier_worker.engine import Engine
from kvtier_worker.entries import Entries
from kvtier_worker.errors import CannotUnfold
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.thoughts import Event, Form, Thoughts
from tests.worker.test_fold import submit_all
from tests.worker.test_scheduler import check_books
from tests.worker.test_swap import step_until
from tests.worker.test_unfold import fold_engine, step_to_folds


def ask(client: kv.Client) -> tuple[Engine, Sequence, int]:
    """An engine whose sequence wants its first folded step back before the next token."""
    engine = fold_engine(client)
    sequence = submit_all(engine, 1)[0]
    number = step_to_folds(engine, sequence, 2)[0]
    engine.unfold(sequence, number, pinned=True)
    return engine, sequence, number


def lose(engine: Engine, sequence: Sequence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the sequence out of the pool while the daemon takes nothing, and wake it."""
    with monkeypatch.context() as refusing:
        refusing.setattr(engine.store, "save", lambda _: 0)
        engine.park(sequence)
    assert sequence.computed_tokens == 0
    engine.wake(sequence)


def undisturbed(client: kv.Client) -> list[int]:
    engine, sequence, _ = ask(client)
    engine.run()
    return sequence.generated


def test_a_wanted_unfold_outlives_a_refused_swap_out(
    client: kv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sequence, number = ask(client)
    at = sequence.computed_tokens
    lose(engine, sequence, monkeypatch)
    engine.run(on_step=check_books)
    assert sequence.generated == undisturbed(client)
    assert Event(at, number, Form.UNFOLDED) in sequence.thoughts.events
    [note] = engine.folder.notes
    assert (note.step, note.at, note.cause, note.restored) == (number, at, "asked", True)
    assert engine.pool.free_pages == engine.pool.pages


def test_one_that_is_taken_back_meanwhile_does_not_happen(
    client: kv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sequence, number = ask(client)
    lose(engine, sequence, monkeypatch)
    engine.refold(sequence, number)
    engine.run(on_step=check_books)
    assert engine.figures("fold").folding.unfolds == 0
    assert sequence.generated != undisturbed(client)


def test_one_that_is_asked_for_while_kv_is_lost_happens_as_if_it_was_not(
    client: kv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fold_engine(client)
    sequence = submit_all(engine, 1)[0]
    number = step_to_folds(engine, sequence, 2)[0]
    lose(engine, sequence, monkeypatch)
    with pytest.raises(CannotUnfold, match="was never folded"):
        engine.unfold(sequence, 0)  # it is shorter than what would stay of it
    engine.unfold(sequence, number, pinned=True)
    engine.run(on_step=check_books)
    assert sequence.generated == undisturbed(client)
    assert [(note.cause, note.restored) for note in engine.folder.notes] == [("asked", True)]


@pytest.mark.parametrize("pinned", [False, True])
def test_one_that_is_asked_for_where_a_fold_is_due_comes_behind_that_fold(
    client: kv.Client, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    def run(lost: bool) -> tuple[list[int], list[Event]]:
        engine = fold_engine(client)
        sequence = submit_all(engine, 1)[0]
        number = step_to_folds(engine, sequence, 2)[0]
        engine.unfold(sequence, number, pinned=True)
        engine.step()
        engine.refold(sequence, number)
        thoughts = sequence.thoughts
        step_until(engine, lambda: thoughts.steps[-1].end == sequence.computed_tokens)
        assert thoughts.decided < len(thoughts.steps)
        engine.unfold(sequence, number, pinned)
        if lost:
            lose(engine, sequence, monkeypatch)
        engine.run(on_step=check_books)
        return sequence.generated, thoughts.events

    assert run(lost=True) == run(lost=False)


def test_a_step_that_is_folded_again_out_of_the_pool_is_seen_no_more_from_there(
    client: kv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(lost: bool) -> tuple[list[int], torch.Tensor]:
        engine, sequence, number = ask(client)
        step_until(engine, lambda: len(sequence.tokens) >= 104)
        engine.park(sequence)
        engine.refold(sequence, number)
        engine.wake(sequence)
        step_until(engine, lambda: len(sequence.tokens) >= 109)
        if lost:
            lose(engine, sequence, monkeypatch)
            step_until(engine, lambda: len(sequence.tokens) >= 110)
        else:
            engine.step()
        return sequence.tokens, engine.pool.read_entries(sequence.kv.slots)

    (tokens, entries), (undisturbed_tokens, undisturbed_entries) = run(True), run(False)
    assert tokens == undisturbed_tokens
    assert torch.equal(entries, undisturbed_entries)


def test_a_fork_knows_why_its_step_is_wanted(client: kv.Client) -> None:
    engine, sequence, _ = ask(client)
    engine.fork(sequence)
    engine.step()
    assert [note.cause for note in engine.folder.notes] == ["asked", "asked"]


def test_one_for_which_there_is_no_room_any_more_is_forgone(
    client: kv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sequence, _ = ask(client)
    lose(engine, sequence, monkeypatch)
    monkeypatch.setattr(Entries, "missing_for_unfold", lambda *_: engine.pool.pages + 1)
    engine.run(on_step=check_books)
    assert sequence.state is State.FINISHED and sequence.failure is None
    figures = engine.figures("fold").folding
    assert (figures.crowded, figures.unfolds) == (1, 0)


def test_what_was_wanted_falls_due_in_its_place_among_what_had_happened() -> None:
    thoughts = Thoughts()
    for first in (0, 10, 20):
        thoughts.add(first, first + 10)
    for step, at in zip(thoughts.steps, (10, 20, 30), strict=True):
        step.kept = 2
        thoughts.change(step, Form.FOLDED, at)
    thoughts.steps[1].wanted = True
    assert thoughts.lose(0, 35) == 0
    folds = [Event(at, number, Form.FOLDED) for number, at in enumerate((10, 20, 30))]
    assert list(thoughts.replay) == [*folds, Event(35, 1, Form.UNFOLDED)]
    assert thoughts.stop(0) == 10
    thoughts.change(thoughts.steps[0], Form.FOLDED, 10)
    thoughts.steps[0].wanted = True  # asked for again while the rest is computed again
    thoughts.lose(0, 15)
    again = Event(15, 0, Form.UNFOLDED)
    assert list(thoughts.replay) == [folds[0], again, *folds[1:], Event(35, 1, Form.UNFOLDED)]
