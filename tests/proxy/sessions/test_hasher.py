"""Keyed hashes: what makes two keys differ, and what is computed once."""

from __future__ import annotations

import pytest

from ppd.proxy.errors import ConfigError
from ppd.proxy.sessions.hasher import KEY_BITS, USUAL_KEYS, Hasher
from tests.support.requests import HASHER


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


def test_what_lies_beyond_the_head_is_hashed_with_the_secret() -> None:
    secrets = (b"a secret of the proxy", b"a secret of the proxy", b"another secret of it")
    one, same, other = [Hasher(secret).beyond(b"text").digest() for secret in secrets]
    assert one == same != other


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
