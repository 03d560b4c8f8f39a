# cython: language_level=3, annotation_typing=False, infer_types=True
"""Kinds of text, by how many tokens a byte of it makes: with the tokenizer at hand, most of the spread between texts.

What tells them apart is the share of *marks*: bytes that are neither a lower-case letter nor a space. Prose has few, a
listing has some, JSON has many, and a hexadecimal dump has little else. A few hundred bytes of a text show it. With
Qwen3, Llama 3, gpt-oss and Gemma 3 the same share of marks makes nearly the same number of tokens; that a text is a
tool's result says much less.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum
from typing import TYPE_CHECKING

from .prefix_chain import UNIT_OVERHEAD_BYTES, Chain, TextOrKind

if TYPE_CHECKING:
    from .hasher import TextInBody

Amounts = tuple[int, ...]
"""Kinds, each with how much there is of it: bytes of text, but for the first two. No kind comes twice, or with 0."""

SAMPLED_UNITS = 16
"""How many of a prompt's newest units are looked at. A turn seldom adds more."""

_SAMPLE = 256  # bytes or characters from a text's start, and as many from its middle


class Kind(IntEnum):
    """What a prompt's tokens are counted by: bytes of text, but for the first two."""

    START = 0  # 1 for a prompt of which nothing is known: what the template puts first
    UNITS = 1  # what the template puts around each message
    UNREAD = 2  # nobody looked at it
    MARKS_0 = 3  # marks below 5 %: prose
    MARKS_5 = 4
    MARKS_10 = 5  # Markdown, most program code
    MARKS_20 = 6  # listings, logs
    MARKS_30 = 7
    MARKS_40 = 8  # JSON, tables of numbers
    TWO_BYTES = 9  # Cyrillic, Greek, Arabic: two bytes a letter
    THREE_BYTES = 10  # Chinese, Devanagari, Thai
    KANA = 11  # with what stands between them: Japanese
    HANGUL = 12
    MEDIA = 13
    TOKEN_IDS = 14
    HEAD = 15  # tools, and the system's text beside them


_TYPICAL_TOKENS: dict[Kind, float] = {
    Kind.START: 3.0,
    Kind.UNITS: 4.0,
    Kind.UNREAD: 0.25,
    Kind.MARKS_0: 0.20,
    Kind.MARKS_5: 0.225,
    Kind.MARKS_10: 0.245,
    Kind.MARKS_20: 0.27,
    Kind.MARKS_30: 0.33,
    Kind.MARKS_40: 0.43,
    Kind.TWO_BYTES: 0.19,
    Kind.THREE_BYTES: 0.22,
    Kind.KANA: 0.21,
    Kind.HANGUL: 0.22,
    Kind.MEDIA: 0.25,
    Kind.TOKEN_IDS: 0.25,
    Kind.HEAD: 0.27,
}
TYPICAL_TOKENS = tuple(_TYPICAL_TOKENS[kind] for kind in Kind)
"""Tokens for one of each kind, the means of the four tokenizers above."""

# Named, as Python 3.11 takes 0.2 us to find a member of an enum.
_START, _UNITS, _UNREAD, _TOKEN_IDS, _HEAD = Kind.START, Kind.UNITS, Kind.UNREAD, Kind.TOKEN_IDS, Kind.HEAD
_NOTHING = [0] * len(Kind)
_FOLLOWING = bytes(range(0x80, 0xC0))  # the bytes of a character after its first: none, half or two thirds of a text
_HANGUL = b"\xea\xeb\xec\xed"
_NO_MARKS = bytes([*b" abcdefghijklmnopqrstuvwxyz", *range(128, 256)])
_BY_TWENTIETHS = bytes(
    [Kind.MARKS_0, Kind.MARKS_5]
    + [Kind.MARKS_10, Kind.MARKS_10, Kind.MARKS_20, Kind.MARKS_20, Kind.MARKS_30, Kind.MARKS_30]
    + [Kind.MARKS_40] * 13
)
"""The kind of a text with so many twentieths of marks."""


def sample(text: str | bytes | memoryview | TextInBody | None) -> bytes | None:
    """What `text_kind` needs of a text, in UTF-8; it may begin and end inside of a character. None: media."""
    if text is None:
        return None
    if not isinstance(text, str | bytes | memoryview):
        text = text.utf8
    if len(text) > 2 * _SAMPLE:
        middle = len(text) // 2
        if not isinstance(text, str):
            return b"".join((text[:_SAMPLE], text[middle : middle + _SAMPLE]))
        text = text[:_SAMPLE] + text[middle : middle + _SAMPLE]
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)


def text_kind(sampled: bytes | None) -> int:
    if not sampled:
        return Kind.MEDIA if sampled is None else Kind.UNREAD
    size = len(sampled)
    if not sampled.isascii():
        following = size - len(sampled.translate(None, _FOLLOWING))
        if following * 10 > size * 3:
            return _of_three_bytes(sampled) if following * 20 > size * 11 else Kind.TWO_BYTES
    return _BY_TWENTIETHS[len(sampled.translate(None, _NO_MARKS)) * 20 // size]


def kind_of(text: TextOrKind) -> int:
    return text if isinstance(text, int) else text_kind(sample(text))


def added(chain: Chain, covered: int | None) -> Amounts:
    """What follows a prompt's first `covered` bytes.

    covered: None where nothing is known of what an engine puts before the prompt.
    """
    found = _NOTHING.copy()
    if covered is None:
        found[_START] = 1
    known, marks, ends, texts = covered or 0, chain.marks, chain.ends, chain.texts
    if chain.data:
        kind = text_kind(sample(memoryview(chain.data)[known:])) if chain.is_text else _TOKEN_IDS
        found[kind] = chain.size - known
        return _amounts(found)
    first, count = bisect_right(ends, known), len(ends)
    unread = count - len(texts)
    if marks.tools and first <= (head := marks.head):
        found[_HEAD], known, first = ends[head] - known, ends[head], head + 1
    found[_UNITS] = count - first
    if first < unread:
        end = ends[unread - 1]
        found[_UNREAD] = end - known - UNIT_OVERHEAD_BYTES * (unread - first)
        known, first = end, unread
    for at in range(first, count):
        kind, end = kind_of(texts[at - unread]), ends[at]
        size = end - known - UNIT_OVERHEAD_BYTES
        if size > 0:
            found[kind] += size
        known = end
    return _amounts(found)


def _amounts(found: list[int]) -> Amounts:
    """found: by kind."""
    flat: list[int] = []
    for kind, amount in enumerate(found):
        if amount > 0:
            flat.append(kind)
            flat.append(amount)
    return tuple(flat)


def _of_three_bytes(sampled: bytes) -> int:
    third = len(sampled) // 9  # a third of the characters
    if sampled.count(b"\xe3") > third:  # begins kana, and Chinese marks
        return Kind.KANA
    return Kind.HANGUL if len(sampled) - len(sampled.translate(None, _HANGUL)) > third else Kind.THREE_BYTES
