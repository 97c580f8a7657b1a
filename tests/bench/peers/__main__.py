"""Compares kvtierd with other stores of the same bytes, prints the tables and keeps the figures.

python -m tests.bench.peers [NAME ...]
"""

import signal
import sys
from collections.abc import Sequence
from typing import Final

from kvtierd.bench.figures import Cell, Figure, load, merge, middle, table
from tests.bench.peers import install
from tests.bench.peers.adapter_process import PeerFailed
from tests.bench.peers.adapters.peer import Times
from tests.bench.peers.run import Extent, Found, compare
from tests.bench.peers.stores import ONE_WAY, OURS, PEERS

RESULTS: Final = install.ROOT / "build" / "bench.json"
BUDGETS: Final = {
    "peer.lmcache.single1m.put_x": 5.0,
    "peer.lmcache.single1m.get_x": 5.0,
    "peer.lmcache.batch16m.put_x": 1.2,
    "peer.lmcache.batch16m.get_x": 1.2,
    "peer.mooncake_shm.single1m.put_x": 2.0,
    "peer.redis_unix.single1m.put_x": 3.0,
}


def ratio(times: Times, way: str) -> float:
    """The speed of one round as a part of memcpy's in the same round and process."""
    if way == "put":
        return times.memcpy_put_s / times.put_s
    return times.memcpy_get_s / times.get_s


def to_memcpy(found: Found) -> list[Figure]:
    """A store's speed against memcpy, for each case and way."""
    name = found.store.name
    return [
        middle(
            f"peer.{name}.{case}.{way}_ratio_memcpy",
            [ratio(times, way) for times in rounds],
            cell=Cell(f"{way}, part of memcpy", name, case),
        )
        for way in ("put", "get")
        for case, rounds in found.times.items()
    ]


def factors(ours: Found, peer: Found, ways: Sequence[str], suffix: str = "") -> list[Figure]:
    """kvtierd's speed over a peer's: the quotient of their ratios to memcpy, round by round."""
    return [
        middle(
            f"peer.{peer.store.name}.{case}.{way}{suffix}_x",
            [
                ratio(mine, way) / ratio(other, way)
                for mine, other in zip(rounds, peer.times[case], strict=True)
            ],
            cell=Cell(f"{way}, {ours.store.name} over", peer.store.name, case),
        )
        for way in ways
        for case, rounds in ours.times.items()
    ]


def figures(found: Sequence[Found]) -> list[Figure]:
    """All figures of a run; those with a budget once more, for a line of their own."""
    by_name = {one.store.name: one for one in found}
    ours, one_way = by_name.pop(OURS.name), by_name.pop(ONE_WAY.name)
    all_of_them = [figure for one in found for figure in to_memcpy(one)]
    for peer in by_name.values():
        all_of_them += factors(ours, peer, ("put", "get"))
        all_of_them += factors(one_way, peer, ("put",), "_oneway")
    judged = [
        middle(figure.name, figure.rounds, BUDGETS[figure.name])
        for figure in all_of_them
        if figure.name in BUDGETS
    ]
    return all_of_them + judged


def main(names: Sequence[str]) -> None:
    """Compare with the named stores, or with all."""
    if unknown := set(names) - {store.name for store in PEERS}:
        raise SystemExit(
            f"no store {', '.join(sorted(unknown))}; there are "
            f"{', '.join(store.name for store in PEERS)}"
        )
    for number in (signal.SIGINT, signal.SIGTERM):  # both unwind, so that all is cleaned up
        signal.signal(number, lambda *_: sys.exit("bench-peers: ended by a signal"))
    install.PEERS.mkdir(parents=True, exist_ok=True)
    chosen = [store for store in PEERS if not names or store.name in names]
    print(load(), flush=True)
    try:
        found = compare(
            [OURS, ONE_WAY, *chosen], Extent(), install.PEERS, lambda line: print(line, flush=True)
        )
    except PeerFailed as why:
        raise SystemExit(f"bench-peers: kvtierd itself could not be measured: {why}") from None
    measured = figures(found)
    merge(RESULTS, measured)
    print(f"{load()}\n\n{table(measured)}")


if __name__ == "__main__":
    main(sys.argv[1:])
