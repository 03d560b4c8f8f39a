"""The compiled SHA-256 against `hashlib`'s."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.plane import IS_FAST, TextHash
from ppd.proxy.sessions.hasher import Hasher

pytestmark = pytest.mark.skipif(not IS_FAST, reason="this CPU has no instructions for SHA-256")
SECRET = bytes(range(64))


def expected(previous: int, before: bytes, text: bytes, end: bytes) -> int:
    whole = SECRET + b"U" + previous.to_bytes(8, "little") + before + text + end
    return int.from_bytes(hashlib.sha256(whole).digest()[:8], "little")


def test_every_length() -> None:
    hashed = TextHash(SECRET)
    for size in (*range(200), 4095, 4096, 4097, 1_000_003):
        text, before = bytes(at * 7 & 255 for at in range(size)), b"user\xff" * (size % 5)
        assert hashed.key(size << 20, before, text, b"\xff") == expected(size << 20, before, text, b"\xff"), size


@given(st.integers(0, 2**64 - 1), st.binary(max_size=150), st.binary(max_size=150), st.binary(max_size=150))
def test_any_parts(previous: int, before: bytes, text: bytes, end: bytes) -> None:
    assert TextHash(SECRET).key(previous, before, text, end) == expected(previous, before, text, end)


@pytest.mark.parametrize("secret", [b"", b"x" * 63, b"x" * 65])
def test_a_secret_of_another_size_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        TextHash(secret)


@given(
    st.sampled_from(["user", "tool", "", "ü\ud800"]), st.text(max_size=9), st.text(max_size=9), st.binary(max_size=5000)
)
def test_a_message_has_the_key_that_hashlib_gives(role: str, name: str, call_id: str, text: bytes) -> None:
    fast, slow = Hasher(b"s" * 32), Hasher(b"s" * 32)
    slow._texts = None
    assert fast.text_unit(7, role, name, call_id, text) == slow.text_unit(7, role, name, call_id, text)
