"""Chains of keys: equal for equal prefixes and for nothing else."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from itertools import count, pairwise
from random import Random
from typing import AnyStr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.errors import ConfigError
from ppd.proxy.sessions.hasher import BEYOND, END, HEAD_BYTES, KEY_BITS, USUAL_KEYS, Hasher
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


def test_a_secret_must_be_long_enough() -> None:
    with pytest.raises(ConfigError, match="16 bytes"):
        Hasher(b"short")


def test_another_secret_gives_other_keys_of_the_same_width() -> None:
    other = Hasher(b"another secret of it")
    keys = [hasher.key(b"K", "text") for hasher in (HASHER, other)]
    assert keys[0] != keys[1]
    assert all(0 <= key < 1 << KEY_BITS for key in keys)


def test_framing_keeps_strings_apart() -> None:
    assert HASHER.key(b"K", "ab", "c") != HASHER.key(b"K", "a", "bc")
    assert HASHER.key(b"K", "a", "") != HASHER.key(b"K", "a")
    assert HASHER.key(b"K", "a") != HASHER.key(b"L", "a")


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


# -- texts longer than their head, which two hashes share

MEDIA = 12345  # the key of a part that is not text
TEXT = bytes(Random(0).choices(range(32, 127), k=100_000))
HEAD = TEXT[:HEAD_BYTES]
SIZES = (0, 1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, 2 * HEAD_BYTES, len(TEXT))
CUTS = {
    "whole": (),
    "at the border": (HEAD_BYTES,),
    "byte by byte at the border": range(HEAD_BYTES - 3, HEAD_BYTES + 4),
    "byte by byte at the start": range(5),
    "in small pieces": range(0, 2 * HEAD_BYTES, 7),
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


@given(st.integers(HEAD_BYTES - 12, HEAD_BYTES), st.text(), st.lists(st.integers(HEAD_BYTES - 12, HEAD_BYTES + 20)))
def test_a_head_may_end_inside_a_character(plain: int, text: str, at: list[int]) -> None:
    long = TEXT[:plain].decode() + text
    streamed = UnitHash(HASHER, 7, "user")
    for piece in cut(long, at):
        streamed.add_text(piece)
    assert streamed.key() == in_one_go(long.encode("utf-8", "surrogatepass")) == unit(long, previous=7)


def test_every_byte_of_a_long_text_and_every_end_of_it_count() -> None:
    texts = [TEXT[:size] for size in (*SIZES[1:], 9000, 9001)]
    for changed in (0, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, 5000, 8999):
        texts.append(TEXT[:changed] + b"\n" + TEXT[changed + 1 : 9000])
    units = [(text, then) for text in texts for then in FOLLOWED.values()]
    assert len({in_one_go(text) for text in texts}) == len(texts)
    assert len({unit_of(*parts).key() for parts in units}) == len(units)


@pytest.mark.parametrize("start", [END + b"T", b"T"], ids=["no mark", "a mark like the end"])
def test_nothing_else_reads_like_a_long_text(start: bytes) -> None:
    # A digest that would read as the start of another text, with or without the end of the head before it.
    tails = ((b"%d" % number, HASHER.beyond(b"%d" % number).digest()) for number in count())
    begun = ((tail, digest) for tail, digest in tails if digest.startswith(start))
    tail, digest = next((tail, digest) for tail, digest in begun if END not in digest[len(start) :])
    others: list[tuple[bytes, ...]] = [
        (HEAD, digest[len(start) :]),
        (HEAD, tail),
        (HEAD, digest),
        (HEAD + digest,),
        (HEAD + BEYOND + digest,),
        (HEAD + BEYOND + digest + END,),
        (HEAD, BEYOND + digest),
        (HEAD,),
        (tail, HEAD),
    ]
    assert unit_of(HEAD + tail).key() == in_one_go(HEAD + tail)
    assert in_one_go(HEAD + tail) not in {unit_of(*parts).key() for parts in others}


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


def test_what_lies_beyond_the_head_is_hashed_with_the_secret() -> None:
    secrets = (b"a secret of the proxy", b"a secret of the proxy", b"another secret of it")
    one, same, other = [Hasher(secret).beyond(b"text").digest() for secret in secrets]
    assert one == same != other


def test_only_a_text_beyond_its_head_holds_the_larger_hash() -> None:
    def held_bytes(*parts: bytes | int) -> float:
        tracemalloc.start()
        try:
            units = [unit_of(*parts) for _ in range(100)]
            return tracemalloc.get_traced_memory()[0] / len(units)
        finally:
            tracemalloc.stop()

    assert held_bytes(HEAD) < 500
    assert held_bytes(HEAD + b"x", MEDIA) < 500, "given up when the text ends"
    assert held_bytes(HEAD + b"x") > 1500


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


def test_a_value_is_brought_into_form_once_and_known_by_what_it_comes_to() -> None:
    hasher, formed = Hasher(b"a secret of the proxy"), list[bytes]()

    def form(raw: bytes) -> bytes:
        formed.append(raw)
        return raw.strip()

    assert hasher.once(b" a", form) == hasher.once(b" a", form) == hasher.once(b"a ", form)
    assert hasher.once(b"b", form) != hasher.once(b"a", form)
    assert formed == [b" a", b"a ", b"b", b"a"]
    for number in range(2 * USUAL_KEYS):
        hasher.once(str(number).encode(), form)
    formed.clear()
    assert hasher.once(b" a", form)[1] == 1 and formed == [b" a"], "what was long ago is forgotten"
