"""What the fuzzers found, one promise each; the inputs themselves are in `regressions`."""

import os
import socket
from collections.abc import Iterator

import pytest

from kvtier_client import wire
from kvtier_client.errors import ProtocolError
from kvtier_client.protocol import Protocol
from kvtierd.catalog.errors import CatalogDamaged
from kvtierd.core.slabs import CLEARING, FREE, READY
from kvtierd.tiers.holder import HolderKeeper, KeeperError
from tests.fuzz import machine, script
from tests.fuzz.line import frame
from tests.fuzz.machine import Machine
from tests.fuzz.media import RECORD_SUMMED, _sealed
from tests.fuzz.small import _WELCOME, BOOT
from tests.support.descriptors import descriptors
from tests.support.raw import u32

KNOWN = script.PRINTS[0]


@pytest.fixture
def host() -> Iterator[Machine]:
    """A host with a session that has four blocks in DRAM."""
    with machine.installed(lambda: made), machine.running(made := Machine()):
        run = script.Run(made)
        for step in (
            ["register_layout", None, script.LAYOUTS[0]],
            ["open_session", None, script.TOKENS[0], [KNOWN], 0, "s"],
            ["reserve", None, 1, KNOWN, 4],
            ["commit", None, script.given("lease", 0), script.given("session", 0), 0,
             u32(0, 1, 2, 3), u32(0, 1, 2, 3), u32(16, 16, 16, 16)],
        ):  # fmt: skip
            run.take([script.FRAME, 0, step])
        assert made.kinds["done"] == 1
        yield made
        made.check()
        made.drain()
    made.close()


def pool(host: Machine, tenant: str = "a") -> machine.Any:
    return host.world.tenants[tenant].pools[KNOWN]


def test_a_word_that_no_arena_has_is_a_free_slot(host: Machine) -> None:
    """CLEARING is a state of spill files; found in an arena, the slot is free."""
    headers = host.arenas["a"].headers
    spare = next(slot for slot, word in enumerate(headers.words.tolist()) if not word & 0xFF)
    headers.words[spare] = CLEARING
    host.restart()
    assert headers is not host.arenas["a"].headers
    assert int(host.arenas["a"].headers.words[spare]) & 0xFF == FREE
    assert pool(host).dram.counts[READY] == 4


def slab_of(host: Machine) -> int:
    (slab,) = pool(host).dram.free
    return int(slab)


def edit_slab(host: Machine, at: int, value: int, *, seal: bool) -> int:
    """Change four bytes of the directory entry of the slab that has the blocks."""
    headers, slab = host.arenas["a"].headers, slab_of(host)
    start = headers.geometry.directory_offset + slab * 64
    record = bytearray(os.pread(headers.fd, 64, start))
    if seal:
        _sealed(record, 0, RECORD_SUMMED, at, value)
    else:
        record[at : at + 4] = value.to_bytes(4, "little")
    os.pwrite(headers.fd, record, start)
    return slab


@pytest.mark.parametrize("seal", [False, True], ids=["damaged", "cut otherwise"])
def test_a_slab_of_an_arena_that_is_not_believed_goes_to_nobody(host: Machine, seal: bool) -> None:
    """A client of an earlier life may still write there; and what is in it is not served."""
    slab = edit_slab(host, 24, 1, seal=seal)  # its number of slots
    host.restart()
    arena = host.world.tenants["a"].arena
    assert slab not in arena.free_slabs
    assert slab not in pool(host).dram.free
    assert pool(host).dram.counts[READY] == 0
    run = script.Run(host)
    for lease in range(8):
        run.take([script.FRAME, 1, ["reserve", None, 50 + lease, KNOWN, 8]])
    assert slab not in pool(host).dram.free


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM layouts",
        "UPDATE sessions SET since_seq = -9",
        "UPDATE sessions SET idle_s = -1.0",
        "UPDATE sessions SET idle_s = 9e999",
        "UPDATE nodes SET retention_seq = -1",
        "UPDATE nodes SET retention = 7",
    ],
)
def test_rows_of_the_catalog_that_contradict_each_other_refuse_the_start(
    host: Machine, change: str
) -> None:
    host.notebook.spoil = lambda catalog: catalog._db.execute(change)
    with pytest.raises(CatalogDamaged, match="restore"):
        host.restart()
    host.notebook.spoil = lambda catalog: None
    host.restart()


@pytest.mark.parametrize(
    "answers",
    [[(b".", 1)], [(b"=a", 1), (b"=a", 1)], [(b"=\xff", 1)], [(b"=" + b"n" * 129, 1)], [(b"=", 1)]],
    ids=["end with a descriptor", "a name twice", "no text", "a long name", "no name"],
)
def test_a_holder_that_lies_is_refused_and_no_descriptor_stays(
    answers: list[tuple[bytes, int]],
) -> None:
    before = descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = HolderKeeper.__new__(HolderKeeper)
    keeper._path, keeper._deadline_s, keeper._socket = "holder", 30.0, theirs
    with ours, theirs:
        theirs.settimeout(30.0)
        for packet, count in answers:
            socket.send_fds(ours, [packet], [0] * count)
        with pytest.raises(KeeperError, match="answered"):
            keeper.take_all()
    assert descriptors().items() <= before.items()


def test_an_error_that_names_pages_in_odd_bytes_is_a_protocol_error() -> None:
    protocol = Protocol("t", bytes(16), bytes(16))
    protocol.open()
    protocol.receive(frame(script.encode(_WELCOME)))
    protocol.submit(wire.GetBlob(protocol.next_id(), 1, 0))
    with pytest.raises(ProtocolError, match="pages"):
        protocol.receive(frame(script.encode(["error", 2, BOOT, 0, 402, "lost", b"odd"])))


def test_an_id_that_is_no_number_is_answered_as_none(host: Machine) -> None:
    """`true` is no id, although Python counts it as 1."""
    line = host.connect(5, 4)
    line.say(frame(script.encode(script.hello(1))))
    line.say(frame(script.encode(["no_such_verb", True])))
    assert host.kinds["204"] == 1
    line.settle()
