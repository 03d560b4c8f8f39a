"""Keyed hashes: what makes two keys differ, and what is computed once."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy import plane
from ppd.proxy.errors import ConfigError
from ppd.proxy.sessions.hasher import DIGEST_BYTES, KEY_BITS, PLACE_BYTES, USUAL_KEYS, AskedLately, Hasher
from ppd.proxy.sessions.prefix_chain import UnitHash
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


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_text_has_a_digest_by_the_secret(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane, "IS_FAST", is_fast and plane.IS_FAST)
    secrets = (b"a secret of the proxy", b"a secret of the proxy", b"another secret of it")
    one, same, other = [Hasher(secret).digest(b"text") for secret in secrets]
    assert one == same != other
    assert len(one) == DIGEST_BYTES
    assert len({Hasher(secrets[0]).digest(text) for text in (b"", b"\0", b"\0\0", bytes(16), bytes(17))}) == 5


def test_an_open_text_of_a_machine_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane, "IS_FAST", False)
    hasher = Hasher(b"a secret of the proxy")
    first = hasher.open_text()
    first.update(b"a")
    second = first.copy()
    second.update(memoryview(b"b"))
    assert (first.digest(), first.digest(), second.digest()) == (*[hasher.digest(b"a")] * 2, hasher.digest(b"ab"))
    told = hasher.text_unit(7, "user", None, None, b"ab")
    unit = UnitHash(hasher, 7, "user")
    unit.add_text("ab")
    assert told == unit.key() != hasher.text_unit(7, "user", None, None, b"a")


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


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60), st.integers(2, 20))
def test_what_was_asked_for_last_is_kept(steps: list[tuple[bool, int]], most: int) -> None:
    sizes = (1, 1, 1, 2, 2, 2, 1, 1, 2, 2)  # thousands of bytes that each takes
    kept, newest = AskedLately[bytes](most * 1000), list[int]()  # the last is the newest
    units = [bytes((number,)) * (size * 1000 - PLACE_BYTES) for number, size in enumerate(sizes)]
    for is_added, number in steps:
        found = kept.find(b"%d" % number)
        assert found in (units[number], None)
        recent = [*accumulate(sizes[one] for one in reversed(newest))]
        assert found or number not in newest or recent[newest[::-1].index(number)] > most - 1, (
            "but for one that found no room"
        )
        if is_added and found is None:
            kept.add(b"%d" % number, units[number])
        if is_added or found is not None:
            newest = [*(one for one in newest if one != number), number]
        assert sum(sizes[one[0]] for table in (kept._newer, kept._older) for one in table.values()) <= 2 * most
