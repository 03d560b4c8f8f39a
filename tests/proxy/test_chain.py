"""Chains of keys: equal for equal prefixes and for nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.chain import KEY_BITS, USUAL_KEYS, BlockHash, Chain, Hasher, Mark, UnitHash
from ppd.proxy.errors import ConfigError

HASHER = Hasher(b"a secret of the proxy")


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


def cut(text: str, at: list[int]) -> list[str]:
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


@given(st.binary(max_size=9000), st.binary(max_size=9000))
def test_a_prompts_chain_begins_with_the_chain_of_each_of_its_prefixes(data: bytes, more: bytes) -> None:
    short, long = chain_of(data), chain_of(data + more)
    assert long.keys[: len(short.keys)] == short.keys
    assert long.ends[: len(short.ends)] == short.ends


@given(st.binary(max_size=9000), st.binary(min_size=1, max_size=300), st.binary(max_size=300))
def test_a_mark_is_reached_by_what_continues_it_and_by_nothing_else(data: bytes, more: bytes, other: bytes) -> None:
    mark = chain_of(data + more).end()

    def reached(prompt: bytes) -> bool:
        chain = chain_of(prompt)
        places = [i for i, key in enumerate(chain.keys) if key == mark.key]
        return any(chain.reach(i, mark.tail, mark.check) == len(data + more) for i in places)

    assert reached(data + more)
    assert reached(data + more + other)
    assert reached(data + other) == (data + other).startswith(data + more)


@given(st.binary(max_size=5000), st.lists(st.integers(0, 5000)))
def test_blocks_do_not_depend_on_how_the_data_came(data: bytes, at: list[int]) -> None:
    blocks = BlockHash(HASHER, 1)
    for piece in cut(data.decode("latin-1"), at):
        blocks.add(piece.encode("latin-1"))
    assert blocks.mark() == chain_of(data).end()


def test_a_large_prompt_takes_few_hashes() -> None:
    assert len(chain_of(bytes(4_000_000)).keys) < 2200


def test_a_prompts_end_is_where_its_running_hash_resumes() -> None:
    data = b"x" * 1234
    resumed = chain_of(data).resume()
    resumed.add(b"reply")
    assert resumed.mark() == chain_of(data + b"reply").end()


def test_the_mark_of_whole_units_has_no_tail() -> None:
    chain = Chain((5, 6), (20, 40), HASHER)
    assert (chain.end(), chain.size, chain.reach(0, 0, 0)) == (Mark(6), 40, 20)


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
