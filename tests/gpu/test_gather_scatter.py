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
def test_gpu_gathers_and_scatters_like_the_reference(width: int, place: str) -> None:
    pages = torch.randperm(POOL_PAGES, generator=torch.Generator().manual_seed(1))[:20]
    shape = (len(pages), LAYERS, 2, TOKENS, HEADS, width)
    expected = torch.empty(shape)
    kvtier_kernels.gather_blocks(*make_pools(width, "cpu"), pages, expected)

    keys, values = make_pools(width, "cuda")
    records = (
        torch.empty(shape, device="cuda") if place == "cuda" else torch.empty(shape).pin_memory()
    )
    kvtier_kernels.gather_blocks(keys, values, pages.cuda(), records)
    torch.cuda.synchronize()
    assert torch.equal(records.cpu(), expected)

    for pool in (*keys, *values):
        pool.zero_()
    kvtier_kernels.scatter_blocks(keys, values, pages.cuda(), records)
    whole_keys, whole_values = make_pools(width, "cpu")
    pairs = zip((*keys, *values), (*whole_keys, *whole_values), strict=True)
    for pool, whole in pairs:
        assert torch.equal(pool[pages.cuda()].cpu(), whole[pages])
        assert int(torch.count_nonzero(pool)) == int(torch.count_nonzero(whole[pages]))


def test_host_memory_that_cuda_does_not_know_is_refused() -> None:
    keys, values = make_pools(64, "cuda")
    records = torch.empty((1, LAYERS, 2, TOKENS, HEADS, 64))
    with pytest.raises(ValueError, match="register"):
        kvtier_kernels.gather_blocks(
            keys, values, torch.zeros(1, dtype=torch.int64).cuda(), records
        )
