"""Swap on preemption in about fifty lines: what any engine does, whatever its KV looks like."""

import sys

import numpy as np

import kvtier_client as kv

SIZE = 16  # tokens in a page of the engine's pool
LAYOUT = kv.Layout(  # all that changes KV: another model, dtype or rope must be another layout
    model="my-model@4f2a1c", dtype="float16", layers=2, kv_heads=2, head_dim=32,
    block_tokens=SIZE, block_bytes=2 * 2 * 2 * 32 * SIZE * 2, extra="rope=10000",
)  # fmt: skip
POOL = np.zeros((8, LAYOUT.block_bytes), np.uint8)  # the engine's pages (or tensors on a GPU)


class Request:
    """A request: its pages in the pool, and what the daemon has of it."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.tokens = self.saved_tokens = 0  # that have KV; that the daemon has too
        self.session: kv.Session | None = None


def preempt(client: kv.Client, request: Request) -> None:
    """Swap out what the daemon has not got: new pages, and the one that was partly filled."""
    first, end = request.saved_tokens // SIZE, len(request.pages)
    valid = [min(SIZE, request.tokens - page * SIZE) for page in range(first, end)]
    try:
        if request.session is None:
            request.session = client.open_session([LAYOUT])
        records = [POOL[page] for page in request.pages[first:]]
        request.session.swap_out(records, (first, end), valid, wait_s=1.0)
        request.saved_tokens = request.tokens
    except (kv.CapacityError, kv.TransportError, kv.DaemonError, kv.LeaseExpired):
        pass  # what was saved earlier is still there; the rest will be computed again
    request.pages.clear()  # only now may others have the pages


def resume(request: Request, pages: list[int]) -> int:
    """Swap in to new pages; returns how many tokens are there, the engine computes the others."""
    request.pages = pages
    if request.session is None:
        return 0
    records = [POOL[page] for page in pages[: -(-request.saved_tokens // SIZE)]]
    try:
        request.session.swap_in(records, (0, len(records)), wait_s=10.0)
    except kv.KvtierError:  # lost, changed, or not to be had: never use what came
        finish(request)
    return request.saved_tokens


def finish(request: Request) -> None:
    """The request has ended: nothing of it is needed any more."""
    session, request.session, request.saved_tokens = request.session, None, 0
    try:
        if session is not None:
            session.close()
    except (kv.TransportError, kv.DaemonError, kv.UnknownSession):
        pass  # a session that nobody has open ends by itself (recovery.orphan_ttl)


if __name__ == "__main__":
    with kv.Client(sys.argv[1], name="fifty-lines") as client:
        request = Request()
        request.pages, request.tokens = [0, 1, 2], 40  # 2 full pages and one of 8 tokens
        POOL[:3] = np.random.default_rng(0).integers(0, 256, POOL[:3].shape)
        before = POOL[:3].copy()
        preempt(client, request)
        POOL[:] = 0  # somebody else's now
        assert resume(request, [7, 5, 6]) == 40
        assert (POOL[[7, 5, 6]] == before).all()
        finish(request)
