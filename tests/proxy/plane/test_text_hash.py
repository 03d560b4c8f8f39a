"""The compiled hashes against `hashlib`, and against POLYVAL as RFC 8452 writes it down."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.openai.prompts.messages import read_messages
from ppd.proxy.openai.prompts.reader import PromptReader
from ppd.proxy.plane import IS_FAST, TextHash, TextPoint, messages
from ppd.proxy.sessions.hasher import Hasher, no_units
from ppd.proxy.sessions.message_units import CallPlaces, MessageUnit
from ppd.proxy.sessions.prefix_chain import Chain
from ppd.proxy.sessions.text_cuts import cuts_of
from ppd.proxy.sessions.text_kinds import kind_of

pytestmark = pytest.mark.skipif(not IS_FAST, reason="this CPU has no instructions for SHA-256 and carry-less products")
SECRET = bytes(range(64))
POINT = bytes.fromhex("25629347589242761d31f826ba4b757b")
BEFORE = {"user": b"user<", "tool": b"tool<"}


# -- POLYVAL, slowly. Section 3 of the RFC has the field, Appendix A the example.

_MODULUS = 1 << 128 | 1 << 127 | 1 << 126 | 1 << 121 | 1
_OVER_X_128 = 1 << 127 | 1 << 124 | 1 << 121 | 1 << 114 | 1


def times(one: int, other: int) -> int:
    product = 0
    for bit in range(128):
        product ^= (one << bit) * (other >> bit & 1)
    for bit in range(255, 127, -1):
        product ^= (_MODULUS << (bit - 128)) * (product >> bit & 1)
    return product


def polyval(point: bytes, blocks: bytes) -> bytes:
    by, total = times(int.from_bytes(point, "little"), _OVER_X_128), 0
    for at in range(0, len(blocks), 16):
        total = times(total ^ int.from_bytes(blocks[at : at + 16], "little"), by)
    return total.to_bytes(16, "little")


def digest(text: bytes, point: bytes = POINT) -> bytes:
    """As AES-GCM-SIV takes it of a text alone: whole blocks, then the lengths in bits."""
    return polyval(point, text + bytes(-len(text) % 16) + bytes(8) + (8 * len(text)).to_bytes(8, "little"))


def test_the_slow_polyval_is_the_one_of_the_rfc() -> None:
    blocks = "4f4f95668c83dfb6401762bb2d01a262d1a24ddd2721d006bbe45f20d3c9f362"
    assert polyval(POINT, bytes.fromhex(blocks)).hex() == "f7a3b47b846119fae5b7866cf5e5b77e"


def in_pieces(text: bytes, at: Sequence[int], point: bytes = POINT) -> bytes:
    opened, ends = TextPoint(point).open(), sorted({0, len(text), *(min(one, len(text)) for one in at)})
    for start, end in pairwise(ends):
        opened.update(memoryview(text)[start:end])
        opened.digest()  # asking does not disturb
    return opened.digest()


def test_a_text_of_every_length_has_its_digest() -> None:
    text = Random(1).randbytes(1200)
    for size in (*range(300), *range(500, 540), 1023, 1024, 1025, 1200):
        whole = TextPoint(POINT).digest_of(memoryview(text)[:size])
        assert whole == in_pieces(text[:size], ()) == digest(text[:size]), size


@given(st.binary(min_size=16, max_size=16), st.binary(max_size=700), st.lists(st.integers(0, 700), max_size=20))
def test_a_text_has_its_digest_however_it_was_cut(point: bytes, text: bytes, at: list[int]) -> None:
    assert in_pieces(text, at, point) == digest(text, point)


def test_a_copy_of_an_open_text_goes_on_by_itself() -> None:
    first = TextPoint(POINT).open()
    first.update(b"a" * 700)
    second = first.copy()
    first.update(b"b")
    second.update(b"c" * 20)
    assert (first.digest(), second.digest()) == (digest(b"a" * 700 + b"b"), digest(b"a" * 700 + b"c" * 20))


BY_LANES = """
#include "polyval.h"
int most(void) { return polyval_lanes(); }
void digest(const unsigned char *secret, const unsigned char *text, size_t size, size_t cut, unsigned char *to) {
    polyval_point_t point;
    polyval_t state;
    (void)polyval_is_there;
    polyval_point(&point, secret);
    polyval_start(&state);
    polyval_add(&point, &state, text, cut);
    polyval_add(&point, &state, text + cut, size - cut);
    polyval_end(&point, &state, to);
}
"""


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_cpus_with_products_of_any_width_find_the_same(lanes: int, tmp_path: Path) -> None:
    (tmp_path / "lanes.c").write_text(BY_LANES)
    header = Path(__file__).parents[3] / "proxy" / "plane"
    flags = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{header}", f"-DPOLYVAL_LANES={lanes}")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # the sanitizers'
    command = [shutil.which("gcc") or "cc", *flags, "-o", "lanes.so", "lanes.c"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    library = ctypes.CDLL(str(tmp_path / "lanes.so"))
    if lanes > library.most():
        pytest.skip("this CPU has no products so wide")
    library.digest.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_char_p]
    library.digest.restype = None
    text, point = Random(3).randbytes(5000), TextPoint(POINT)
    for size in (*range(600), 4095, 4096, 5000):
        found = ctypes.create_string_buffer(16)
        library.digest(POINT, text, size, size * 2 // 3, found)
        assert found.raw == point.digest_of(text[:size]), size


@pytest.mark.parametrize("secret", [b"", b"x" * 15, b"x" * 17])
def test_a_point_of_another_size_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        TextPoint(secret)


def test_an_open_text_comes_from_a_point() -> None:
    with pytest.raises(TypeError, match="TextPoint"):
        type(TextPoint(POINT).open())()


# -- keys


def hash_of(bits: int = 64, secret: bytes = SECRET) -> TextHash:
    return TextHash(secret, TextPoint(POINT), bits, BEFORE, 9)


def expected(previous: int, before: bytes, text: bytes) -> int:
    whole = SECRET + b"U" + previous.to_bytes(8, "little") + before + b"T" + digest(text)
    return int.from_bytes(hashlib.sha256(whole).digest()[:8], "little")


def test_every_length() -> None:
    hashed = hash_of()
    for size in range(200):
        before = bytes(at * 7 & 255 for at in range(size))
        assert hashed.key(size << 20, before, b"text") == expected(size << 20, before, b"text"), size


@given(st.integers(0, 2**64 - 1), st.binary(max_size=150), st.binary(max_size=150))
def test_any_parts(previous: int, before: bytes, text: bytes) -> None:
    whole = expected(previous, before, text)
    assert hash_of().key(previous, before, text) == whole
    assert hash_of(60).key(previous, before, text) == whole >> 4


def test_the_beginnings_of_a_text_have_keys_behind_their_own_marks() -> None:
    text, offsets = Random(2).randbytes(900), [0, 5, 5, 16, 255, 899, 900]
    keys = hash_of().cuts(b"N\xfd", 7, b"user<", text, offsets)
    for key, offset in zip(keys, offsets, strict=True):
        whole = SECRET + b"N" + (7).to_bytes(8, "little") + b"user<\xfd" + digest(text[:offset])
        assert key == int.from_bytes(hashlib.sha256(whole).digest()[:8], "little")
    assert hash_of().cuts(b"N\xfd", 7, b"", text, []) == []


@pytest.mark.parametrize("offsets", [[-1], [5, 4], [11], [3, 11]])
def test_beginnings_that_are_not_in_the_text_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="rise"):
        hash_of().cuts(b"N\xfd", 7, b"", b"0123456789", offsets)


@pytest.mark.parametrize("domain", [b"", b"N", b"N\xfdx"])
def test_beginnings_are_hashed_behind_a_letter_and_a_mark(domain: bytes) -> None:
    with pytest.raises(ValueError, match="a letter and a mark"):
        hash_of().cuts(domain, 7, b"", b"0123456789", [])


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
        keys, ends, roles, _ = hash_of().run(told[0], 0, 7, 100, 16, None)
        assert len(keys) == len(ends) == len(roles)
        return len(keys)

    assert taken({"role": "tool", "content": "123456789", "name": None}) == 2
    for other in (
        {"role": "assistant", "content": "no role"},
        {"role": "user", "content": ""},
        {"role": "user", "content": "a", "name": "b"},
        {"role": "tool", "content": "a", "tool_call_id": "b"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user"},
    ):
        assert taken(other, {"role": "user", "content": "a"}) == 1, other


@pytest.mark.parametrize(
    "point", [None, TextPoint(POINT) if IS_FAST else None, TextPoint(SECRET[:16]) if IS_FAST else None]
)
def test_a_run_tells_keys_ends_and_roles(point: TextPoint | None) -> None:
    """Whether the texts were hashed as they were found, by this point or another, or were not."""
    raw = b'[{"role":"user","content":"a"},{"role":"tool","content":"b\\n"},{"role":"user","content":"d"}]'
    told = messages(raw, point=point)
    assert told is not None
    first = expected(7, b"tool<", b"b\n")
    keys = [first, expected(first, b"user<", b"d")]
    assert hash_of().run(told[0], 1, 7, 100, 16, None) == (keys, [118, 135], bytearray(b"tu"), [])
    assert hash_of().run(told[0], 3, 7, 100, 16, None) == ([], [], bytearray(), [])


def test_a_run_tells_which_texts_are_long() -> None:
    told = messages(b'[{"role":"user","content":"123456789"},{"role":"tool","content":"1234567890"}]')
    assert told is not None
    first = expected(7, b"user<", b"123456789")
    second = expected(first, b"tool<", b"1234567890")
    keys, ends, _, long_ones = hash_of().run(told[0], 0, 7, 100, 16, None)
    assert (keys, ends, long_ones) == ([first, second], [125, 151], [(first, b"tool<", told[0][1], 125)])


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
    slow._texts, slow.many_units = None, no_units
    raw = msgspec.Raw(msgspec.json.encode(chat))

    def read(hasher: Hasher) -> tuple[object, ...]:
        reader = PromptReader(hasher)
        tools = {"tools": msgspec.Raw(b'[{"type": "function"}]')} if len(chat) % 2 else {}
        chain: Chain = reader.chat(reader.head("", tools), read_messages(raw, hasher), prefills=prefills)
        unit = chain.open_unit and (chain.open_unit.key(), chain.open_unit.size)
        kinds = tuple(map(kind_of, chain.texts))
        return chain.keys, chain.ends, chain.marks, kinds, unit, list(cuts_of(chain))

    assert read(Hasher(b"s" * 32)) == read(slow)


HASHER = Hasher(b"s" * 32)
PACKED = MessageUnit(HASHER, "user", "n", "c1")
PACKED.add_text("a")
PACKED.add_call("c2", 5, 1, CallPlaces())
PACKED.add_result(MessageUnit(HASHER, "tool", "", "c2", is_part=True), CallPlaces())


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 9), st.binary(max_size=4)), max_size=3))
def test_bytes_that_are_no_packed_unit_are_refused_or_hashed(spans: list[tuple[int, int, bytes]]) -> None:
    unit = PACKED.packed(weighs=1) or b""
    for start, size, new in spans:
        unit = unit[:start] + new + unit[start + size :]
    try:
        key = HASHER.known_unit(7, unit, CallPlaces())
    except (ValueError, UnicodeDecodeError):
        return
    assert 0 <= key < 1 << 60


def packed(*steps: bytes, before: int = 3, answers: int = 0) -> bytes:
    return struct.pack("<BBBxIIHH", 0, 0, 0, 1, 1, before, answers) + b"\xff" * 3 + b"".join(steps)


@pytest.mark.parametrize(
    ("unit", "why"),
    [
        *((packed()[:size], "has a head") for size in (0, 15)),
        (packed(before=0), "begins with who says it"),
        (packed(before=4), "begins with who says it"),
        (packed(answers=1), "begins with who says it"),
        *((packed(b"S\x01\x00a"[:size]), "ends in its unit") for size in (1, 2, 3)),
        (packed(b"S\xff\xff"), "ends in its unit"),
        (packed(b"C\x07\x00aaaaaaa"), "ends in its unit"),
        (packed(b"R\x04\x00abcd"), "has a head"),
    ],
)
def test_a_unit_that_is_cut_off_is_refused(unit: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        HASHER.known_unit(7, unit, CallPlaces())
    assert HASHER.known_unit(7, packed(b"S\x01\x00a", b"C\x08\x00abcdefgh"), CallPlaces())
