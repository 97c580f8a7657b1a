"""Whatever befalls its KV, a thought unfolds and folds its steps where it would have alone."""

import random
from dataclasses import replace
from typing import Final

import pytest
from torch import Tensor

from kvtier_worker.engine import Engine
from kvtier_worker.folding import AttentionTrigger, FoldPolicy
from kvtier_worker.pool import PagedPool
from kvtier_worker.sequence import AT_REST, Sequence, State
from kvtier_worker.thoughts import Event, Form, Step
from kvtier_worker.tile import Slots
from tests.worker.test_fold import FOLDING, MODEL, NEW_TOKENS, submit_all
from tests.worker.test_scheduler import DictStore, check_books
from tests.worker.tiny import tiny_pool

ATTENTIVE: Final = replace(
    FOLDING, attention=AttentionTrigger(0.2, 0.19, 0.18, idle_tokens=6, rest_tokens=4)
)
ROOM: Final = 200
TIGHT: Final = 16

Told = tuple[list[list[int]], list[list[Event]]]


class StepStore(DictStore):
    """Keeps the full KV of folded steps, too."""

    unfolds = True

    def __init__(self, pool: PagedPool, unreliable: random.Random | None) -> None:
        super().__init__(pool, unreliable)
        self.steps: dict[tuple[int, int], Tensor] = {}

    def keep_step(self, sequence: Sequence, step: Step, slots: Slots) -> bool:
        self.steps[sequence.id, step.number] = self.pool.read_entries(slots)
        return True

    def bring_step(self, sequence: Sequence, step: Step, slots: Slots) -> bool:
        self.pool.write_entries(slots, self.steps[sequence.id, step.number])
        return True


class Run:
    """Sequences that ask at tokens of their own for steps, and perhaps a world that is unkind."""

    def __init__(self, seed: int, folding: FoldPolicy, pages: int, unkind: bool) -> None:
        self.chance = random.Random(seed) if unkind else None
        pool = tiny_pool(MODEL, pages)
        self.engine = Engine(MODEL, pool, StepStore(pool, self.chance), folding=folding)
        self.sequences = submit_all(self.engine)
        self.asked = dict.fromkeys(self.sequences, 0)
        asks = random.Random(seed)
        self.script = {
            (sequence, at): (asks.random(), asks.random(), asks.random() < 0.4)
            for sequence in self.sequences
            for at in range(5, NEW_TOKENS - 2)
        }

    def told(self) -> Told:
        """What all of them write, and when their steps changed."""
        alive = list(self.sequences)
        while alive:
            self.engine.step()
            check_books(self.engine)
            alive = [sequence for sequence in alive if sequence.state not in AT_REST]
            for sequence in alive:
                self.ask(sequence)
                self.disturb(sequence)
        assert all(sequence.failure is None for sequence in self.sequences)
        assert self.engine.pool.free_pages == self.engine.pool.pages
        return [s.generated for s in self.sequences], [s.thoughts.events for s in self.sequences]

    def ask(self, sequence: Sequence) -> None:
        at, thoughts = len(sequence.generated), sequence.thoughts
        if self.asked[sequence] == at or (sequence, at) not in self.script:
            return
        self.asked[sequence] = at
        action, which, pinned = self.script[sequence, at]
        folded = [s for s in thoughts.steps if thoughts.coming_form(s) is not Form.WHOLE]
        if not folded:
            return
        number = folded[int(which * len(folded))].number
        if action < 0.18:
            self.engine.unfold(sequence, number, pinned)
        elif action < 0.25:
            self.engine.refold(sequence, number)

    def disturb(self, sequence: Sequence) -> None:
        if self.chance is None:
            return
        if sequence.state is State.PARKED:
            if self.chance.random() < 0.5:
                self.engine.wake(sequence)
        elif self.chance.random() < 0.04:
            self.engine.park(sequence)


@pytest.mark.parametrize(
    ("folding", "seed"), [(FOLDING, 4), (FOLDING, 8), (FOLDING, 12), (ATTENTIVE, 3)]
)
def test_a_thought_changes_at_the_same_tokens_wherever_its_kv_is(
    folding: FoldPolicy, seed: int
) -> None:
    alone = Run(seed, folding, ROOM, unkind=False)
    moved = Run(seed, folding, ROOM if seed % 2 else TIGHT, unkind=True)
    (texts, events), (moved_texts, moved_events) = alone.told(), moved.told()
    assert moved_texts == texts
    assert moved_events == events
    figures = moved.engine.figures("moved")
    assert figures.folding.unfolds > alone.engine.figures("alone").folding.unfolds > 5
    assert figures.recomputed_tokens > 0
