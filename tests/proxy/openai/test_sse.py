from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.openai.sse import EventSplitter, Fragment, event_data, with_data


def split(stream: bytes, cuts: list[int], limit_bytes: int = 1000) -> list[bytes]:
    """The events of a stream that comes in pieces, and then what the splitter still holds."""
    splitter = EventSplitter(limit_bytes)
    bounds = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    parts = [part for start, end in pairwise(bounds) for part in splitter.feed(stream[start:end])]
    return [*parts, splitter.rest()]


@pytest.mark.parametrize(
    ("stream", "events", "rest"),
    [
        (b"data: a\n\n", [b"data: a\n\n"], b""),
        (b"data: a\n\ndata: b\n\n", [b"data: a\n\n", b"data: b\n\n"], b""),
        (b"data: a\n\ndata: b", [b"data: a\n\n"], b"data: b"),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"data: a\r\n\r\n", b"data: b\r\n\r\n"], b""),
        (b"data: a\r\rdata: b\r\rx", [b"data: a\r\r", b"data: b\r\r"], b"x"),
        (b"data: a\n\r\ndata: b\r\n\nx", [b"data: a\n\r\n", b"data: b\r\n\n"], b"x"),
        (b"event: e\r\ndata: a\r\n\r\n", [b"event: e\r\ndata: a\r\n\r\n"], b""),
        (b"data: a\n\n\ndata: b\n\n", [b"data: a\n\n", b"\ndata: b\n\n"], b""),
        (b"data: a\n\n\n", [b"data: a\n\n"], b"\n"),
        (b"data: a\r\r", [], b"data: a\r\r"),
        (b"", [], b""),
    ],
)
def test_events_end_at_a_blank_line(stream: bytes, events: list[bytes], rest: bytes) -> None:
    assert split(stream, []) == [*events, rest]
    assert split(stream, list(range(len(stream)))) == [*events, rest]


def test_a_whole_event_is_the_chunk_itself() -> None:
    chunk = b'data: {"x": 1}\n\n'
    assert EventSplitter().feed(chunk)[0] is chunk


STREAMS = st.lists(
    st.sampled_from([b"\n", b"\r", b"\r\n", b"data: ", b"event: e", b": c", b"{}", "é世".encode()]), max_size=30
).map(b"".join)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@given(STREAMS, CUTS)
def test_splits_do_not_matter(stream: bytes, cuts: list[int]) -> None:
    assert split(stream, cuts) == split(stream, [])


@given(st.binary(max_size=200) | STREAMS, CUTS, st.integers(1, 40))
def test_nothing_is_lost_or_made_up_at_any_limit(stream: bytes, cuts: list[int], limit_bytes: int) -> None:
    assert b"".join(split(stream, cuts, limit_bytes)) == stream


@given(STREAMS, CUTS, st.integers(4, 40))
def test_an_event_above_the_limit_comes_in_fragments_and_the_others_whole(
    stream: bytes, cuts: list[int], limit_bytes: int
) -> None:
    whole = [part for part in split(stream, cuts, limit_bytes)[:-1] if not isinstance(part, Fragment)]
    assert whole == [event for event in split(stream, [])[:-1] if len(event) <= limit_bytes]


def test_at_most_the_limit_is_held() -> None:
    splitter = EventSplitter(limit_bytes=10)
    assert splitter.feed(b"data: 1234") == []
    assert not splitter.in_fragment
    assert splitter.feed(b"5") == [Fragment(b"data: 12345")]
    assert splitter.in_fragment
    assert splitter.feed(b"6\n") == [Fragment(b"6")]
    assert splitter.feed(b"\ndata: 7\n\n") == [Fragment(b"\n\n"), b"data: 7\n\n"]
    assert not splitter.in_fragment


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\r\n\r\n", b"{}"),
        (b"event: e\ndata: {}\n\n", b"{}"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\rdata: b\n\n", b"a\nb"),
        (b"data\n\n", b""),
        (b"data:  x\n\n", b" x"),
        (b": keep-alive\n\n", None),
        (b"database: x\n\n", None),
        (b"\n\n", None),
        (b"", None),
    ],
)
def test_data_of_an_event(event: bytes, data: bytes | None) -> None:
    assert event_data(event) == data


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b"data: old\n\n", b"data: new\n\n"),
        (b"event: e\r\ndata:old\r\nid: 1\r\n\r\n", b"event: e\r\ndata: new\r\nid: 1\r\n\r\n"),
        (b"data: a\ndata: b\n\n", b"data: new\n\n"),
        (b"data: old\r\r", b"data: new\r\r"),
    ],
)
def test_only_the_data_is_replaced(event: bytes, expected: bytes) -> None:
    assert with_data(event, b"new") == expected


_TWO_LINE_ENDS = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")


@given(STREAMS | st.binary(max_size=60))
def test_events_end_where_two_line_ends_meet(stream: bytes) -> None:
    stream += b"."  # so that the last line end is whole
    ends = [match.end() for match in _TWO_LINE_ENDS.finditer(stream)]
    events = [stream[start:end] for start, end in pairwise([0, *ends])]
    assert split(stream, []) == [*events, stream[ends[-1] if ends else 0 :]]


class CountingSplitter(EventSplitter):
    """Counts the bytes in which it looks for a blank line."""

    examined: int = 0

    def _blank_line_end(self, scan: int) -> int:
        self.examined += len(self._held) - scan
        return super()._blank_line_end(scan)


@pytest.mark.parametrize("event", [b"data: " + b"y" * 200_000 + b"\n\n", b"data: x\r\n" * 20_000 + b"\r\n"])
@pytest.mark.parametrize("step", [50, 1000, 16_384])
def test_each_byte_is_looked_at_once_wherever_reads_end(event: bytes, step: int) -> None:
    splitter, stream = CountingSplitter(), event * 2
    pieces = [stream[at : at + step] for at in range(0, len(stream), step)]
    assert [one for piece in pieces for one in splitter.feed(piece)] == [event, event]
    assert splitter.examined <= len(stream) + 6 * len(pieces) + 2 * step
