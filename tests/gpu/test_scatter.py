"""The kernels on a GPU move exactly the bytes that the reference moves on the CPU."""

import pytest
import torch

import kvtier_kernels

pytestmark = pytest.mark.gpu

LAYERS, POOL_PAGES, TOKENS, HEADS = 4, 33, 16, 3


def make_pools(width: int, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(width)
    shape = (POOL_PAGES, TOKENS, HEADS, width)
    pools = [torch.randn(shape, generator=generator).to(device) for _ in range(2 * LAYERS)]
    return pools[::2], pools[1::2]


@pytest.mark.parametrize("place", ["cuda", "pinned"])
@pytest.mark.parametrize("width", [64, 5])
def test_gpu_scatters_like_the_reference(width: int, place: str) -> None:
    generator = torch.Generator().manual_seed(1)
    pages = torch.randperm(POOL_PAGES, generator=generator)[:20]
    records = torch.randn(len(pages), LAYERS, 2, TOKENS, HEADS, width, generator=generator)
    expected = make_pools(width, "cpu")
    kvtier_kernels.scatter_blocks(*expected, pages, records)

    keys, values = make_pools(width, "cuda")
    there = records.cuda() if place == "cuda" else records.pin_memory()
    kvtier_kernels.scatter_blocks(keys, values, pages.cuda(), there)
    torch.cuda.synchronize()
    for pool, due in zip((*keys, *values), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(pool.cpu(), due)


def test_host_memory_that_cuda_does_not_know_is_refused() -> None:
    keys, values = make_pools(64, "cuda")
    records = torch.empty((1, LAYERS, 2, TOKENS, HEADS, 64))
    with pytest.raises(ValueError, match="register"):
        kvtier_kernels.scatter_blocks(
            keys, values, torch.zeros(1, dtype=torch.int64).cuda(), records
        )
