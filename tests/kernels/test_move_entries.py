"""move_entries.cu, run on the emulated grid, moves exactly the bytes that the reference moves."""

import pytest
import torch

import kvtier_kernels
from kvtier_kernels.plans import MOVE_ENTRIES_MAX, plan_moves
from tests.kernels.cases import Moves, make_moves
from tests.kernels.emulation import Emulator, Outcome

FLOAT, HALF, BYTE = torch.float32, torch.float16, torch.uint8  # random bytes: many are no number

ROWS = {
    "a layer with biases": [((2, 32), FLOAT), ((2, 32), FLOAT), ((2,), FLOAT)],
    "rows of every alignment": [((3, 5), FLOAT), ((3,), HALF), ((7,), BYTE), ((1,), BYTE)],
    "rows of many slices": [((8, 128), FLOAT), ((8, 128), FLOAT), ((8,), FLOAT)],
}


def run(emulator: Emulator, case: Moves, backwards: bool = False) -> Outcome:
    return emulator.carry_out(plan_moves(case.pools, case.sources, case.targets), backwards)


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("entries", [1, 4, 37])
@pytest.mark.parametrize("name", ROWS)
def test_kernel_moves_what_the_reference_moves(
    name: str, entries: int, backwards: bool, emulator: Emulator
) -> None:
    before = make_moves(ROWS[name], entries, seed=entries)
    moved, expected = before.to("cpu"), before.to("cpu")
    assert run(emulator, moved, backwards) is Outcome.DONE
    kvtier_kernels.move_entries(expected.pools, expected.sources, expected.targets)
    for pool, same, old in zip(moved.pools, expected.pools, before.pools, strict=True):
        assert torch.equal(pool.view(BYTE), same.view(BYTE))
        assert torch.equal(pool.view(BYTE)[before.targets], old.view(BYTE)[before.sources])


def test_as_many_as_may_move_at_once_move(emulator: Emulator) -> None:
    before = make_moves([((20,), FLOAT), ((2,), FLOAT)], MOVE_ENTRIES_MAX, seed=1)
    moved, expected = before.to("cpu"), before.to("cpu")
    assert run(emulator, moved) is Outcome.DONE
    kvtier_kernels.move_entries(expected.pools, expected.sources, expected.targets)
    for pool, same in zip(moved.pools, expected.pools, strict=True):
        assert torch.equal(pool.view(BYTE), same.view(BYTE))


def test_slots_may_change_places(emulator: Emulator) -> None:
    case = make_moves(ROWS["a layer with biases"], 2, seed=3)
    ring = Moves(case.pools, torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3, 0]))
    before = [pool.view(BYTE).clone() for pool in ring.pools]
    assert run(emulator, ring) is Outcome.DONE
    for pool, old in zip(ring.pools, before, strict=True):
        assert torch.equal(pool.view(BYTE)[:4], old[:4].roll(1, 0))
        assert torch.equal(pool.view(BYTE)[4:], old[4:])


def test_no_entries_move_nothing(emulator: Emulator) -> None:
    case = make_moves(ROWS["a layer with biases"], 0, seed=4)
    before = case.to("cpu")
    assert run(emulator, case) is Outcome.DONE
    kvtier_kernels.move_entries(case.pools, case.sources, case.targets)
    for pool, old in zip(case.pools, before.pools, strict=True):
        assert torch.equal(pool.view(BYTE), old.view(BYTE))


@pytest.mark.parametrize("slot", [-1, 7, 2**62])
@pytest.mark.parametrize("which", ["sources", "targets"])
def test_a_slot_outside_the_pools_traps(which: str, slot: int, emulator: Emulator) -> None:
    case = make_moves(ROWS["a layer with biases"], 3, seed=5)
    getattr(case, which)[1] = slot
    assert run(emulator, case) is Outcome.TRAPPED


def wrong_inputs() -> dict[str, Moves]:
    case = make_moves(ROWS["a layer with biases"], 3, seed=6)
    pools, sources, targets = case.pools, case.sources, case.targets
    return {
        "no pools": Moves([], sources, targets),
        "a pool with gaps": Moves([pools[0][:, :1]], sources, targets),
        "pools differ": Moves([pools[0], pools[1][1:]], sources, targets),
        "sources not int64": Moves(pools, sources.int(), targets),
        "targets strided": Moves(pools, sources, torch.stack([targets, targets], 1)[:, 0]),
        "a source without target": Moves(pools, sources, targets[1:]),
    }


@pytest.mark.parametrize("name", wrong_inputs())
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    case = wrong_inputs()[name]
    with pytest.raises(ValueError, match=r"pool|sources|targets"):
        kvtier_kernels.move_entries(case.pools, case.sources, case.targets)
    with pytest.raises(ValueError, match=r"pool|sources|targets"):
        plan_moves(case.pools, case.sources, case.targets)


def test_more_than_may_move_at_once_are_refused_for_the_kernel_alone() -> None:
    case = make_moves([((2,), FLOAT)], MOVE_ENTRIES_MAX + 1, seed=7)
    with pytest.raises(ValueError, match="at once"):
        plan_moves(case.pools, case.sources, case.targets)
    before = case.pools[0].clone()
    kvtier_kernels.move_entries(case.pools, case.sources, case.targets)
    assert torch.equal(case.pools[0].view(BYTE)[case.targets], before.view(BYTE)[case.sources])
