"""An engine small enough to know everything: vLLM's scheduling of blocks, without a model.

The KV of a token is a number that is made of all tokens before it, of its rank and of its group.
Before a token is computed, every number that its attention would read is compared. So a restored
block that is another's, or late, or half there, is found at the next step of its request.
"""

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_client.crew import Crew
from kvtier_client.engines.vllm.config import Settings
from kvtier_client.engines.vllm.groups import Group, Groups
from kvtier_client.engines.vllm.link import Link
from kvtier_client.engines.vllm.messages import Orders, Report
from kvtier_client.engines.vllm.paged import HostMemory, pages_of, record_bytes, stacks_of
from kvtier_client.engines.vllm.scheduler_side import NULL_BLOCK, SchedulerSide
from kvtier_client.engines.vllm.worker_side import Place, WorkerSide
from kvtier_client.wire import Layout

LAYERS = 3
NUMBER_BYTES = 8
POISON = 0xDEAD
REST_S = 0.001
"""As vLLM does in a step that computes nothing, so that other threads get on."""


def plain(request: Any, start: int, end: int) -> bytes:
    """Requests of these tests have tokens only."""
    return b""


@dataclass(eq=False)
class Request:
    """What the connector sees of a request, and what the engine knows of it."""

    request_id: str
    all_token_ids: list[int]
    output: int
    num_preemptions: int = 0
    drop_stale_output: bool = False
    skip_reading_prefix_cache: bool = False
    computed: int = 0
    ids: list[list[int]] = field(default_factory=list)
    state: str = "waiting"
    failed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Rank:
    """One rank's pools: a strided array for each group, as vLLM lays them out on a CPU."""

    def __init__(self, groups: list[Group], blocks: int, rank: int, ranks: int) -> None:
        self.rank = rank
        self.pools: list[NDArray[np.uint64]] = [
            np.full((LAYERS, blocks, group.block_tokens), POISON, np.uint64) for group in groups
        ]
        crew = Crew(1)
        self.places = []
        for index, (group, pool) in enumerate(zip(groups, self.pools, strict=True)):
            stacks = stacks_of([pages_of(Tensor(pool[layer]), blocks) for layer in range(LAYERS)])
            layout = Layout(
                model="small", dtype="uint8", layers=LAYERS, kv_heads=1, head_dim=1,
                block_tokens=group.block_tokens, block_bytes=record_bytes(stacks), group=index,
                tp_rank=rank, tp_size=ranks, codec="vllm-LBHNC",
            )  # fmt: skip
            memory = HostMemory(stacks, blocks, pool, crew)
            self.places.append(Place(layout, memory, True, group.block_tokens))
        self.side: WorkerSide

    def kv(self, group: int, tokens: list[int]) -> np.uint64:
        """What the KV of the last of these tokens is."""
        text = f"{self.rank}/{group}/{tokens}".encode()
        return np.uint64(int.from_bytes(hashlib.sha256(text).digest()[:NUMBER_BYTES], "little"))


class Tensor:
    """As much of a torch tensor as `pages_of` asks for."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array, self.shape = array, array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


class SmallEngine:
    """Runs requests; `side` and `ranks` are the connector's two halves."""

    def __init__(
        self, groups: list[Group], ranks: int, blocks: int, links: list[Link], settings: Settings
    ) -> None:
        """`links[0]` is the scheduler's, the others are the ranks' in their order."""
        self.groups, self.blocks = groups, blocks
        self.ranks = [Rank(groups, blocks, rank, ranks) for rank in range(ranks)]
        self.side = SchedulerSide(settings, groups, plain)
        layouts = [[place.layout for place in rank.places] for rank in self.ranks]
        for rank, link in zip(self.ranks, links[1:], strict=True):
            rank.side = WorkerSide(rank.places, link, settings.deadline_s)
        self.side.begin(Groups(groups, layouts), links[0])
        self.free: list[deque[int]] = [deque(range(1, blocks)) for _ in groups]
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.preempted: list[str] = []
        self.ended: dict[str, int] = {}
        self.failed: set[str] = set()
        self.fresh: list[tuple[int, int]] = []
        self.preemptions = self.computed_tokens = 0
        self.output: dict[str, list[int]] = {}

    # --------------------------------------------------------------- requests

    def add(self, request_id: str, prompt: list[int], output: int) -> Request:
        request = Request(request_id, list(prompt), len(prompt) + output)
        self.requests[request_id] = request
        self.waiting.append(request)
        self.side.added(request)
        return request

    def abort(self, request_id: str) -> None:
        request = self.requests[request_id]
        self._finish(request)

    def _finish(self, request: Request) -> None:
        loading = request.state == "loading"
        request.state = "over"
        self.running = [other for other in self.running if other is not request]
        self.waiting = deque(other for other in self.waiting if other is not request)
        self.side.finished(request)
        if not loading:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self._free(request)
        del self.requests[request.request_id]

    def _free(self, request: Request) -> None:
        for free, ids in zip(self.free, request.ids, strict=False):
            free.extend(id for id in reversed(ids) if id != NULL_BLOCK)
        request.ids = []

    # ---------------------------------------------------------------- a step

    def step(self) -> None:
        """Plan, have the ranks carry it out, and hear of it."""
        plan = self._plan()
        if not plan.num_scheduled_tokens:
            time.sleep(REST_S)
        orders = self.side.orders(plan)
        report = Report()
        ended: set[str] = set()
        failed: set[str] = set()
        for rank in self.ranks:
            self._carry_out(rank, orders, plan)
            report.aggregate(rank.side.report() or Report())
            over, bad = rank.side.ended()
            failed |= bad
            bad_ids = rank.side.bad_ids()
            assert bool(bad_ids) <= bool(bad)
            for request_id in over:
                self.ended[request_id] = self.ended.get(request_id, 0) + 1
                if self.ended[request_id] == len(self.ranks):
                    ended.add(request_id)
        self._load_failures(failed, report)
        self.side.heard(report, ended)
        for request_id in ended:
            self._loaded(self.requests[request_id])
        for request in list(self.running):
            if request.computed == request.num_tokens:
                self._sampled(request)

    def _sampled(self, request: Request) -> None:
        if request.num_tokens == request.output:
            self.output[request.request_id] = request.all_token_ids
            self._finish(request)
        else:
            request.all_token_ids.append(sum(request.all_token_ids) * 31 % 251)

    def _load_failures(self, failed: set[str], report: Report) -> None:
        for request_id in failed:
            request = self.requests[request_id]
            whole = report.short[request_id] if len(self.groups) == 1 else 0
            request.computed = min(request.computed, whole)
            request.failed = True

    def _loaded(self, request: Request) -> None:
        del self.ended[request.request_id]
        if request.state == "over":
            self._forget(request)
        elif request.failed and request.computed == 0:
            request.failed = False
            request.state = "waiting"
            self._free(request)
        else:
            request.failed = False
            request.state = "ready"

    # ------------------------------------------------------------- scheduling

    def _plan(self) -> Any:
        self.fresh = []
        scheduled: dict[str, int] = {}
        more: dict[str, list[list[int]]] = {}
        for request in list(self.running):
            if request not in self.running:
                continue
            while not self._room(request, request.num_tokens):
                self._preempt(self.running[-1])
                if request.state == "preempted":
                    break
            else:
                more[request.request_id] = self._allocate(request, request.num_tokens)
                scheduled[request.request_id] = request.num_tokens - request.computed
        news, resumed = [], []
        if not self.preempted:
            news, resumed = self._admit(scheduled)
        more = {name: ids for name, ids in more.items() if name in scheduled}
        cached = [self.requests[name] for name in more] + resumed
        plan = SimpleNamespace(
            preempted_req_ids=set(self.preempted),
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=r.request_id, block_ids=r.ids, num_computed_tokens=r.computed
                )
                for r in news
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in cached],
                resumed_req_ids={r.request_id for r in resumed},
                new_block_ids=[more.get(r.request_id, r.ids) for r in cached],
                num_computed_tokens=[r.computed for r in cached],
            ),
        )
        self.preempted = []
        return plan

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        request.computed = 0
        request.state = "preempted"
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self.preempted.append(request.request_id)
        self.preemptions += 1

    def _admit(self, scheduled: dict[str, int]) -> tuple[list[Request], list[Request]]:
        news: list[Request] = []
        resumed: list[Request] = []
        holding = [r for r in self.waiting if r.state in ("loading", "ready")]
        for request in [*holding, *(r for r in self.waiting if r not in holding)]:
            if request.state == "loading":
                continue
            load = 0
            if request.state != "ready":
                offered, load_async = self.side.matched(request, 0)
                assert load_async == bool(offered)
                if offered is None:
                    continue
                load = offered
            assert load < request.num_tokens
            end = load or request.num_tokens
            # Whoever waits for a load holds its blocks and cannot be preempted: it must find more.
            if not self._room(request, request.num_tokens, spared_for=holding if load else []):
                break
            self._allocate(request, end, load)
            self.side.allocated(request, request.ids, load)
            if load:
                request.computed, request.state = load, "loading"
                holding.append(request)
                continue
            self.waiting.remove(request)
            (resumed if request.num_preemptions else news).append(request)
            request.state = "running"
            self.running.append(request)
            scheduled[request.request_id] = request.num_tokens - request.computed
        return news, resumed

    def _room(self, request: Request, end: int, spared_for: Sequence[Request] = ()) -> bool:
        """Whether a request finds its blocks up to a token, and the others all of theirs."""
        wanted = [(request, end), *((other, other.num_tokens) for other in spared_for)]
        return all(
            sum(group.blocks(upto) - len(each.ids[i] if each.ids else []) for each, upto in wanted)
            <= len(free)
            for i, (group, free) in enumerate(zip(self.groups, self.free, strict=True))
        )

    def _allocate(self, request: Request, end: int, loaded: int = 0) -> list[list[int]]:
        """Give a request blocks up to a token; a window's old ones go back. Returns the new."""
        request.ids = request.ids or [[] for _ in self.groups]
        news: list[list[int]] = []
        for index, group in enumerate(self.groups):
            ids, free = request.ids[index], self.free[index]
            for block in range(min(group.first_block(loaded or request.computed), len(ids))):
                if ids[block] != NULL_BLOCK:
                    free.append(ids[block])
                    ids[block] = NULL_BLOCK
            new = []
            while len(ids) + len(new) < group.blocks(end):
                out = len(ids) + len(new) < group.first_block(loaded)
                new.append(NULL_BLOCK if out else free.popleft())
            self.fresh += [(index, id) for id in new if id != NULL_BLOCK]
            ids.extend(new)
            news.append(new)
        return news

    # ---------------------------------------------------------------- a rank

    def _carry_out(self, rank: Rank, orders: Orders, plan: Any) -> None:
        rank.side.store(orders.rescues)
        for group, id in self.fresh:
            rank.pools[group][:, id] = POISON
        last = rank is self.ranks[-1]
        for request_id, tokens in plan.num_scheduled_tokens.items():
            request = self.requests[request_id]
            self._forward(rank, request, tokens)
            if last:
                request.computed += tokens
                self.computed_tokens += tokens
        rank.side.load(orders.loads)
        rank.side.store(orders.writes)

    def _forward(self, rank: Rank, request: Request, tokens: int) -> None:
        known = request.all_token_ids
        for index, group in enumerate(self.groups):
            pool, ids = rank.pools[index], request.ids[index]
            reach = group.window_tokens or len(known)
            for place in range(max(0, request.computed - reach + 1), request.computed + tokens):
                block, offset = divmod(place, group.block_tokens)
                wanted = rank.kv(index, known[: place + 1])
                if place >= request.computed:
                    pool[:, ids[block], offset] = wanted
                else:
                    read = pool[:, ids[block], offset]
                    assert (read == wanted).all(), f"{request.request_id}: foreign KV at {place}"
