"""The kernels on single entries, on a GPU, do what their references do on the CPU."""

from dataclasses import replace

import pytest
import torch

import kvtier_kernels
from tests.kernels.cases import (
    GROUPS,
    LENGTHS,
    WIDTHS,
    make_attention,
    make_moves,
    make_step,
)

pytestmark = pytest.mark.gpu

LAYER = [((8, 128), torch.float32), ((8, 128), torch.float32), ((8,), torch.float32)]
UNEVEN = [((3, 5), torch.float32), ((3,), torch.float16), ((7,), torch.uint8)]


@pytest.mark.parametrize("entries", [0, 1, 4, 37, 1024])
@pytest.mark.parametrize("rows", [LAYER * 3, UNEVEN], ids=["layers", "uneven"])
def test_gpu_moves_what_the_reference_moves(
    rows: list[tuple[tuple[int, ...], torch.dtype]], entries: int
) -> None:
    case = make_moves(rows, entries, seed=entries)
    gpu = case.to("cuda")
    kvtier_kernels.move_entries(gpu.pools, gpu.sources, gpu.targets)
    kvtier_kernels.move_entries(case.pools, case.sources, case.targets)
    for moved, expected in zip(gpu.pools, case.pools, strict=True):
        assert torch.equal(moved.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gpu_attends_as_the_reference_does(width: int, group: int) -> None:
    for lengths in (LENGTHS, (1,), (0,), (), tuple(range(260, 324))):
        case = make_attention(width, group, lengths=lengths, biased=group % 2 == 0, group_count=5)
        gpu = case.to("cuda")
        result = kvtier_kernels.paged_attention(gpu)
        expected = kvtier_kernels.paged_attention(case)
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5)
        assert gpu.masses is not None and case.masses is not None
        torch.testing.assert_close(gpu.masses.cpu(), case.masses, rtol=1e-5, atol=1e-6)


def test_on_a_gpu_neighbours_change_no_bit_of_a_row() -> None:
    case = make_attention(128, 4).to("cuda")
    together = kvtier_kernels.paged_attention(case)
    for row, length in enumerate(LENGTHS):
        alone = replace(
            case,
            queries=case.queries[row : row + 1],
            entries=case.entries[case.starts[row] : case.starts[row + 1]],
            starts=torch.tensor([0, length], device="cuda"),
            longest=length,
        )
        result = kvtier_kernels.paged_attention(alone)
        assert torch.equal(result[0], together[row])


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gpu_scores_as_the_reference_does(width: int, group: int, squared: bool) -> None:
    for entries, rows in ((1, 1), (63, 5), (200, 32), (331, 192)):
        step = make_step(width, group, entries, rows)
        gpu = step.to("cuda")
        scores = kvtier_kernels.score_keys(gpu.keys, gpu.slots, gpu.queries, squared, gpu.values)
        expected = kvtier_kernels.score_keys(
            step.keys, step.slots, step.queries, squared, step.values
        )
        torch.testing.assert_close(scores.tops.cpu(), expected.tops, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scores.masses.cpu(), expected.masses, rtol=1e-5, atol=1e-5)
        assert scores.outputs is not None
        torch.testing.assert_close(scores.outputs.cpu(), expected.outputs, rtol=1e-5, atol=1e-5)
        importance = scores.importance.cpu()
        torch.testing.assert_close(importance, expected.importance, rtol=1e-4, atol=1e-7)
