"""Hashes tool calls by name and arguments, however the arguments were serialised. `CallPlaces` says how ids count.

A client that echoes a call often parses its arguments and writes them anew, so whitespace between JSON tokens and the
way a string escapes a character do not count. The order of members and the form of numbers do: nearly all clients keep
both, and to ignore them, whole arguments would have to be held. A client in JavaScript, as Claude Code, shows 5.0 as 5:
then the KV of the reply serves only up to there, and the prompt before it is what is known to be held. Arguments that
are not JSON are hashed by the same rules.
"""

from __future__ import annotations

import re

from ... import plane
from ...sessions.hasher import END, Hasher, encoded, finished

_OUTSIDE = re.compile(r'[^"]*')
_INSIDE = re.compile(r'[^"\\]*')
_SPACE = str.maketrans("", "", " \t\r\n")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_SHORT = {"/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_STILL_ESCAPED = {'"': '\\"', "\\": "\\\\"}
_PAIR_CHARS = 12  # of an escaped surrogate pair


class CanonicalJson:
    """Turns pieces of a JSON text, cut anywhere, into one canonical text; holds back at most one escape sequence."""

    __slots__ = ("_held", "_in_string")

    def __init__(self) -> None:
        self._held = ""
        self._in_string = False

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def feed(self, text: str) -> str:
        return self._read(self._held + text, last=False)

    def rest(self) -> str:
        """The canonical form of what is held back, if nothing follows it."""
        twin = CanonicalJson()
        twin._in_string = self._in_string
        return twin._read(self._held, last=True)

    def _read(self, data: str, *, last: bool) -> str:
        out: list[str] = []
        at = 0
        while at < len(data):
            if not self._in_string:
                end = _match_end(_OUTSIDE, data, at)
                out.append(data[at:end].translate(_SPACE))
                self._in_string = end < len(data)
            else:
                end = _match_end(_INSIDE, data, at)
                out.append(data[at:end])
                if end < len(data) and data[end] == "\\":
                    escape = _unescape(data[end : end + _PAIR_CHARS], last=last)
                    if escape is None:
                        at = end
                        break
                    out.append(escape[0])
                    at = end + escape[1]
                    continue
                self._in_string = end == len(data)
            out.append(data[end : end + 1])
            at = end + 1
        self._held = data[at:]
        return "".join(out)


def _match_end(pattern: re.Pattern[str], data: str, at: int) -> int:
    match = pattern.match(data, at)
    assert match is not None, "the pattern matches the empty string"
    return match.end()


def _unescape(text: str, *, last: bool) -> tuple[str, int] | None:
    """The canonical form and the length of the escape that `text` begins with; None if more text must come first.

    The result never depends on where the text was cut: an escape is read only when all that affects it is there.
    """
    if not last and len(text) < (6 if text[1:2] == "u" else 2):
        return None
    match = _ESCAPE.match(text)
    if match is None:
        return _SHORT.get(text[1:2], text[:2]), min(2, len(text))
    code = int(match[1], 16)
    if not 0xD800 <= code < 0xDC00:
        return _STILL_ESCAPED.get(chr(code), chr(code)), 6
    if not last and len(text) < _PAIR_CHARS:
        return None
    low = _ESCAPE.match(text, 6)
    if low is None or not 0xDC00 <= int(low[1], 16) < 0xE000:
        return chr(code), 6
    return chr(0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00), _PAIR_CHARS


class CallHash:
    """One tool call; its arguments come whole or in pieces, its id and name at any time."""

    __slots__ = ("_hasher", "_json", "_state", "id", "name", "size")

    def __init__(self, hasher: Hasher, name: str = "") -> None:
        self.id, self.name = "", name
        self.size = 0  # bytes of arguments
        self._hasher = hasher
        self._state = hasher.start(b"C")
        self._json = CanonicalJson()

    def add(self, arguments: str) -> None:
        data = encoded(self._json.feed(arguments))
        self._state.update(data)
        self.size += len(data)

    def add_all(self, arguments: str) -> None:
        """As `add`, of arguments that come in one piece: compiled code takes a fiftieth of its time."""
        data = encoded(arguments)
        form = plane.canonical_json(data) if plane.IS_BUILT else None
        if form is None:  # or they end in the midst of an escape
            self.add(arguments)
        else:
            self._state.update(form)
            self.size += len(form)

    def key(self) -> int:
        """The key if the call ended here. No arguments are the same as an empty object."""
        rest = encoded(self._json.rest()) if self._json.holds else b"" if self.size else b"{}"
        state = self._state.copy()
        state.update(b"".join((rest, END, encoded(self.name), END)))
        return self._hasher.call_key(finished(state), self.id)
