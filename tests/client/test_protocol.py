"""The connection as a pure state machine: bytes in, bytes out, no socket and no clock."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_client import wire
from kvtier_client.errors import (
    ArenaFull,
    ConnectionLost,
    InvalidArgument,
    NotOwner,
    ProtocolError,
    UnknownSession,
)
from kvtier_client.protocol import FRAME_LIMIT_BYTES, Pending, Phase, Protocol
from tests.client.conftest import LAYOUT
from tests.client.scripted import LIMITS

encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(wire.ClientRequest)


def said(protocol: Protocol) -> list[wire.ClientRequest]:
    data, requests = protocol.take_outbox(), []
    while data:
        length = int.from_bytes(data[:4], "little")
        requests.append(decoder.decode(data[4 : 4 + length]))
        data = data[4 + length :]
    return requests


def hear(protocol: Protocol, *replies: wire.Reply) -> None:
    protocol.receive(b"".join(wire.frame(reply, encoder) for reply in replies))


def greet(
    protocol: Protocol, boot: int = 1, limits: wire.Limits = LIMITS, lost: tuple[int, ...] = ()
) -> wire.Hello:
    protocol.open()
    (hello,) = said(protocol)
    assert isinstance(hello, wire.Hello)
    hear(
        protocol,
        wire.Welcome(
            hello.id, boot, 0, wire.PROTOCOL_VERSION, "test", b"i" * 16, "default", 5,
            b"a" * 16, 4096, "spill", limits, list(lost),
        ),
    )  # fmt: skip
    return hello


def connected(limits: wire.Limits = LIMITS) -> Protocol:
    protocol = Protocol("test", b"g" * 16, b"s" * 16)
    greet(protocol, limits=limits)
    assert protocol.phase is Phase.READY
    return protocol


def cancel(protocol: Protocol, ticket: int = 1) -> Pending:
    return protocol.submit(wire.Cancel(protocol.next_id(), ticket))


def commit(protocol: Protocol, page: int) -> Pending:
    one = np.array([page], "<u4").tobytes()
    request = wire.Commit(protocol.next_id(), 1, 2, 0, one, one, one)
    return protocol.submit(request, oneway=True)


def id_of(pending: Pending) -> int:
    assert pending.request is not None
    return pending.request.id


def test_replies_find_their_requests_in_any_order() -> None:
    protocol = connected()
    first, second = cancel(protocol), cancel(protocol)
    hear(protocol, wire.Done(id_of(second), 1, 0, 2), wire.Done(id_of(first), 1, 0, 1))
    assert (first.value(wire.Done).count, second.value(wire.Done).count) == (1, 2)


def test_a_typed_error_is_raised_with_its_pages() -> None:
    protocol = connected()
    pending = cancel(protocol)
    pages = np.array([3, 9], "<u4").tobytes()
    hear(protocol, wire.Error(id_of(pending), 1, 0, ArenaFull.code, "full", pages))
    with pytest.raises(ArenaFull, match="full") as caught:
        pending.value(wire.Done)
    assert caught.value.pages == (3, 9)


def test_an_answer_of_another_kind_is_a_protocol_error() -> None:
    protocol = connected()
    pending = cancel(protocol)
    hear(protocol, wire.Blob(id_of(pending), 1, 0, 1, b""))
    with pytest.raises(ProtocolError, match="Cancel was answered by Blob"):
        pending.value(wire.Done)


def test_nothing_but_hello_is_sent_before_welcome() -> None:
    protocol = Protocol("test", b"g" * 16, b"s" * 16)
    pending = cancel(protocol)
    assert said(protocol) == []
    greet(protocol)
    assert said(protocol) == [pending.request]


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_frames_may_arrive_in_any_pieces(cuts: list[int]) -> None:
    protocol = connected()
    pendings = [cancel(protocol) for _ in range(4)]
    stream = b"".join(wire.frame(wire.Done(id_of(p), 1, 0, 1), encoder) for p in pendings)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in itertools.pairwise(edges):
        protocol.receive(stream[start:end])
    assert [p.value(wire.Done).count for p in pendings] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x93\xa4done\x01", msgspec.msgpack.encode(["nonsense", 1, 1, 0]),
     msgspec.msgpack.encode(["done", "one", 1, 0]), msgspec.msgpack.encode({"done": 1})],
)  # fmt: skip
def test_a_malformed_reply_breaks_the_connection_and_nothing_else(body: bytes) -> None:
    protocol = connected()
    pending = cancel(protocol)
    with pytest.raises(ProtocolError, match="decoded"):
        protocol.receive(wire.FRAME_HEADER.pack(len(body)) + body)
    protocol.lost()
    said(protocol)
    greet(protocol)
    assert said(protocol) == [pending.request]


@given(noise=st.binary(min_size=5, max_size=64))
def test_noise_is_a_protocol_error_or_an_unfinished_frame(noise: bytes) -> None:
    protocol = connected()
    try:
        protocol.receive(noise)
    except ProtocolError:
        return
    assert int.from_bytes(noise[:4], "little") > len(noise) - 4


def test_an_oversized_reply_is_refused_before_it_is_read() -> None:
    protocol = connected()
    with pytest.raises(ProtocolError, match="limit"):
        protocol.receive(wire.FRAME_HEADER.pack(FRAME_LIMIT_BYTES + 1))


def test_an_oversized_request_is_refused_before_it_is_sent() -> None:
    protocol = connected()
    big = wire.PutBlob(protocol.next_id(), 1, 0, 1, bytes(LIMITS.frame_bytes))
    with pytest.raises(InvalidArgument, match=r"limits\.frame_bytes"):
        protocol.submit(big)
    assert said(protocol) == []
    assert protocol.unsettled == 0


def test_a_reply_of_another_life_ends_the_connection() -> None:
    protocol = connected()
    pending = cancel(protocol)
    with pytest.raises(ConnectionLost, match="boot"):
        hear(protocol, wire.Done(id_of(pending), 2, 0))
    assert not pending.done


def test_a_reply_to_a_request_never_sent_is_a_protocol_error() -> None:
    protocol = connected()
    with pytest.raises(ProtocolError, match="never sent"):
        hear(protocol, wire.Done(1000, 1, 0))


def test_a_late_reply_is_dropped() -> None:
    protocol = connected()
    pending = cancel(protocol)
    protocol.abandon(pending)
    hear(protocol, wire.Done(id_of(pending), 1, 0))
    with pytest.raises(ConnectionLost, match="given up"):
        pending.value(wire.Done)


def test_a_grant_that_comes_too_late_is_given_back() -> None:
    protocol = connected()
    write = protocol.submit(wire.Reserve(protocol.next_id(), 1, b"l" * 16, 1))
    read = protocol.submit(wire.Acquire(protocol.next_id(), 2, 1, 0, b"l" * 16, 0, 1))
    protocol.abandon(write)
    protocol.abandon(read)
    said(protocol)
    hear(protocol, wire.Granted(id_of(write), 1, 0, 11, 60.0, bytes(8)))
    hear(protocol, wire.Granted(id_of(read), 1, 0, 12, 60.0, bytes(8), bytes(4)))
    abort, release = said(protocol)
    assert isinstance(abort, wire.Abort)
    assert isinstance(release, wire.Release)
    assert (abort.lease, release.lease) == (11, 12)


def test_what_a_lost_reply_may_have_granted_is_given_back_when_its_caller_gives_up() -> None:
    protocol = connected()
    layout = b"l" * 16
    before = protocol.submit(wire.Reserve(protocol.next_id(), 1, layout, 1))
    after = protocol.submit(wire.AcquireKeys(protocol.next_id(), 2, layout, b"k" * 16))
    said(protocol)
    protocol.abandon(before)
    protocol.lost()
    protocol.abandon(after)
    protocol.abandon(protocol.submit(wire.Reserve(protocol.next_id(), 3, layout, 1)))  # never sent
    greet(protocol)
    abort, release = said(protocol)
    assert isinstance(abort, wire.Abort)
    assert isinstance(release, wire.Release)
    assert (abort.lease, release.lease) == (5 << 32 | 1, 5 << 32 | 2)
    protocol.lost()
    greet(protocol)
    assert said(protocol) == [abort, release]


@pytest.mark.parametrize("kind", [wire.Abort, wire.Release, wire.CloseSession])
def test_what_gives_back_is_sent_though_its_caller_gave_up_while_there_was_no_connection(
    kind: type[wire.Abort | wire.Release | wire.CloseSession],
) -> None:
    protocol = connected()
    protocol.lost()
    given = protocol.submit(kind(protocol.next_id(), 11))
    protocol.abandon(given)
    greet(protocol)
    assert said(protocol) == [given.request]
    hear(protocol, wire.Done(id_of(given), 1, 0))
    assert given.done
    assert protocol.unsettled == 0


def test_another_life_of_the_daemon_keeps_no_lease_that_hello_does_not_list() -> None:
    protocol = connected()
    protocol.abandon(protocol.submit(wire.Reserve(protocol.next_id(), 1, b"l" * 16, 1)))
    protocol.lost()
    greet(protocol, boot=2)
    assert said(protocol) == []


def test_a_repeat_given_up_before_its_turn_has_its_first_grant_given_back() -> None:
    protocol = connected(msgspec.structs.replace(LIMITS, requests_in_flight=2))
    busy = cancel(protocol)
    write = protocol.submit(wire.Reserve(protocol.next_id(), 1, b"l" * 16, 1))
    protocol.lost()
    greet(protocol, limits=msgspec.structs.replace(LIMITS, requests_in_flight=1))
    protocol.abandon(write)
    assert said(protocol) == [busy.request]
    hear(protocol, wire.Done(id_of(busy), 1, 0))
    (abort,) = said(protocol)
    assert isinstance(abort, wire.Abort)
    assert abort.lease == 5 << 32 | 1


def test_no_more_requests_are_in_flight_than_the_daemon_accepts() -> None:
    protocol = connected(msgspec.structs.replace(LIMITS, requests_in_flight=2))
    pendings = [cancel(protocol, ticket) for ticket in range(5)]
    assert said(protocol) == [p.request for p in pendings[:2]]
    protocol.abandon(pendings[2])
    hear(protocol, wire.Done(id_of(pendings[0]), 1, 0))
    assert said(protocol) == [pendings[3].request]


# --------------------------------------------------------------- reconnecting


def test_unanswered_requests_are_repeated_in_order_and_unchanged() -> None:
    protocol = connected()
    answered, first, second = cancel(protocol), cancel(protocol, 2), cancel(protocol, 3)
    hear(protocol, wire.Done(id_of(answered), 1, 0))
    protocol.lost()
    greet(protocol, boot=2)
    assert said(protocol) == [first.request, second.request]
    hear(protocol, wire.Done(id_of(second), 2, 0), wire.Done(id_of(first), 2, 0))
    assert first.done
    assert second.done


def test_sessions_and_layouts_are_restored_before_anything_is_repeated() -> None:
    protocol = connected()
    protocol.sessions[9] = b"t" * 16
    protocol.layouts[LAYOUT.fingerprint()] = LAYOUT
    pending = cancel(protocol)
    protocol.lost()
    greet(protocol, boot=2)
    resume, register = said(protocol)
    assert isinstance(resume, wire.ResumeSession)
    assert isinstance(register, wire.RegisterLayout)
    assert (resume.token, register.layout) == (b"t" * 16, LAYOUT)
    hear(protocol, wire.SessionReply(resume.id, 2, 0, 9, False, 0, [], []))
    assert said(protocol) == []
    hear(protocol, wire.LayoutRegistered(register.id, 2, 0, LAYOUT.fingerprint(), 4096, 4096))
    assert said(protocol) == [pending.request]


def test_a_session_that_ended_meanwhile_does_not_stop_the_others() -> None:
    protocol = connected()
    protocol.sessions[9] = b"t" * 16
    protocol.lost()
    greet(protocol, boot=2)
    (resume,) = said(protocol)
    hear(protocol, wire.Error(resume.id, 2, 0, UnknownSession.code, "gone"))
    assert protocol.phase is Phase.READY


def test_no_more_is_restored_at_a_time_than_the_daemon_accepts() -> None:
    protocol = connected()
    protocol.sessions |= {session: bytes([session]) * 16 for session in range(9)}
    protocol.layouts[LAYOUT.fingerprint()] = LAYOUT
    pending = cancel(protocol)
    protocol.lost()
    greet(protocol, boot=2, limits=msgspec.structs.replace(LIMITS, requests_in_flight=4))
    restored: list[wire.ClientRequest] = []
    while protocol.phase is Phase.RESTORING:
        asked = said(protocol)
        assert 0 < len(asked) <= 4
        restored += asked
        hear(protocol, *(wire.Error(r.id, 2, 0, UnknownSession.code, "gone") for r in asked))
    assert [type(r) for r in restored] == [wire.ResumeSession] * 9 + [wire.RegisterLayout]
    assert said(protocol) == [pending.request]


def test_requests_that_wait_for_their_turn_and_are_given_up_are_forgotten() -> None:
    protocol = connected(msgspec.structs.replace(LIMITS, requests_in_flight=1))
    busy = cancel(protocol)
    for _ in range(3):
        protocol.abandon(cancel(protocol))
    assert len(protocol._backlog) == 0
    last = cancel(protocol)
    assert said(protocol) == [busy.request]
    hear(protocol, wire.Done(id_of(busy), 1, 0))
    assert said(protocol) == [last.request]


def test_hello_names_the_member_and_the_leases_still_held() -> None:
    protocol = connected()
    protocol.held[77] = wire.HeldLease(77, True, bytes(16))
    protocol.lost()
    hello = greet(protocol, boot=2, lost=(77,))
    assert hello.member == 5
    assert hello.leases == [wire.HeldLease(77, True, bytes(16))]
    assert protocol.held == {}


def test_a_refused_hello_raises_what_the_daemon_says() -> None:
    protocol = Protocol("test", b"g" * 16, b"s" * 16)
    protocol.open()
    (hello,) = said(protocol)
    with pytest.raises(NotOwner, match="uid"):
        hear(protocol, wire.Error(hello.id, 1, 0, NotOwner.code, "uid 7 is not listed"))


def test_another_protocol_version_is_refused() -> None:
    protocol = Protocol("test", b"g" * 16, b"s" * 16)
    protocol.open()
    (hello,) = said(protocol)
    with pytest.raises(ProtocolError, match="matching versions"):
        hear(protocol, wire.Welcome(hello.id, 1, 0, 99, "d", b"", "t", 0, b"", 1, "spill", LIMITS))


def test_a_stopping_daemon_gets_the_request_again_in_its_next_life() -> None:
    protocol = connected()
    pending = cancel(protocol)
    said(protocol)
    hear(protocol, wire.Error(id_of(pending), 1, 0, 501, "stopping"))
    assert protocol.leaving
    assert not pending.done
    protocol.lost()
    greet(protocol, boot=2)
    assert said(protocol) == [pending.request]


# ------------------------------------------------------------------- one-way


def test_one_way_requests_end_with_the_cumulative_acknowledgement() -> None:
    protocol = connected()
    commits = [commit(protocol, page) for page in range(3)]
    numbers = [request.oneway for request in said(protocol) if isinstance(request, wire.Commit)]
    assert numbers == [1, 2, 3]
    probe = cancel(protocol)
    hear(protocol, wire.Done(id_of(probe), 1, 2))
    assert [one.done for one in commits] == [True, True, False]
    assert protocol.unacked == [commits[2]]


def test_a_failed_one_way_request_carries_its_error_and_others_go_on() -> None:
    protocol = connected()
    bad, good = commit(protocol, 0), commit(protocol, 1)
    probe = cancel(protocol)
    hear(
        protocol,
        wire.Failed(id_of(bad), 1, 0, UnknownSession.code, "gone"),
        wire.Done(id_of(probe), 1, 2),
    )
    assert isinstance(bad.error, UnknownSession)
    assert good.done
    assert good.error is None


def test_unacknowledged_one_way_requests_are_repeated_and_numbered_anew() -> None:
    protocol = connected()
    commits = [commit(protocol, page) for page in range(3)]
    hear(protocol, wire.Done(id_of(cancel(protocol)), 1, 1))
    protocol.lost()
    greet(protocol, boot=2)
    again = said(protocol)
    assert [(r.id, r.oneway) for r in again if isinstance(r, wire.Commit)] == [
        (id_of(commits[1]), 1),
        (id_of(commits[2]), 2),
    ]


def test_pushes_wait_as_events_in_their_order() -> None:
    protocol = connected()
    protocol.events.clear()
    pushes = [
        wire.Pressure(0, 1, 0, 1, 4096),
        wire.Revoke(0, 1, 0, 9),
        wire.Ready(0, 1, 0, 3, 1, 0),
    ]
    hear(protocol, *pushes)
    assert list(protocol.events) == pushes
