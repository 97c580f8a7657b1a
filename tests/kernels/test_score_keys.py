"""attention.cu's score pass, on the emulated grid, gives what the reference gives."""

from dataclasses import replace

import pytest
import torch

import kvtier_kernels
from kvtier_kernels import KeyScores
from kvtier_kernels.plans import plan_scoring
from tests.kernels.cases import GROUPS, POOL_SLOTS, WIDTHS, Step, make_step
from tests.kernels.emulation import Emulator, Outcome

SIZES = [(1, 1), (63, 5), (65, 7), (130, 9)]


def run(
    emulator: Emulator, step: Step, squared: bool, backwards: bool = False
) -> tuple[Outcome, KeyScores]:
    plans, scores = plan_scoring(step.keys, step.slots, step.queries, squared, step.values)
    for plan in plans:
        outcome = emulator.carry_out(plan, backwards)
        if outcome is not Outcome.DONE:
            return outcome, scores
    return Outcome.DONE, scores


def expected(step: Step, squared: bool) -> KeyScores:
    return kvtier_kernels.score_keys(step.keys, step.slots, step.queries, squared, step.values)


def assert_near(scores: KeyScores, others: KeyScores) -> None:
    torch.testing.assert_close(scores.tops, others.tops, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.masses, others.masses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.importance, others.importance, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(scores.outputs, others.outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_kernels_score_as_the_reference_does(width: int, group: int, emulator: Emulator) -> None:
    entries, rows = SIZES[group % len(SIZES)]
    step = make_step(width, group, entries, rows)
    outcome, scores = run(emulator, step, squared=group > 4)
    assert outcome is Outcome.DONE
    assert_near(scores, expected(step, squared=group > 4))


@pytest.mark.parametrize("squared", [False, True])
def test_importance_is_what_the_shares_say(squared: bool) -> None:
    step = make_step(32, 3, entries=40, rows=6)
    scores = expected(step, squared)
    assert scores.outputs is not None
    for layer, pool in enumerate(step.keys):
        for head in range(2):
            keys = pool[step.slots, head].double()
            queries = step.queries[layer, :, 3 * head : 3 * head + 3].reshape(-1, 32).double()
            logits = queries @ keys.T / 32**0.5
            shares = torch.softmax(logits, -1)
            want = shares.square().mean(0).sqrt() if squared else shares.mean(0)
            got = scores.importance[layer, head]
            torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-7)
            mass = torch.exp(logits - scores.tops[layer, head].double()[:, None]).sum(-1)
            values = step.values[layer][step.slots, head].double()
            got = scores.outputs[layer, head].flatten(0, 1)
            torch.testing.assert_close(got, (shares @ values).float(), rtol=1e-5, atol=1e-6)
            got = scores.masses[layer, head]
            torch.testing.assert_close(got, mass.float(), rtol=1e-5, atol=0)


def test_without_values_there_are_no_outputs() -> None:
    step = make_step(32, 1, entries=5, rows=2)
    scores = kvtier_kernels.score_keys(step.keys, step.slots, step.queries)
    assert scores.outputs is None
    assert torch.equal(scores.importance, expected(step, squared=False).importance)


def test_the_order_of_the_threads_changes_no_bit(emulator: Emulator) -> None:
    step = make_step(64, 3, entries=150, rows=11)
    forwards, backwards = run(emulator, step, True)[1], run(emulator, step, True, True)[1]
    assert torch.equal(forwards.importance, backwards.importance)
    assert torch.equal(forwards.tops, backwards.tops)
    assert torch.equal(forwards.masses, backwards.masses)


@pytest.mark.parametrize("slot", [-1, POOL_SLOTS, 2**62])
def test_a_slot_outside_the_pools_traps(slot: int, emulator: Emulator) -> None:
    step = make_step(32, 1, entries=70, rows=2)
    step.slots[66] = slot
    assert run(emulator, step, False)[0] is Outcome.TRAPPED


def wrong_inputs() -> dict[str, Step]:
    step = make_step(32, 2, entries=5, rows=3)
    return {
        "no pools": replace(step, keys=[]),
        "pools differ": replace(step, keys=[step.keys[0], step.keys[1][1:]]),
        "no slots": replace(step, slots=step.slots[:0]),
        "slots not int64": replace(step, slots=step.slots.int()),
        "no rows of queries": replace(step, queries=step.queries[:, :0]),
        "queries of too few layers": replace(step, queries=step.queries[:1]),
        "queries strided": replace(step, queries=step.queries[:, ::2]),
        "queries in halves": replace(step, queries=step.queries.half()),
        "V pools too few": replace(step, values=step.values[1:]),
    }


@pytest.mark.parametrize("name", wrong_inputs())
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    step = wrong_inputs()[name]
    with pytest.raises(ValueError, match=r"pool|slots|queries"):
        expected(step, squared=False)
    with pytest.raises(ValueError, match=r"pool|slots|queries"):
        plan_scoring(step.keys, step.slots, step.queries, False, step.values)
