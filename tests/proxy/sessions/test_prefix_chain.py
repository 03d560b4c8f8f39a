"""Chains of keys: equal for equal prefixes and for nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from random import Random
from typing import AnyStr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.sessions.hasher import END, LONG_BYTES
from ppd.proxy.sessions.hasher import TEXT as MARK
from ppd.proxy.sessions.prefix_chain import BlockHash, Chain, PrefixEnd, UnitHash
from tests.support.requests import HASHER


def chain_of(data: bytes) -> Chain:
    blocks = BlockHash(HASHER, 1)
    blocks.add(data)
    return Chain(tuple(blocks.keys), tuple(blocks.ends), HASHER, data, data[blocks.ends[-1] :], is_text=True)


def unit(*parts: str, previous: int = 0, role: str = "user", name: str = "", call_id: str = "") -> int:
    made = UnitHash(HASHER, previous, role, name, call_id)
    for part in parts:
        made.begin_text()
        made.add_text(part)
    return made.key()


def cut(text: AnyStr, at: Iterable[int]) -> list[AnyStr]:
    ends = sorted({min(one, len(text)) for one in at} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


def test_everything_in_a_unit_counts() -> None:
    keys = [
        unit("hi"),
        unit("hi", previous=1),
        unit("hi", role="system"),
        unit("hi", name="ann"),
        unit("hi", call_id="ann"),
        unit("h", "i"),
        unit("i", "h"),
        unit(),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("one", "other"), [(("hi", ""), ("hi",)), (("",), ()), (("", "hi"), ("hi",))])
def test_empty_text_leaves_no_trace(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert unit(*one) == unit(*other)


@given(st.text(), st.lists(st.integers(0, 100)))
def test_a_unit_has_the_same_key_however_its_text_was_cut(text: str, at: list[int]) -> None:
    streamed = UnitHash(HASHER, 7, "user")
    for piece in cut(text, at):
        streamed.add_text(piece)
        streamed.key()  # asking does not disturb
    assert streamed.key() == unit(text, previous=7)


@given(st.text(min_size=1), st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_a_unit_of_one_text_has_the_same_key_in_one_go(text: str, role: str, name: str, call_id: str) -> None:
    in_steps = unit(text, previous=7, role=role, name=name, call_id=call_id)
    data = text.encode("utf-8", "surrogatepass")
    assert HASHER.text_unit(7, role, name, call_id, data) == in_steps


def test_a_copy_of_a_unit_grows_by_itself() -> None:
    first = UnitHash(HASHER, 0, "user")
    first.add_text("a")
    second = first.copy()
    second.add_text("b")
    assert (first.key(), second.key()) == (unit("a"), unit("ab"))


# -- long texts, and what comes after them

MEDIA = 12345  # the key of a part that is not text
TEXT = bytes(Random(0).choices(range(32, 127), k=100_000))
SIZES = (0, 1, 15, 16, 17, 255, 256, 257, LONG_BYTES, LONG_BYTES + 1, len(TEXT))
CUTS = {
    "whole": (),
    "byte by byte at the start": range(40),
    "in small pieces": range(0, 2 * LONG_BYTES, 7),
    "in blocks": range(0, LONG_BYTES, 16),
    "in random pieces": Random(1).sample(range(len(TEXT)), 50),
}
FOLLOWED: dict[str, bytes | int | None] = {"nothing": None, "text": b"hi", "long text": TEXT[5:9000], "media": MEDIA}


def unit_of(*parts: bytes | int | None, at: Iterable[int] = ()) -> UnitHash:
    """A unit of texts, each cut `at`, and of other parts; its key is asked for after each step."""
    made = UnitHash(HASHER, 7, "user")
    for part in parts:
        if isinstance(part, int):
            made.add_part(b"M", part, 1)
        else:
            made.begin_text()
            for piece in cut(part or b"", at):
                made.add_utf8(piece)
                made.key()  # asking does not disturb
    return made


def in_one_go(text: bytes) -> int:
    return HASHER.text_unit(7, "user", None, None, text)


@pytest.mark.parametrize("follower", FOLLOWED)
@pytest.mark.parametrize("at", CUTS)
@pytest.mark.parametrize("size", SIZES)
def test_a_long_text_has_the_same_key_however_it_was_cut(size: int, at: str, follower: str) -> None:
    then, text = FOLLOWED[follower], TEXT[:size]
    streamed, whole = unit_of(text, then, at=CUTS[at]), unit_of(text, then)
    assert (streamed.key(), streamed.size) == (whole.key(), whole.size)
    if text and then is None:
        assert streamed.key() == in_one_go(text)


def test_every_byte_of_a_long_text_and_every_end_of_it_count() -> None:
    texts = [TEXT[:size] for size in (*SIZES[1:], 9000, 9001)]
    for changed in (0, 15, 16, 255, 256, 5000, 8999):
        texts.append(TEXT[:changed] + b"\n" + TEXT[changed + 1 : 9000])
    units = [(text, then) for text in texts for then in FOLLOWED.values()]
    assert len({in_one_go(text) for text in texts}) == len(texts)
    assert len({unit_of(*parts).key() for parts in units}) == len(units)


def test_nothing_else_reads_like_a_text() -> None:
    digest = HASHER.digest(TEXT)
    others: list[tuple[bytes | int, ...]] = [
        (digest,),
        (MARK + digest,),
        (END + MARK + digest,),
        (TEXT, b""),
        (TEXT, TEXT),
        (int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")),
    ]
    told = [unit_of(*parts).key() for parts in others]
    assert told.count(in_one_go(TEXT)) == 1, "an empty text leaves no trace"
    assert told.index(in_one_go(TEXT)) == 3


@pytest.mark.parametrize("size", SIZES)
def test_a_copy_inside_a_long_text_grows_by_itself(size: int) -> None:
    first = unit_of(TEXT[:size])
    second = first.copy()
    first.add_utf8(b"a" * 5000)
    second.add_utf8(b"b")
    third = second.copy()
    third.begin_text()
    third.add_utf8(b"c")
    second.add_utf8(b"d")
    assert first.key() == in_one_go(TEXT[:size] + b"a" * 5000)
    assert second.key() == in_one_go(TEXT[:size] + b"bd")
    assert third.key() == unit_of(TEXT[:size] + b"b", b"c").key()


@pytest.mark.parametrize("size", SIZES[1:])
def test_the_key_in_the_middle_of_a_long_text_is_that_of_its_start(size: int) -> None:
    growing = UnitHash(HASHER, 7, "user")
    growing.add_utf8(TEXT[:size])
    assert growing.key() == growing.key() == in_one_go(TEXT[:size])
    growing.add_utf8(b"more")
    assert growing.key() == in_one_go(TEXT[:size] + b"more")


# -- prompts in blocks


@given(st.binary(max_size=9000), st.binary(max_size=9000))
def test_a_prompts_chain_begins_with_the_chain_of_each_of_its_prefixes(data: bytes, more: bytes) -> None:
    short, long = chain_of(data), chain_of(data + more)
    assert long.keys[: len(short.keys)] == short.keys
    assert long.ends[: len(short.ends)] == short.ends


@given(st.binary(max_size=9000), st.binary(min_size=1, max_size=300), st.binary(max_size=300))
def test_a_mark_is_reached_by_what_continues_it_and_by_nothing_else(data: bytes, more: bytes, other: bytes) -> None:
    end = chain_of(data + more).end()

    def reached(prompt: bytes) -> bool:
        chain = chain_of(prompt)
        places = [i for i, key in enumerate(chain.keys) if key == end.key]
        return any(chain.reach(i, end.tail, end.check) == len(data + more) for i in places)

    assert reached(data + more)
    assert reached(data + more + other)
    assert reached(data + other) == (data + other).startswith(data + more)


@given(st.binary(max_size=5000), st.lists(st.integers(0, 5000)))
def test_blocks_do_not_depend_on_how_the_data_came(data: bytes, at: list[int]) -> None:
    blocks = BlockHash(HASHER, 1)
    for piece in cut(data, at):
        blocks.add(piece)
    assert blocks.end() == chain_of(data).end()


def test_a_large_prompt_takes_few_hashes() -> None:
    assert len(chain_of(bytes(4_000_000)).keys) < 2200


def test_a_prompts_end_is_where_its_running_hash_resumes() -> None:
    data = b"x" * 1234
    resumed = chain_of(data).resume()
    resumed.add(b"reply")
    assert resumed.end() == chain_of(data + b"reply").end()


def test_the_mark_of_whole_units_has_no_tail() -> None:
    chain = Chain((5, 6), (20, 40), HASHER)
    assert (chain.end(), chain.size, chain.reach(0, 0, 0)) == (PrefixEnd(6), 40, 20)
