"""A session's units as compiled code reads and writes them: what the Python that it replaces says."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.plane import PackedUnits, TokenLine
from ppd.proxy.sessions.kept_units import LEARNT, NO_UNITS_KEPT, NOTHING_LEARNT, UncompiledLine, UncompiledUnits

KEYS = st.integers(0, 2**60 - 1)
TOKENS = st.integers(0, 40) | st.integers(0, 2**32 - 1)
ENDS = st.integers(0, 100) | st.integers(0, 2**36)
COUNTS = st.integers(0, 2**53)
PLACES = st.tuples(ENDS, st.integers(0, 100) | COUNTS)
HEAD = struct.Struct("<IHHHHBQI")
UNIT = struct.Struct("<QIH")


@st.composite
def packed(draw: st.DrawFn) -> bytes:
    """As `pack` writes them: tokens grow, and cuts follow."""
    count, opener_cuts, more = draw(st.integers(0, 12)), draw(st.integers(0, 3)), draw(st.integers(0, 3))
    in_prompt = max(0, count - draw(st.integers(0, 1)))
    counts = count, in_prompt, draw(st.integers(0, in_prompt)), opener_cuts
    head = HEAD.pack(draw(TOKENS), *counts, draw(st.integers(0, 15)), draw(KEYS), draw(TOKENS))
    tokens = sorted(draw(st.lists(TOKENS, min_size=count, max_size=count)))
    units = [UNIT.pack(draw(KEYS), one, draw(st.integers(0, 65535))) for one in tokens]
    cuts = [UNIT.pack(draw(KEYS), draw(TOKENS), 1) for _ in range(opener_cuts + more)]
    return b"".join((LEARNT.pack(1.5, 2, 3), head, *units, *cuts))


def outcome(call: Callable[..., Any], *values: Any) -> Any:
    try:
        return call(*values)
    except (IndexError, KeyError, ValueError) as exc:
        return type(exc)


@given(packed(), st.data())
def test_reading(data: bytes, draws: st.DataObject) -> None:
    ours, theirs = PackedUnits(data), UncompiledUnits(data)
    for name in UncompiledUnits.__slots__[1:]:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.newest_key == theirs.newest_key
    for place in range(-1, theirs.entries + 1):
        for name in ("key", "tokens", "turn"):
            assert outcome(getattr(ours, name), place) == outcome(getattr(theirs, name), place)
    some = st.integers(0, theirs.entries + 1)
    start, end = draws.draw(some), draws.draw(some)
    assert ours.slice(start, end) == theirs.slice(start, end)
    for blocks in (0, 3, 33):
        assert ours.index_keys(blocks) == theirs.index_keys(blocks)


@given(packed(), st.data())
def test_what_a_prompt_has_of_them(data: bytes, draws: st.DataObject) -> None:
    ours, theirs = PackedUnits(data), UncompiledUnits(data)
    known = draws.draw(st.integers(0, theirs.count))
    sizes = {theirs.key(place): 100 * place for place in range(known)} | draws.draw(st.dictionaries(KEYS, ENDS))
    if draws.draw(st.booleans()) and known:
        del sizes[theirs.key(draws.draw(st.integers(0, known - 1)))]
    assert ours.shared(sizes) == theirs.shared(sizes)
    keys, ends = tuple(sizes), tuple(sizes.values())
    for shared in range(theirs.count + 1):
        assert outcome(ours.place, shared, sizes) == outcome(theirs.place, shared, sizes)
        tokens = draws.draw(st.sampled_from([0, 1, 2**53, *map(theirs.tokens, range(theirs.count))]) | COUNTS)
        assert ours.within(tokens, shared) == theirs.within(tokens, shared)
        since = draws.draw(st.just((0, 0)) | st.tuples(ENDS | st.integers(0, 1200), st.just(tokens)))
        of_all = max(tokens, draws.draw(COUNTS))
        told = shared, since, of_all, keys, ends
        assert outcome(ours.kept, *told) == outcome(theirs.kept, *told)


@given(packed())
def test_only_of_the_object_that_they_were_read_from(data: bytes) -> None:
    for units in (PackedUnits(data), UncompiledUnits(data)):
        assert units.is_of(data) and not units.is_of(bytes(bytearray(data)))


@given(st.binary(max_size=80) | packed().map(lambda data: data[:-1]))
def test_another_layout(data: bytes) -> None:
    ours, theirs = outcome(PackedUnits, data), outcome(UncompiledUnits, data)
    assert (ours is ValueError) == (theirs is ValueError)


def test_of_a_session_without_units() -> None:
    ours = PackedUnits(NOTHING_LEARNT)
    assert (ours.count, ours.newest_key, ours.index_keys(0), ours.shared({}), ours.place(0, {})) == (
        0,
        None,
        set(),
        0,
        None,
    )
    assert ours.is_of(NOTHING_LEARNT) and isinstance(NO_UNITS_KEPT, PackedUnits)


@given(st.lists(PLACES, max_size=3), st.lists(ENDS, max_size=8))
def test_tokens_between_places(places: list[tuple[int, int]], ends: list[int]) -> None:
    ours, theirs = TokenLine(*places), UncompiledLine(*places)
    for end in (*ends, *(end for end, _ in places)):
        assert ours.at(end) == theirs.at(end)


@given(st.lists(PLACES, max_size=3), st.lists(st.tuples(KEYS, ENDS)), st.integers(0, 10**6), st.data())
def test_writing(places: list[tuple[int, int]], chain: list[tuple[int, int]], turn: int, draws: st.DataObject) -> None:
    keys, ends = tuple(key for key, _ in chain), [end for _, end in chain]
    start = draws.draw(st.integers(0, len(keys)))
    written = TokenLine(*places).packed(keys, ends, range(start, len(keys)), turn)
    assert written == UncompiledLine(*places).packed(keys, ends, range(start, len(keys)), turn)
    if keys:
        some = draws.draw(st.lists(st.integers(0, len(keys) - 1)))
        assert TokenLine(*places).packed(list(keys), ends, some, turn) == UncompiledLine(*places).packed(
            keys, ends, some, turn
        )


@pytest.mark.parametrize("keys", [(-1,), (2**64,), ("x",)])
def test_a_key_that_is_none(keys: Any) -> None:
    with pytest.raises((OverflowError, TypeError)):
        TokenLine().packed(keys, (0,), (0,), 1)
