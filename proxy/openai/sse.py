r"""Server-sent events as bytes: splits a stream into events, and reads or replaces an event's data.

An event ends at a blank line; a line ends with \\r\\n, \\n or \\r, also mixed. Nothing is decoded as text, so a split
inside a UTF-8 sequence does not matter. Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import re

import msgspec

LIMIT_BYTES = 4 * 1024 * 1024

# Two line ends. It begins with a set of characters, which the search skips to in a tenth of the time that it would take
# to try each position. Possessive and atomic: by backtracking it would take \r\n for two line ends.
_BLANK_LINE = re.compile(rb"[\r\n](?:(?<=\r)\n)?+(?>\r\n|\n|\r)")
_LONGEST_END = 4  # bytes of \r\n\r\n


class Fragment(bytes):
    """A piece of an event above the limit, to be passed on as it is."""


class EventSplitter(msgspec.Struct, eq=False, gc=False):
    """Splits a stream into whole events with their line ends; joined, they are the stream byte for byte.

    At most `limit_bytes` of an unfinished event are held: a longer one comes as `Fragment`s. One that `is_empty` is as
    good as a new one, which costs little.
    """

    limit_bytes: int = LIMIT_BYTES
    _held: bytes | bytearray = b""  # an array only while something is held: nearly no stream needs one
    _has_returns: bool = False  # in what is held
    _in_fragment: bool = False

    @property
    def in_fragment(self) -> bool:
        return self._in_fragment

    @property
    def is_empty(self) -> bool:
        return not self._held and not self._in_fragment

    def feed(self, chunk: bytes) -> list[bytes]:
        if not self._held and chunk.endswith(b"\n\n") and b"\r" not in chunk and not self._in_fragment:
            return self._whole(chunk)  # the usual chunk
        return self._mixed(chunk)

    def rest(self) -> bytes:
        """What is held of an unfinished event; the splitter is empty after it."""
        held, self._held = bytes(self._held), b""
        return held

    def _whole(self, chunk: bytes) -> list[bytes]:
        if len(chunk) <= self.limit_bytes and chunk.find(b"\n\n") == len(chunk) - 2:
            return [chunk]
        parts: list[bytes] = []
        start = 0
        while start < len(chunk):
            end = chunk.find(b"\n\n", start) + 2
            if end == 1:  # an odd number of line ends: the last may begin a blank line
                self._held += chunk[start:]
                break
            parts.append(self._event(chunk[start:end]))
            start = end
        return parts

    def _mixed(self, chunk: bytes) -> list[bytes]:
        held = self._held = bytearray(self._held) if isinstance(self._held, bytes) else self._held
        scan = max(0, len(held) - _LONGEST_END)
        held += chunk
        parts: list[bytes] = []
        start = 0
        self._has_returns = self._has_returns or b"\r" in chunk
        while (end := self._blank_line_end(scan)) > 0:
            if end == len(held) and held[-1:] == b"\r":
                break  # the next byte may be the \n that belongs to it
            parts.append(self._event(bytes(held[start:end])))
            start = scan = end
        del held[:start]
        if start and self._has_returns:
            self._has_returns = b"\r" in held
        if self._in_fragment or len(held) > self.limit_bytes:
            parts.extend(self._flush(held))
        self._held = held or b""
        return parts

    def _blank_line_end(self, scan: int) -> int:
        """0 if there is none from `scan` on."""
        if not self._has_returns:  # as nearly always
            found = self._held.find(b"\n\n", scan)
            return 0 if found < 0 else found + 2
        match = _BLANK_LINE.search(self._held, scan)
        return 0 if match is None else match.end()

    def _event(self, event: bytes) -> bytes:
        if self._in_fragment or len(event) > self.limit_bytes:
            self._in_fragment = False
            return Fragment(event)
        return event

    def _flush(self, held: bytearray) -> list[bytes]:
        kept = len(held.rstrip(b"\r\n"))  # line ends stay held, as the event may be about to end
        self._in_fragment = True
        if not kept:
            return []
        fragment = Fragment(held[:kept])
        del held[:kept]
        return [fragment]


def event_data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]
    lines = [_value(line) for line in event.splitlines() if _is_data(line)]
    return b"\n".join(lines) if lines else None


def with_data(event: bytes, data: bytes) -> bytes:
    """The event with one data line in place of its own. Other lines and line ends stay. `data` holds no line end."""
    lines: list[bytes] = []
    is_written = False
    for line in event.splitlines(keepends=True):
        if not _is_data(line):
            lines.append(line)
        elif not is_written:
            is_written = True
            lines.append(b"data: " + data + line[len(line.rstrip(b"\r\n")) :])
    return b"".join(lines)


def _is_data(line: bytes) -> bool:
    return line.startswith(b"data:") or line.rstrip(b"\r\n") == b"data"


def _value(line: bytes) -> bytes:
    return line[5:].removeprefix(b" ")
