"""Which bytes are a text: those that Python decodes, wherever they stand in a long one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy import plane

FURTHER = (0x61, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xE1, 0xFF)
EDGES = tuple(bytes([code]) for code in (0x7F, *range(0x80, 0xC0, 5), 0xBF, *range(0xC0, 0x100)))
AROUND = "é灯😀x" * 20  # characters of all sizes


def is_text(content: bytes) -> bool:
    told = plane.messages(b'[{"role":"user","content":"%b"}]' % content)
    return told is not None and isinstance(told[0][0], plane.PlainMessage) and told[0][0].utf8 == content


def decodes(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def sequences() -> Iterator[bytes]:
    """All pairs of bytes beyond ASCII, and three and four that begin like long characters."""
    yield from (bytes(pair) for pair in product(range(0x80, 0x100), repeat=2))
    yield from (bytes(three) for three in product(range(0xE0, 0x100), range(0x7F, 0x100), FURTHER))
    yield from (bytes(four) for four in product(range(0xEF, 0x100), range(0x7F, 0xC1, 5), FURTHER, FURTHER))


@pytest.mark.parametrize(("before", "after"), [(63, 40), (78, 0), (77, 3), (40, 23)])
def test_every_short_sequence(before: int, after: int) -> None:
    for one in sequences():
        content = b"x" * before + one + b"y" * after
        assert is_text(content) == decodes(content), one


@pytest.mark.parametrize("size", range(48, 100))
def test_wherever_it_stands_and_wherever_it_is_cut(size: int) -> None:
    whole = AROUND.encode()
    for one, place in product((*EDGES, "灯".encode(), "😀".encode(), b"\xed\xa0\x80"), (0, size // 2, size - 1, size)):
        content = whole[:place] + one + whole[place:size]
        assert is_text(content) == decodes(content), (one, place)


@given(
    st.text(st.characters(codec="utf-8", exclude_characters='"\\', min_codepoint=32)),
    st.integers(0, 400),
    st.binary(max_size=3),
)
def test_any_text_with_a_few_bytes_in_it(text: str, place: int, more: bytes) -> None:
    data = (text * 9).encode()
    content = (data[:place] + more + data[place:]).translate(None, bytes([*range(32), 34, 92]))
    assert is_text(content) == decodes(content)
