"""The compiled SHA-256 against `hashlib`'s."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.openai.prompts import PromptReader
from ppd.proxy.plane import IS_FAST, TextHash, messages
from ppd.proxy.sessions.hasher import Hasher, no_text_units
from ppd.proxy.sessions.prefix_chain import Chain
from ppd.proxy.sessions.text_cuts import cuts_of

pytestmark = pytest.mark.skipif(not IS_FAST, reason="this CPU has no instructions for SHA-256")
SECRET = bytes(range(64))
BEFORE = {"user": b"user<", "tool": b"tool<"}


def hash_of(bits: int = 64, secret: bytes = SECRET) -> TextHash:
    return TextHash(secret, bits, BEFORE, b">", 9, lambda text: b"%d>" % len(text))


def expected(previous: int, before: bytes, text: bytes, end: bytes) -> int:
    whole = SECRET + b"U" + previous.to_bytes(8, "little") + before + text + end
    return int.from_bytes(hashlib.sha256(whole).digest()[:8], "little")


def test_every_length() -> None:
    hashed = hash_of()
    for size in (*range(200), 4095, 4096, 4097, 1_000_003):
        text, before = bytes(at * 7 & 255 for at in range(size)), b"user\xff" * (size % 5)
        assert hashed.key(size << 20, before, text, b"\xff") == expected(size << 20, before, text, b"\xff"), size


@given(st.integers(0, 2**64 - 1), st.binary(max_size=150), st.binary(max_size=150), st.binary(max_size=150))
def test_any_parts(previous: int, before: bytes, text: bytes, end: bytes) -> None:
    whole = expected(previous, before, text, end)
    assert hash_of().key(previous, before, text, end) == whole
    assert hash_of(60).key(previous, before, text, end) == whole >> 4


@pytest.mark.parametrize("secret", [b"", b"x" * 63, b"x" * 65])
def test_a_secret_of_another_size_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        hash_of(secret=secret)


@given(
    st.sampled_from(["user", "tool", "", "ü\ud800"]), st.text(max_size=9), st.text(max_size=9), st.binary(max_size=5000)
)
def test_a_message_has_the_key_that_hashlib_gives(role: str, name: str, call_id: str, text: bytes) -> None:
    fast, slow = Hasher(b"s" * 32), Hasher(b"s" * 32)
    slow._texts = None
    assert fast.text_unit(7, role, name, call_id, text) == slow.text_unit(7, role, name, call_id, text)


def test_a_run_ends_before_the_first_message_that_is_not_a_text_by_one_of_the_roles() -> None:
    def taken(*said: object) -> int:
        told = messages(msgspec.json.encode([{"role": "user", "content": "one"}, *said]))
        assert told is not None
        keys, ends, texts, roles, _ = hash_of().run(told[0], 0, 7, 100, 16)
        assert len(keys) == len(ends) == len(texts) == len(roles)
        return len(keys)

    assert taken({"role": "tool", "content": "123456789", "name": None}) == 2
    for other in (
        {"role": "assistant", "content": "no role"},
        {"role": "user", "content": ""},
        {"role": "user", "content": "a", "name": "b"},
        {"role": "tool", "content": "a", "tool_call_id": "b"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user"},
    ):
        assert taken(other, {"role": "user", "content": "a"}) == 1, other


def test_a_run_tells_keys_ends_texts_and_roles() -> None:
    told = messages(b'[{"role":"user","content":"a"},{"role":"tool","content":"bc"},{"role":"user","content":"d"}]')
    assert told is not None
    first = expected(7, b"tool<", b"bc", b">")
    keys = [first, expected(first, b"user<", b"d", b">")]
    assert hash_of().run(told[0], 1, 7, 100, 16) == (keys, [118, 135], [b"bc", b"d"], bytearray(b"tu"), [])
    assert hash_of().run(told[0], 3, 7, 100, 16) == ((), (), (), b"", ())


def test_a_run_hashes_the_beginning_of_a_long_text_and_then_what_ends_it_and_tells_which_are_long() -> None:
    told = messages(b'[{"role":"user","content":"a"},{"role":"tool","content":"1234567890"}]')
    assert told is not None
    first = expected(7, b"user<", b"a", b">")
    second = expected(first, b"tool<", b"123456789", b"10>")
    keys, ends, _, _, long_ones = hash_of().run(told[0], 0, 7, 100, 16)
    assert (keys, ends, long_ones) == ([first, second], [117, 143], [(first, b"tool<", b"1234567890", 117)])


def test_what_cannot_be_hashed_of_a_long_text_is_an_error() -> None:
    def fails(text: bytes) -> bytes:
        raise KeyError(text)

    told = messages(b'[{"role":"user","content":"1234567890"}]')
    assert told is not None
    with pytest.raises(KeyError):
        TextHash(SECRET, 64, BEFORE, b">", 9, fails).run(told[0], 0, 7, 100, 16)


TEXTS = st.text(max_size=5) | st.sampled_from(["x" * 300, "\n" * 4096, "x" * 4097, "x-anthropic-billing-header: 1"])
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "tool_result"]), "text": TEXTS}), max_size=2)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "user\n"]), "content": TEXTS | PARTS},
    optional={"name": TEXTS, "tool_call_id": st.sampled_from(["", "c1"]), "tool_calls": st.just([CALL])},
)


@given(st.lists(MESSAGE | MESSAGE.map(lambda one: {**one, "role": "user"}), min_size=1, max_size=40), st.booleans())
def test_a_chat_has_the_chain_that_single_steps_give(chat: list[Any], prefills: bool) -> None:
    slow = Hasher(b"s" * 32)
    slow._texts, slow.text_units = None, no_text_units
    raw = msgspec.Raw(msgspec.json.encode(chat))

    def read(hasher: Hasher) -> tuple[object, ...]:
        reader = PromptReader(hasher)
        tools = {"tools": msgspec.Raw(b'[{"type": "function"}]')} if len(chat) % 2 else {}
        chain: Chain = reader.chat(reader.head("", tools), raw, prefills=prefills)
        unit = chain.open_unit and (chain.open_unit.key(), chain.open_unit.size)
        return chain.keys, chain.ends, chain.marks, chain.texts, unit, list(cuts_of(chain))

    assert read(Hasher(b"s" * 32)) == read(slow)
