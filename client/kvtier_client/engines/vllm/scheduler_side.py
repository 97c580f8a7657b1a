"""The connector in the scheduler's process: what is saved, offered, loaded and let go.

Plain bookkeeping: requests and scheduler outputs are known by the attributes that are used of
them, time by a clock, and the daemon is asked by jobs of the link. So all of it is tested without
an engine.

Rules: only final tokens have keys; a block counts as saved when every rank has reported its save
and the daemon has held it in every layout; what cannot be restored is offered to nobody.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kvtier_client.engines.vllm.config import Settings
from kvtier_client.engines.vllm.groups import Group, Groups
from kvtier_client.engines.vllm.keys import KEY_BYTES, Extras, KeyChain
from kvtier_client.engines.vllm.link import Job
from kvtier_client.engines.vllm.messages import Load, Orders, Part, Report, Save
from kvtier_client.engines.vllm.requests import Entry, Hold, LetGo, Lookup, Offer, Suspension
from kvtier_client.engines.vllm.stats import Tally

NULL_BLOCK = 0
"""The id that the engine gives to blocks it does not keep."""


class Errands(Protocol):
    """What the scheduler's side needs of a link."""

    @property
    def up(self) -> bool:
        """Whether the daemon answers."""

    def submit(self, job: Job) -> None:
        """Have a job done."""


class SchedulerSide:
    """All requests of one engine, as the connector sees them."""

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[Group],
        extras: Extras,
        overwrites_first: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`overwrites_first`: the workers zero and copy blocks before preemptions are handled."""
        self.tally = Tally()
        self._settings = settings
        self._plain_groups = tuple(groups)
        self._groups: Groups | None = None
        self._link: Errands | None = None
        self._extras = extras
        self._overwrites_first = overwrites_first
        self._now_s = now_s
        self._seed = b""
        self._entries: dict[str, Entry] = {}
        self._numbers = itertools.count(1)
        self._saves: dict[int, tuple[Entry, Suspension | None, int]] = {}
        """Saves under way: whose they are, and how many ranks have not reported yet."""
        self._loads: list[Load] = []

    def begin(self, groups: Groups, link: Errands) -> None:
        """The workers' layouts are known, and so is the daemon's place: work from now on."""
        self._groups, self._link = groups, link

    # --------------------------------------------------------------- requests

    def added(self, request: Any) -> None:
        """A request is new: ask whether its prefix is stored."""
        entry = Entry(request, self._chains(request), self._settings.write_through)
        self._entries[request.request_id] = entry
        offer = Offer(restores=False, tokens=0)
        entry.offer = offer
        groups, link = self._groups, self._link
        if groups is None or link is None or not link.up or request.skip_reading_prefix_cache:
            return
        tokens = groups.aligned(entry.final_tokens)
        if tokens == 0:
            return
        offer.tokens, offer.asked_s = None, self._now_s()
        keys = [chain.full(tokens // chain.block_tokens) for chain in entry.chains]
        self.tally.add("lookups", 1)
        link.submit(Lookup(offer, groups, keys))

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the engine's own `local_tokens` can be loaded; None: ask again."""
        entry = self._entries.get(request.request_id)
        if entry is None or entry.offer is None or request.skip_reading_prefix_cache:
            return 0, False
        if request.num_preemptions > entry.preemptions:
            return 0, False  # reset and resumed within one step: what it had shall not come back
        offer = entry.offer
        if offer.tokens is None and not self._late(offer):
            return None, False
        tokens = min(offer.tokens or 0, entry.final_tokens)
        aligned = all(local_tokens % group.block_tokens == 0 for group in self._plain_groups)
        if tokens <= local_tokens or not aligned:
            return 0, False
        entry.local_tokens = local_tokens
        return tokens - local_tokens, True

    def _late(self, offer: Offer) -> bool:
        if offer.asked_s is None or self._now_s() < offer.asked_s + self._settings.deadline_s:
            return False
        offer.tokens = 0
        self.tally.add("late_answers", 1)
        return True

    def allocated(self, request: Any, ids: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine has blocks for `tokens` that were offered: load them with the next orders."""
        entry = self._entries.get(request.request_id)
        if entry is None or tokens == 0:
            return
        first, end = entry.local_tokens, entry.local_tokens + tokens
        offer = entry.offer
        whole = offer is not None and offer.tokens is not None and end <= offer.tokens
        if end % min(group.block_tokens for group in self._plain_groups):
            whole = whole and offer is not None and offer.restores and end == offer.tokens
        parts = []
        for index, (group, chain) in enumerate(zip(self._plain_groups, entry.chains, strict=True)):
            start = first // group.block_tokens
            mine = ids[index][: group.blocks(end)]
            while start < len(mine) and mine[start] == NULL_BLOCK:
                start += 1
            if offer is not None and offer.restores:
                whole = whole and start >= min(group.first_block(offer.tokens or 0), len(mine))
            if start < len(mine):
                keys = b"".join(chain.span(end, start))
                parts.append(Part(index, keys, list(mine[start:]), start, group.tail_tokens(end)))
        entry.load_tokens = tokens
        self._loads.append(Load(request.request_id, parts, whole))

    def finished(self, request: Any) -> None:
        """A request is over, however it ended."""
        entry = self._entries.pop(request.request_id, None)
        if entry is not None:
            self._forget_saves(entry)
            self._let_go(entry)

    def reset(self) -> None:
        """Nothing that was stored so far shall ever be offered again: other weights, it may be."""
        self._seed = os.urandom(16)
        self._saves.clear()
        for entry in self._entries.values():
            self._let_go(entry)
            entry.chains = self._chains(entry.request)
            entry.written_tokens = 0
            entry.offer = Offer(restores=False, tokens=0)

    def close(self) -> None:
        """Let go of everything that is held."""
        self._saves.clear()
        for entry in self._entries.values():
            self._let_go(entry)
        self._entries.clear()

    def _chains(self, request: Any) -> tuple[KeyChain, ...]:
        sizes = {group.block_tokens for group in self._plain_groups}
        chains = {size: KeyChain(request, size, self._extras, self._seed) for size in sizes}
        return tuple(chains[group.block_tokens] for group in self._plain_groups)

    # ------------------------------------------------------------------ a step

    def orders(self, step: Any) -> Orders:
        """What the workers do with the step that the scheduler has planned."""
        orders = Orders()
        for request_id in step.preempted_req_ids or ():
            entry = self._entries.get(request_id)
            if entry is not None:
                self._preempted(entry, step, orders)
        orders.loads, self._loads = self._loads, []
        for new in step.scheduled_new_reqs:
            self._scheduled(new.req_id, new.block_ids, True, new.num_computed_tokens, step, orders)
        cached = step.scheduled_cached_reqs
        news = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, ids, computed in news:
            fresh = request_id in cached.resumed_req_ids
            self._scheduled(request_id, ids, fresh, computed, step, orders)
        return orders

    def _preempted(self, entry: Entry, step: Any, orders: Orders) -> None:
        request, blocks = entry.request, entry.blocks
        self._let_go(entry)
        entry.preemptions = request.num_preemptions
        entry.lost_tokens = tokens = min(entry.computed, entry.final_tokens)
        entry.computed, entry.blocks = 0, [[] for _ in entry.chains]
        entry.offer = Offer(restores=True, tokens=0)
        self.tally.add("preemptions", 1)
        self.tally.add("lost_tokens", tokens)
        groups, link = self._groups, self._link
        if groups is None or link is None or not link.up or not tokens:
            return
        if request.drop_stale_output or request.skip_reading_prefix_cache:
            return  # the engine's cache was reset, or may not be read: it computes anew
        parts = self._parts(entry, blocks, tokens)
        if self._overwrites_first:
            parts = _untouched(parts, step)
        suspension = Suspension(request.request_id, tokens, parts)
        entry.offer.tokens = None
        orders.rescues.append(self._save(entry, suspension, parts))

    def _parts(self, entry: Entry, blocks: list[list[int]], end: int) -> list[Part]:
        parts = []
        for index, (group, chain) in enumerate(zip(self._plain_groups, entry.chains, strict=True)):
            first = group.first_block(end)
            ids = blocks[index][first : group.blocks(end)]
            keys = b"".join(chain.span(end, first)[: len(ids)])
            parts.append(Part(index, keys, ids, first, group.tail_tokens(end)))
        return parts

    def _save(self, entry: Entry, suspension: Suspension | None, parts: list[Part]) -> Save:
        assert self._groups is not None
        number = next(self._numbers)
        self._saves[number] = (entry, suspension, self._groups.ranks)
        return Save(number, parts)

    def _scheduled(
        self, request_id: str, ids: Any, fresh: bool, computed: int, step: Any, orders: Orders
    ) -> None:
        entry = self._entries.get(request_id)
        if entry is None:
            return
        if fresh:
            entry.blocks = [list(group) for group in ids]
            self._resumed(entry, computed)
        elif ids is not None:
            for mine, more in zip(entry.blocks, ids, strict=True):
                mine.extend(more)
        entry.computed = computed + step.num_scheduled_tokens[request_id]
        if entry.writes:
            self._write(entry, computed, orders)

    def _resumed(self, entry: Entry, computed: int) -> None:
        """A request runs (again): what was held for it is not needed any more."""
        lost, entry.lost_tokens = entry.lost_tokens, 0
        self.tally.add("recomputed_tokens", max(0, lost - computed))
        self.tally.add("recompute_avoided_tokens", min(lost, computed))
        offer, entry.offer = entry.offer, None
        if offer is not None and not offer.restores:
            hits = offer.tokens or 0
            self.tally.add("misses", int(offer.asked_s is not None and hits == 0))
            entry.written_tokens = max(entry.written_tokens, hits)
        self._let_go(entry)

    def _write(self, entry: Entry, before: int, orders: Orders) -> None:
        """Write through what is full after the step; a window's blocks only while it has them."""
        groups, link = self._groups, self._link
        if groups is None or link is None or not link.up:
            return
        end = groups.aligned(min(entry.computed, entry.final_tokens))
        start = groups.aligned(entry.written_tokens)
        if end <= start:
            return
        parts = []
        for index, (group, chain) in enumerate(zip(self._plain_groups, entry.chains, strict=True)):
            first = max(start // group.block_tokens, group.first_block(before))
            last = end // group.block_tokens
            ids = entry.blocks[index][first:last]
            if ids and NULL_BLOCK not in ids:
                keys = b"".join(chain.full(last, first))
                parts.append(Part(index, keys, ids, first, group.block_tokens))
        entry.written_tokens = end
        orders.writes.append(self._save(entry, None, parts))

    # ----------------------------------------------------------------- reports

    def heard(self, report: Report | None, loaded: Iterable[str]) -> None:
        """What the ranks have done, and which requests all of them have ended to load."""
        if report is not None:
            for number, ranks in report.ended.items():
                self._saved(number, ranks, number in report.failed)
        short = {} if report is None else report.short
        for request_id in loaded:
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            got = entry.load_tokens
            if request_id in short:
                got = max(0, min(got, short[request_id] - entry.local_tokens))
                self.tally.add("load_failures", 1)
            restores = entry.offer is not None and entry.offer.restores
            self.tally.add("restored_tokens" if restores else "prefix_hit_tokens", got)
            if entry.load_tokens > got:
                entry.offer = Offer(restores, tokens=0)  # it is not tried twice
            entry.load_tokens = 0

    def _saved(self, number: int, ranks: int, failed: bool) -> None:
        if failed:
            self.tally.add("save_failures", 1)
        under_way = self._saves.get(number)
        if under_way is None:
            return
        entry, suspension, missing = under_way
        if failed and suspension is None:
            entry.writes = False  # behind a hole nothing of its prefix would be found
        if missing > ranks:
            self._saves[number] = (entry, suspension, missing - ranks)
            return
        del self._saves[number]
        if suspension is None:
            return
        offer = entry.offer
        assert self._groups is not None and self._link is not None
        if offer is not None and offer.restores and offer.tokens is None:
            offer.asked_s = self._now_s()
            entry.suspension = suspension
            self._link.submit(Hold(offer, self._groups, suspension))

    # ------------------------------------------------------------------- ends

    def _forget_saves(self, entry: Entry) -> None:
        for number in [n for n, (owner, _, _) in self._saves.items() if owner is entry]:
            del self._saves[number]

    def _let_go(self, entry: Entry) -> None:
        suspension, entry.suspension = entry.suspension, None
        if suspension is not None and self._link is not None:
            self._link.submit(LetGo(suspension))


def _untouched(parts: list[Part], step: Any) -> list[Part]:
    """The leading blocks of each part that the step does not zero or copy over."""
    gone = set(step.new_block_ids_to_zero or ())
    gone.update(copy.dst_block_id for copy in step.kv_cache_block_copies or ())
    for part in parts if gone else ():
        keep = next((i for i, id in enumerate(part.ids) if id in gone), len(part.ids))
        part.ids, part.keys = part.ids[:keep], part.keys[: KEY_BYTES * keep]
    return parts
