"""attention.cu's decode attention, on the emulated grid, gives what the reference gives."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kvtier_kernels
from kvtier_kernels.plans import plan_attention
from tests.kernels.cases import GROUPS, LENGTHS, POOL_SLOTS, WIDTHS, Attention, make_attention
from tests.kernels.emulation import Emulator, Outcome


def run(emulator: Emulator, case: Attention, backwards: bool = False) -> tuple[Outcome, Tensor]:
    result = case.queries.new_empty(case.queries.shape)
    plan = plan_attention(case, result)
    return emulator.carry_out(plan, backwards), result


def expected(case: Attention) -> Tensor:
    return kvtier_kernels.paged_attention(case)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_kernel_attends_as_the_reference_does(width: int, group: int, emulator: Emulator) -> None:
    case = make_attention(width, group, biased=group % 2 == 0)
    outcome, result = run(emulator, case)
    assert outcome is Outcome.DONE
    torch.testing.assert_close(result, expected(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group_count", [1, 3, 9])
def test_kernel_measures_groups_as_the_reference_does(group_count: int, emulator: Emulator) -> None:
    case = make_attention(32, 3, group_count=group_count)
    measured, same = case.to("cpu"), case.to("cpu")
    outcome, result = run(emulator, measured)
    assert outcome is Outcome.DONE
    torch.testing.assert_close(result, expected(same), rtol=1e-5, atol=1e-5)
    assert measured.masses is not None and same.masses is not None and case.masses is not None
    torch.testing.assert_close(measured.masses, same.masses, rtol=1e-5, atol=1e-6)
    assert torch.all(measured.masses >= case.masses)
    assert torch.any(measured.masses > case.masses)
    assert torch.any(measured.masses == case.masses)


def test_the_order_of_the_threads_changes_no_bit(emulator: Emulator) -> None:
    case = make_attention(64, 5, group_count=4)
    forwards, backwards = case.to("cpu"), case.to("cpu")
    assert torch.equal(run(emulator, forwards)[1], run(emulator, backwards, True)[1])
    assert forwards.masses is not None and backwards.masses is not None
    assert torch.equal(forwards.masses, backwards.masses)


def test_neighbours_change_no_bit_of_a_row(emulator: Emulator) -> None:
    case = make_attention(64, 3)
    together = run(emulator, case)[1]
    for row, length in enumerate(LENGTHS):
        alone = replace(
            case,
            queries=case.queries[row : row + 1],
            entries=case.entries[case.starts[row] : case.starts[row + 1]],
            starts=torch.tensor([0, length]),
            longest=length,
        )
        assert torch.equal(run(emulator, alone)[1][0], together[row])


def test_a_bias_of_zero_changes_no_bit(emulator: Emulator) -> None:
    case = make_attention(32, 4)
    assert case.biases is not None
    zeros = replace(case, biases=torch.zeros_like(case.biases))
    none = replace(case, biases=None)
    assert torch.equal(run(emulator, zeros)[1], run(emulator, none)[1])
    assert not torch.allclose(run(emulator, case)[1], run(emulator, none)[1])


def test_logits_far_from_zero_stay_exact(emulator: Emulator) -> None:
    case = make_attention(32, 2)
    assert case.biases is not None
    far = replace(case, biases=case.biases * 100)
    torch.testing.assert_close(run(emulator, far)[1], expected(far), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_without_entries_there_are_zeros(lengths: tuple[int, ...], emulator: Emulator) -> None:
    case = make_attention(32, 2, lengths=lengths, group_count=2)
    untouched = case.to("cpu")
    outcome, result = run(emulator, case)
    assert outcome is Outcome.DONE
    assert torch.equal(result, torch.zeros(len(lengths), 4, 32))
    assert torch.equal(expected(case), result)
    assert case.masses is not None and untouched.masses is not None
    assert torch.equal(case.masses, untouched.masses)


@pytest.mark.parametrize("slot", [-1, POOL_SLOTS, 2**62])
def test_a_slot_outside_the_pools_traps(slot: int, emulator: Emulator) -> None:
    case = make_attention(32, 2)
    case.entries[70] = slot
    assert run(emulator, case)[0] is Outcome.TRAPPED


def test_a_row_longer_than_the_longest_traps(emulator: Emulator) -> None:
    case = replace(make_attention(32, 2), longest=64)
    assert run(emulator, case)[0] is Outcome.TRAPPED
    with pytest.raises(IndexError, match="longest"):
        expected(case)


def wrong_inputs() -> dict[str, Attention]:
    case = make_attention(32, 2, group_count=2)
    assert case.groups is not None and case.masses is not None and case.biases is not None
    return {
        "pool not float32": replace(case, keys=case.keys.half(), values=case.values.half()),
        "pools differ": replace(case, values=case.values[1:]),
        "pools with gaps": replace(case, keys=case.keys[:, :1], values=case.values[:, :1]),
        "queries of another head_dim": replace(case, queries=case.queries[..., :16]),
        "queries no multiple": replace(case, queries=case.queries[:, :3]),
        "queries strided": replace(case, queries=case.queries.transpose(1, 2)),
        "queries of no rows": replace(case, queries=case.queries[0]),
        "biases of other slots": replace(case, biases=case.biases[1:]),
        "entries not int64": replace(case, entries=case.entries.int()),
        "starts too few": replace(case, starts=case.starts[1:]),
        "groups without masses": replace(case, masses=None),
        "groups too few": replace(case, groups=case.groups[1:]),
        "masses of other rows": replace(case, masses=case.masses[1:]),
    }


@pytest.mark.parametrize("name", wrong_inputs())
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    case = wrong_inputs()[name]
    what = r"pool|queries|biases|entries|starts|groups|masses"
    with pytest.raises(ValueError, match=what):
        expected(case)
    with pytest.raises(ValueError, match=what):
        plan_attention(case, case.queries)


def beyond_the_kernels() -> dict[str, Attention]:
    case = make_attention(32, 2)
    shifted = torch.zeros(case.keys.numel() + 1)[1:].view(case.keys.shape)
    uneven = torch.zeros(len(LENGTHS), 4 * 32 + 1).as_strided((len(LENGTHS), 4, 32), (129, 32, 1))
    return {
        "head_dim": make_attention(48, 2),
        "times as many": make_attention(32, 9),
        "begin at": replace(case, keys=shifted),
        "apart": replace(case, queries=uneven),
    }


@pytest.mark.parametrize("limit", beyond_the_kernels())
def test_what_only_the_kernels_cannot_do_is_refused_for_them_alone(limit: str) -> None:
    case = beyond_the_kernels()[limit]
    assert expected(case).shape == case.queries.shape
    with pytest.raises(ValueError, match=limit):
        plan_attention(case, case.queries)
