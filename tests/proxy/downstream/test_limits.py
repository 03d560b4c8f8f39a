"""How long a client's connection may do what it does, on a clock that stands still."""

from __future__ import annotations

import errno
import inspect
import socket

import pytest
from hypercorn.asyncio.tcp_server import TCPServer

from ppd.proxy.downstream.connections import _address_key
from ppd.proxy.downstream.limits import (
    CLOSE_S,
    GOAWAY,
    LEFT_LIMIT,
    LINGER_S,
    ConnectionLimits,
    IdleConnections,
    Patience,
)
from tests.support.clock import FakeClock

PATIENCE = Patience(head_s=10.0, idle_s=75.0)


class FakeTransport:
    def __init__(self, own: socket.socket | None = None) -> None:
        self.own = own
        self.written = b""
        self.said = "open"
        self.unsent_bytes = 0

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self.own

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.said = "closed"

    def abort(self) -> None:
        self.said = "aborted"

    def write_eof(self) -> None:
        raise OSError(errno.ENOTCONN, "as asyncio's does where the client has reset the connection")

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_closing(self) -> bool:
        return self.said != "open"


class FakeRequest:
    def __init__(self, is_multiplexed: bool = False) -> None:
        self.is_multiplexed = is_multiplexed
        self.is_left = False

    def leave(self) -> None:
        self.is_left = True


def connection(clock: FakeClock, *, is_tls: bool = False) -> tuple[ConnectionLimits, FakeTransport]:
    transport = FakeTransport()
    return ConnectionLimits(transport, PATIENCE, clock, is_tls=is_tls), transport  # type: ignore[arg-type]


def play(tested: ConnectionLimits, clock: FakeClock, steps: list[str | float]) -> None:
    """A number lets seconds pass, "bytes" come, a request "begins" or "ends", the client takes nothing ("stalls"), or
    the proxy "closes"."""
    plain, multiplexed = FakeRequest(), FakeRequest(is_multiplexed=True)
    for step in steps:
        match step:
            case "bytes":
                tested.heard()
            case "begins":
                tested.began(plain)
            case "begins h2":
                tested.began(multiplexed)
            case "ends":
                tested.ended(plain, left=False)
            case "ends h2":
                tested.ended(multiplexed, left=False)
            case "stalls":
                tested.is_stalled = True
            case "closes":
                tested.close(CLOSE_S)
            case "closes gently":
                tested.close_gently(is_read=True)
            case float(seconds):
                clock.advance(seconds)
                tested.close_if_overdue()
            case _:
                raise ValueError(step)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([9.9], "open"),
        ([10.0], "closed"),  # nothing came
        ([9.0, "bytes", 9.9], "open"),
        ([9.0, "bytes", 5.0, "bytes", 5.0], "closed"),  # byte by byte
        (["bytes", "begins", 1000.0], "open"),
        (["bytes", "begins", 20.0, "bytes", 20.0, "ends", 74.0], "open"),
        (["bytes", "begins", "ends", 75.0], "closed"),
        (["bytes", "begins", "ends", 74.0, "bytes", 9.0], "open"),
        (["bytes", "begins", "ends", 30.0, "bytes", 10.0], "closed"),
        (["bytes", "begins", "ends", 30.0, "bytes", "begins", 100.0], "open"),
        (["begins h2", "begins", "ends", 100.0], "open"),  # another one is at work
        (["begins h2", "begins", "ends h2", 100.0], "open"),
        (["begins", "ends", "stalls", 100.0], "open"),  # that has a limit of its own
        (["begins", "closes", CLOSE_S], "aborted"),
        (["begins h2", "ends h2", 30.0, "bytes", 20.0], "open"),  # a PING, say
        (["begins h2", "ends h2", 30.0, "bytes", 45.0], "closed"),
        ([10.0, 4.9], "closed"),
        ([10.0, 5.0], "aborted"),  # its client does not take the rest
    ],
)
def test_a_connection_is_closed_when_its_client_is_late(clock: FakeClock, steps: list[str | float], said: str) -> None:
    tested, transport = connection(clock)
    play(tested, clock, steps)
    assert transport.said == said


def test_a_refused_connection_over_tls_ends_though_its_request_begins_late(clock: FakeClock) -> None:
    """Behind an application it begins in a task, and the parser may have refused the connection by then."""
    tested, transport = connection(clock)
    tested.is_tls, request = True, FakeRequest()
    tested.heard()
    tested.close_gently(is_read=False)
    tested.began(request)
    tested.ended(request, left=False)
    clock.advance(LINGER_S)
    tested.close_if_overdue()
    assert transport.said == "closed"


@pytest.mark.parametrize(
    ("is_tls", "is_read", "said"), [(True, True, "closed"), (True, False, "open"), (False, True, "open")]
)
def test_after_its_last_answer_a_connection_ends_whatever_still_comes(
    clock: FakeClock, is_tls: bool, is_read: bool, said: str
) -> None:
    """Without TLS it is half-closed, and read on until its client closes too."""
    tested, transport = connection(clock, is_tls=is_tls)
    tested.close_gently(is_read=is_read)
    tested.break_off()  # of an answer that is complete
    assert transport.said == said
    ended_s = clock() + CLOSE_S
    while clock() < ended_s and transport.said == "open":
        clock.advance(0.9 * LINGER_S)
        tested.heard()
        tested.lingers()
        tested.close_if_overdue()
    assert transport.said == "closed"


def test_without_tls_what_a_client_has_not_taken_in_time_is_dropped(clock: FakeClock) -> None:
    own, client = socket.socketpair()
    with own, client:
        transport = FakeTransport(own)
        tested = ConnectionLimits(transport, PATIENCE, clock)  # type: ignore[arg-type]
        own.send(b"the answer")
        tested.close(CLOSE_S)
        clock.advance(CLOSE_S)
        tested.close_if_overdue()
        assert transport.said == "aborted"


@pytest.mark.parametrize("is_last", [True, False], ids=["its last answer", "an idle connection"])
def test_over_tls_who_has_not_taken_its_answer_yet_is_not_cut_off(clock: FakeClock, is_last: bool) -> None:
    own, client = socket.socketpair()
    with own, client:
        transport = FakeTransport(own)
        tested = ConnectionLimits(transport, PATIENCE, clock, is_tls=True)  # type: ignore[arg-type]
        request = FakeRequest()
        tested.began(request)
        own.send(b"the answer")
        tested.ended(request, left=False)
        if is_last:
            tested.close_gently(is_read=True)
        else:
            clock.advance(PATIENCE.idle_s)
            tested.close_if_overdue()
        for _ in range(3):
            clock.advance(CLOSE_S)
            tested.close_if_overdue()
            assert transport.said == "closed"
        client.recv(100)
        tested.close_if_overdue()
        assert transport.said == "closed"  # the event loop may be about to give the kernel more
        clock.advance(CLOSE_S)
        tested.close_if_overdue()
        assert transport.said == "aborted"


def test_the_end_of_a_connection_that_its_client_has_reset_is_no_defect(clock: FakeClock) -> None:
    """The reset shows when the socket is read, which may be after the answer was written."""
    tested, transport = connection(clock)
    tested.heard()
    tested.close_gently(is_read=True)
    clock.advance(CLOSE_S)
    tested.close_if_overdue()
    assert transport.said == "closed"


@pytest.mark.parametrize(("heard", "told"), [(True, b"HTTP/1.1 408 Request Timeout\r\n"), (False, b"")])
def test_only_who_has_begun_a_head_is_told(clock: FakeClock, heard: bool, told: bytes) -> None:
    tested, transport = connection(clock)
    if heard:
        tested.heard()
    clock.advance(10)
    tested.close_if_overdue()
    assert transport.written.startswith(told)
    assert bool(transport.written) == heard


@pytest.mark.parametrize(
    ("whole", "left", "said"),
    [(0, LEFT_LIMIT, "open"), (0, LEFT_LIMIT + 1, "aborted"), (LEFT_LIMIT + 1, LEFT_LIMIT + 1, "open")],
)
def test_a_client_that_begins_and_leaves_without_end_is_cut_off(
    clock: FakeClock, whole: int, left: int, said: str
) -> None:
    tested, transport = connection(clock)
    for number in range(whole + left):
        request = FakeRequest(is_multiplexed=True)
        tested.began(request)
        tested.ended(request, left=number >= whole)
    assert transport.said == said


def test_an_answer_over_http2_that_cannot_be_completed_ends_its_connection_after_the_others(clock: FakeClock) -> None:
    tested, transport = connection(clock)
    broken, other = FakeRequest(is_multiplexed=True), FakeRequest(is_multiplexed=True)
    for request in (broken, other):
        tested.began(request)
    tested.spoil()
    tested.spoil()
    assert transport.written == GOAWAY
    for request, said in ((broken, "open"), (other, "closed")):
        tested.ended(request, left=False)
        clock.advance(CLOSE_S)
        tested.close_if_overdue()
        assert transport.said == said
    tested.go_away()
    assert transport.written == GOAWAY, "nothing can be written any more"


def test_requests_are_told_when_their_client_is_gone(clock: FakeClock) -> None:
    tested, _ = connection(clock)
    over, at_work, stream = FakeRequest(), FakeRequest(), FakeRequest(is_multiplexed=True)
    tested.began(over)
    tested.ended(over, left=False)
    tested.began(at_work)
    tested.began(stream)
    tested.lost()
    assert (over.is_left, at_work.is_left, stream.is_left) == (False, True, True)


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_address_is_what_one_host_can_have(host: str, key: str) -> None:
    assert _address_key(host) == key


def test_hypercorn_still_takes_a_connection_as_it_did() -> None:
    """The inner part of Hypercorn that is used: a new version that changes it must fail here, not in production."""
    assert list(inspect.signature(TCPServer).parameters) == "app loop config context state reader writer".split()


# -- places


class Place:
    def __init__(self, name: str, address: str = "a", *, may_close: bool = True) -> None:
        self.name, self.address, self.may_close = name, address, may_close

    def evict(self) -> bool:
        return self.may_close


def test_the_longest_idle_connection_makes_room() -> None:
    closed: list[str] = []

    class Noted(Place):
        def evict(self) -> bool:
            closed.append(self.name)
            return super().evict()

    idle = IdleConnections()
    first, taking, other, last = Noted("first", "b"), Noted("taking", may_close=False), Noted("other"), Noted("last")
    for one in (first, taking, other, last):
        idle.add(one)
    assert idle.evict("a") and closed == ["taking", "other"]
    assert idle.evict() and closed[2:] == ["first"]
    idle.discard(last)
    idle.discard(last)
    assert not idle.evict() and not idle.evict("b") and not idle.evict("nobody")
    taking.may_close = True
    assert idle.evict("a") and not idle.evict()
    assert not idle._by_address, "nothing is kept of an address without connections"


@pytest.mark.parametrize(
    ("is_tls", "is_stalled", "unsent_bytes", "said"),
    [(False, False, 0, "closed"), (True, False, 0, "aborted"), (False, True, 0, "open"), (True, False, 1, "open")],
)
def test_who_still_takes_an_answer_makes_no_room(
    clock: FakeClock, is_tls: bool, is_stalled: bool, unsent_bytes: int, said: str
) -> None:
    tested, transport = connection(clock, is_tls=is_tls)
    tested.is_stalled, transport.unsent_bytes = is_stalled, unsent_bytes
    assert tested.evict() == (said != "open")
    assert transport.said == said


@pytest.mark.parametrize(("sent", "may_be_closed"), [(b"", True), (b"GET", False), (None, True)])
def test_whose_request_lies_unread_makes_no_room(clock: FakeClock, sent: bytes | None, may_be_closed: bool) -> None:
    """sent: None: the client has closed its side."""
    own, client = socket.socketpair()
    with own, client:
        client.close() if sent is None else client.send(sent)
        tested = ConnectionLimits(FakeTransport(own), PATIENCE, clock)  # type: ignore[arg-type]
        assert tested.evict() == may_be_closed


def test_a_connection_that_made_room_is_gone_in_time_whatever_its_client_had_sent(clock: FakeClock) -> None:
    tested, transport = connection(clock)
    request = FakeRequest()
    assert tested.evict()
    tested.began(request)
    tested.ended(request, left=False)
    clock.advance(CLOSE_S)
    tested.close_if_overdue()
    assert transport.said == "aborted"


@pytest.mark.parametrize(
    ("steps", "is_idle"),
    [
        ([], True),
        (["bytes"], False),
        (["bytes", "begins"], False),
        (["bytes", "begins", "ends"], True),
        (["bytes", "begins", "ends", "bytes"], False),
        (["begins", "begins h2", "ends"], False),
        (["begins", "begins h2", "ends", "ends h2"], True),
        (["bytes", "begins", "closes", "ends"], False),
        (["bytes", "begins", "ends", "closes gently"], False),
        ([1000.0], False),
    ],
)
def test_a_connection_without_a_request_is_idle(clock: FakeClock, steps: list[str | float], is_idle: bool) -> None:
    idle, transport = IdleConnections(), FakeTransport()
    tested = ConnectionLimits(transport, PATIENCE, clock, address="a", idle=idle)  # type: ignore[arg-type]
    play(tested, clock, steps)
    assert idle.evict("a") == is_idle
    assert not idle.evict()


def test_while_nobody_looks_no_time_passes_for_a_client() -> None:
    clock = FakeClock()
    limits, transport = connection(clock)
    limits.heard()
    clock.advance(40.0)
    limits.excuse(39.0)
    limits.close_if_overdue()
    assert transport.said == "open"
    clock.advance(PATIENCE.head_s - 1.0)
    limits.close_if_overdue()
    assert transport.said == "closed"
