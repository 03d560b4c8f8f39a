"""Our side of HTTP/2 against the client's side of another library, and against clients that break the protocol."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.gateway.wire.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    FRAME_LIMIT_BYTES,
    PADDED,
    PREFACE,
    Code,
    FrameType,
    frame,
)
from ppd.proxy.gateway.wire.heads import HEAD_LIMIT_BYTES
from ppd.proxy.gateway.wire.http2 import RESIZED_ANYHOW, RESIZED_EACH, WINDOW_BYTES
from tests.proxy.gateway.connections import EchoServer, echoed

HEAD = [(":method", "POST"), (":path", "/a.B/C"), (":scheme", "http"), (":authority", "x")]
BLOCK = b"\x83\x84\x86"  # :method POST, :path /, :scheme http


def exchange(server: EchoServer, client: h2.connection.H2Connection) -> list[h2.events.Event]:
    events: list[h2.events.Event] = []
    while (sent := client.data_to_send()) or server.out:
        if sent:
            assert server.connection.receive(sent)
        got, server.out[:] = bytes(server.out), b""
        events += client.receive_data(got)
    return events


def client() -> h2.connection.H2Connection:
    made = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    made.initiate_connection()
    return made


@pytest.mark.parametrize("size", [0, 1, 16_384, 65_535, 65_536, 3_000_000])
def test_a_body_comes_and_goes_whole_whatever_its_size(size: int) -> None:
    server, one = EchoServer(), client()
    exchange(server, one)
    one.send_headers(1, HEAD)
    body, got = bytes(range(256)) * (size // 256) + bytes(size % 256), b""
    ended, at = False, 0
    while not ended:
        room = min(one.local_flow_control_window(1), one.max_outbound_frame_size, len(body) - at)
        if room or at == len(body):
            is_last = at + room == len(body)
            if at < len(body) or not body:
                one.send_data(1, body[at : at + room], end_stream=is_last)
                at = at + room if body else 1
        for event in exchange(server, one):
            if isinstance(event, h2.events.DataReceived):
                got += event.data or b""
                one.acknowledge_received_data(event.flow_controlled_length or 0, 1)
            ended = ended or isinstance(event, h2.events.StreamEnded)
    assert got == body
    assert not server.connection.streams
    assert dict(server.calls[0][1])[b":path"] == b"/a.B/C"


def test_what_the_peer_does_not_take_yet_waits_and_trailers_come_after_it() -> None:
    server, one = EchoServer(), client()
    one.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 10})
    exchange(server, one)
    one.send_headers(1, HEAD)
    one.send_data(1, b"x" * 25, end_stream=True)
    got = [event for event in exchange(server, one) if isinstance(event, h2.events.DataReceived)]
    assert b"".join(event.data or b"" for event in got) == b"x" * 10
    one.increment_flow_control_window(15, 1)
    later = exchange(server, one)
    assert b"".join(event.data or b"" for event in later if isinstance(event, h2.events.DataReceived)) == b"x" * 15
    assert any(isinstance(event, h2.events.StreamEnded) for event in later)


def test_a_reset_reaches_the_call_and_frees_it() -> None:
    server, one = EchoServer(), client()
    exchange(server, one)
    one.send_headers(1, HEAD)
    one.reset_stream(1)
    exchange(server, one)
    assert server.calls[0][0].is_reset
    assert not server.connection.streams
    server.calls[0][0].half_closed()  # an answer that comes too late goes nowhere
    assert not server.out


def test_after_a_goaway_no_stream_is_opened_and_open_ones_end() -> None:
    server, one = EchoServer(), client()
    exchange(server, one)
    one.send_headers(1, HEAD)
    exchange(server, one)
    server.connection.go_away()
    server.out[:] = b""
    assert server.connection.receive(frame(FrameType.HEADERS, END_HEADERS | END_STREAM, 3, BLOCK))
    assert server.answers() == [(FrameType.RST_STREAM, 0, 3, struct.pack(">I", Code.REFUSED_STREAM))]
    assert server.connection.receive(frame(FrameType.DATA, END_STREAM, 1, b"late"))
    assert b"late" in server.out


def opened(flags: int = END_HEADERS) -> bytes:
    return frame(FrameType.HEADERS, flags, 1, BLOCK)


CLOSED = opened(END_HEADERS | END_STREAM)
INITIAL_WINDOW, MAX_FRAME = 4, 5


def setting(name: int, value: int) -> bytes:
    return frame(FrameType.SETTINGS, 0, 0, struct.pack(">HI", name, value))


def widened(stream: int, by: int) -> bytes:
    return frame(FrameType.WINDOW_UPDATE, 0, stream, struct.pack(">I", by))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(FrameType.DATA, 0, 0, b"x"), Code.PROTOCOL_ERROR),
        (frame(FrameType.DATA, 0, 5, b"x"), Code.PROTOCOL_ERROR),
        (opened() + frame(FrameType.DATA, PADDED, 1, b"\x05ab"), Code.PROTOCOL_ERROR),
        (frame(FrameType.HEADERS, END_HEADERS, 2, BLOCK), Code.PROTOCOL_ERROR),
        (CLOSED + opened(), Code.STREAM_CLOSED),
        (frame(FrameType.HEADERS, END_HEADERS, 1, b"\xff\xff\xff"), Code.COMPRESSION_ERROR),
        (opened(0) + frame(FrameType.DATA, 0, 1, b"x"), Code.PROTOCOL_ERROR),
        (opened(0) + frame(FrameType.CONTINUATION, END_HEADERS, 3, b""), Code.PROTOCOL_ERROR),
        (opened(0) + frame(FrameType.CONTINUATION, 0, 1, b""), Code.ENHANCE_YOUR_CALM),
        (opened(0) + 2 * frame(FrameType.CONTINUATION, 0, 1, bytes(HEAD_LIMIT_BYTES // 2)), Code.ENHANCE_YOUR_CALM),
        (frame(FrameType.CONTINUATION, END_HEADERS, 1, b""), Code.PROTOCOL_ERROR),
        (frame(FrameType.PUSH_PROMISE, 0, 1, b""), Code.PROTOCOL_ERROR),
        (frame(FrameType.PING, 0, 0, b"short"), Code.FRAME_SIZE_ERROR),
        (frame(FrameType.PING, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
        (frame(FrameType.SETTINGS, 0, 0, b"12345"), Code.FRAME_SIZE_ERROR),
        (frame(FrameType.SETTINGS, 0, 1, b""), Code.PROTOCOL_ERROR),
        (frame(FrameType.SETTINGS, ACK, 0, bytes(6)), Code.FRAME_SIZE_ERROR),
        (setting(INITIAL_WINDOW, 1 << 31), Code.FLOW_CONTROL_ERROR),
        (setting(MAX_FRAME, 1), Code.PROTOCOL_ERROR),
        (widened(0, 0), Code.PROTOCOL_ERROR),
        (widened(0, (1 << 31) - 1), Code.FLOW_CONTROL_ERROR),
        (widened(9, 1), Code.PROTOCOL_ERROR),
        (opened() + widened(1, 1 << 30) + setting(INITIAL_WINDOW, 1 << 30), Code.FLOW_CONTROL_ERROR),
        (frame(FrameType.WINDOW_UPDATE, 0, 0, b"abc"), Code.FRAME_SIZE_ERROR),
        (frame(FrameType.RST_STREAM, 0, 1, bytes(4)), Code.PROTOCOL_ERROR),
        (opened() + frame(FrameType.RST_STREAM, 0, 1, b""), Code.FRAME_SIZE_ERROR),
        ((FRAME_LIMIT_BYTES + 1).to_bytes(3) + bytes(6), Code.FRAME_SIZE_ERROR),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection(sent: bytes, code: Code) -> None:
    server = EchoServer()
    server.out[:] = b""
    assert not server.connection.receive(PREFACE + sent)
    kind, _, stream, payload = server.answers()[-1]
    assert (kind, stream, payload[4:]) == (FrameType.GOAWAY, 0, struct.pack(">I", code))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (CLOSED + frame(FrameType.DATA, 0, 1, b"x"), None),  # the call is answered and gone: it was on its way
        (opened() + opened(), Code.PROTOCOL_ERROR),  # trailers that do not end the stream
        (opened() + widened(1, 0), Code.PROTOCOL_ERROR),
        (opened() + widened(1, (1 << 31) - 1), Code.FLOW_CONTROL_ERROR),
    ],
)
def test_what_breaks_one_stream_ends_that(sent: bytes, code: Code | None) -> None:
    server = EchoServer()
    assert server.connection.receive(PREFACE + sent)
    resets = [payload for kind, _, _, payload in server.answers() if kind == FrameType.RST_STREAM]
    assert resets == ([] if code is None else [struct.pack(">I", code)])
    assert not server.connection.streams


def test_a_peer_that_sends_more_than_it_may_is_cut_off() -> None:
    server = EchoServer()
    assert server.connection.receive(PREFACE + opened())
    server.calls[0][0].stream.received_bytes = WINDOW_BYTES  # as if no window had been given back
    assert server.connection.receive(frame(FrameType.DATA, 0, 1, b"x"))
    assert server.calls[0][0].is_reset


def test_unknown_frames_pings_and_settings_are_as_the_rfc_has_them() -> None:
    server = EchoServer()
    server.answers()
    assert server.connection.receive(
        PREFACE + frame(99, 255, 7, b"?") + frame(FrameType.PING, 0, 0, b"12345678") + setting(99, 1)
    )
    assert server.answers() == [(FrameType.PING, ACK, 0, b"12345678"), (FrameType.SETTINGS, ACK, 0, b"")]


def waiting_server(streams: int, *, first: bytes) -> EchoServer:
    """Each stream has ten bytes to send, as far as the settings in `first` let it."""
    server = EchoServer()
    assert server.connection.receive(PREFACE + first)
    for number in range(1, 2 * streams, 2):
        head = frame(FrameType.HEADERS, END_HEADERS, number, BLOCK)
        assert server.connection.receive(head + frame(FrameType.DATA, END_STREAM, number, bytes(10)))
    server.answers()
    return server


def calls(work: Callable[[], object]) -> int:
    """How many Python functions it calls."""
    count = 0

    def counts(_frame: object, event: str, _arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counts)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


RESIZED = struct.pack(">HI", INITIAL_WINDOW, 1) + struct.pack(">HI", INITIAL_WINDOW, 0)


@pytest.mark.parametrize(
    ("sent", "most"),
    [
        (frame(FrameType.SETTINGS, 0, 0, 500 * RESIZED + RESIZED[:6]), 5000),  # the frame is looked at as a whole
        (1000 * frame(FrameType.SETTINGS, 0, 0), 20_000),
        (1000 * setting(INITIAL_WINDOW, 0), 20_000),
        (1000 * widened(0, 1), 20_000),  # what each of them waits for is its own window
    ],
)
def test_what_a_frame_costs_does_not_grow_with_the_streams_that_wait(sent: bytes, most: int) -> None:
    server = waiting_server(300, first=setting(INITIAL_WINDOW, 0))
    assert calls(lambda: server.connection.receive(sent)) < most


def test_a_peer_may_change_the_windows_of_all_streams_only_so_often() -> None:
    server = waiting_server(300, first=setting(INITIAL_WINDOW, 0))
    changes = 0
    while server.connection.receive(setting(INITIAL_WINDOW, 1 - changes % 2)):
        changes += 1
        assert 300 * changes <= RESIZED_ANYHOW + 300 * RESIZED_EACH
    assert changes > RESIZED_EACH
    assert server.answers()[-1][3][4:] == struct.pack(">I", Code.ENHANCE_YOUR_CALM)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (setting(INITIAL_WINDOW, 0), setting(INITIAL_WINDOW, 10)),
        (setting(INITIAL_WINDOW, 3), setting(INITIAL_WINDOW, 5) + setting(INITIAL_WINDOW, 10)),
        (setting(INITIAL_WINDOW, 0), b"".join(widened(number, 10) for number in range(1, 40, 2))),
    ],
)
def test_an_answer_that_waits_for_its_streams_window_goes_on(first: bytes, then: bytes) -> None:
    server = waiting_server(20, first=first)
    assert server.connection.receive(then)
    assert not server.connection.streams and not server.connection.waiting


def test_answers_that_wait_for_the_window_of_all_streams_go_on_as_far_as_it_is_widened() -> None:
    server, size = EchoServer(), 40_000
    assert server.connection.receive(PREFACE + setting(INITIAL_WINDOW, 1 << 20))
    for number in (1, 3, 5):
        assert server.connection.receive(frame(FrameType.HEADERS, END_HEADERS, number, BLOCK))
        assert server.connection.receive(frame(FrameType.DATA, END_STREAM, number, bytes(size)))

    def came() -> int:
        return sum(len(payload) for kind, _, _, payload in server.answers() if kind == FrameType.DATA)

    assert came() == 65_535
    assert server.connection.receive(500 * widened(0, 1))
    assert came() == 500
    assert server.connection.receive(widened(0, 1 << 20))
    assert came() == 3 * size - 66_035
    assert not server.connection.streams and not server.connection.waiting


@pytest.mark.hypothesis
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(
                frame,
                st.integers(0, 11),
                st.integers(0, 255),
                st.integers(0, 9),
                st.binary(max_size=30) | st.just(BLOCK),
            ),
        ),
        max_size=30,
    ),
    st.integers(1, 50),
)
def test_whatever_comes_in_whatever_pieces_the_answer_is_the_same(parts: list[bytes], step: int) -> None:
    sent = PREFACE + b"".join(parts)
    assert echoed([sent]) == echoed(sent[at : at + step] for at in range(0, len(sent), step))
