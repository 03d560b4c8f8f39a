"""The key file while the proxy runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from ppd.proxy.admission.key_file import KeyRing, load
from ppd.proxy.admission.keys import Client, encode, hash_of
from ppd.proxy.errors import ConfigError
from ppd.proxy.runtime.watched_files import STILL_IF_SHORTER, watch


def entry(key: str, priority: int = 0) -> str:
    """A table for the key of that name."""
    return encode(Client(name=key, tenant=key, priority=priority), hash_of(key))


def held(ring: KeyRing, *keys: str) -> list[str]:
    return [key for key in keys if ring.find(key) is not None]


def write(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(entry("one") + entry("two"))
    return path


def test_what_the_file_adds_removes_and_changes_counts_from_the_next_reload(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ring = KeyRing(file)
    assert held(ring, "one", "two", "new") == ["one", "two"]
    file.write_text(entry("two", priority=-1) + entry("new"))
    assert held(ring, "one", "two", "new") == ["one", "two"]
    assert ring.reload()
    assert held(ring, "one", "two", "new") == ["two", "new"]
    found = ring.find("two")
    assert found is not None
    assert found.priority == -1
    assert "2 in force; added: new; removed: one; changed: two" in caplog.text


def test_a_file_may_withdraw_all_keys(file: Path) -> None:
    ring = KeyRing(file)
    file.write_text("key = []")
    assert ring.reload()
    assert held(ring, "one", "two") == []


@pytest.mark.parametrize("text", ["", "\n", "# all keys are gone\n"])
def test_an_emptied_file_withdraws_none(file: Path, text: str) -> None:
    ring = KeyRing(file)
    file.write_text(text)
    assert not ring.reload()
    assert held(ring, "one", "two") == ["one", "two"]
    with pytest.raises(ConfigError, match=r"write `key = \[\]`"):
        KeyRing(file)


@pytest.mark.parametrize("text", ["[[key]]\n", "nonsense", None])
def test_a_file_that_can_not_be_used_changes_nothing_and_is_logged(
    file: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing(file)
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    assert not ring.reload()
    assert held(ring, "one", "two") == ["one", "two"]
    assert f"the changed keys are not used: {file}: " in caplog.text


@pytest.mark.parametrize("text", ["nonsense", None])
def test_a_start_needs_a_file_that_can_be_used(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.toml: must be"):
        KeyRing(file)
    with pytest.raises(ConfigError, match="must be a readable key file"):
        load(tmp_path)


def test_the_admin_key_is_no_clients(file: Path) -> None:
    with pytest.raises(ConfigError, match="key 'two': must differ from admin_key"):
        KeyRing(file, admin_key="two")
    ring = KeyRing(file, admin_key="admin")
    file.write_text(entry("admin"))
    assert not ring.reload()
    assert held(ring, "one", "admin") == ["one"]


def test_without_an_admin_key_no_client_is_suspected(file: Path) -> None:
    file.write_text(entry("one") + encode(Client(name="empty", tenant="empty"), hash_of("")))
    assert held(KeyRing(file, admin_key=""), "one") == ["one"]


def test_a_change_is_taken_once_and_only_when_the_file_is_at_rest(file: Path) -> None:
    whole = entry("one") + entry("two") + entry("new")
    ring = KeyRing(file)
    assert ring.look() is None
    file.write_text(whole[: whole.index("[[key]]", 1)])  # half of it is a good file
    assert ring.look() is None
    file.write_text(whole)
    assert ring.look() is None
    assert held(ring, "one", "two", "new") == ["one", "two"]
    assert ring.look() is True
    assert held(ring, "one", "two", "new") == ["one", "two", "new"]
    assert ring.look() is None


def test_a_writer_that_pauses_between_two_keys_withdraws_none(file: Path) -> None:
    ring, (one, two, new) = KeyRing(file), (entry("one"), entry("two"), entry("new"))
    for written in (one, one + two):
        file.write_text(written)
        for _ in range(3):
            ring.look()
            assert held(ring, "one", "two", "new") == ["one", "two"]
    file.write_text(one + two + new)
    assert [ring.look(), ring.look()] == [None, True]
    assert held(ring, "one", "two", "new") == ["one", "two", "new"]


def test_a_longer_file_that_lacks_a_key_is_waited_for_as_a_shorter_one(file: Path) -> None:
    """Its writer may have come to that border of two keys, and write on."""
    ring, note = KeyRing(file), "# " + "a long history of these keys " * 20 + "\n"
    file.write_text(note + entry("one"))
    assert [ring.look() for _ in range(STILL_IF_SHORTER)] == [None] * STILL_IF_SHORTER
    file.write_text(note + entry("one") + entry("two"))
    assert [ring.look() for _ in range(2)] == [None, True]
    file.write_text(note * 2 + entry("one"))
    assert [ring.look() for _ in range(1 + STILL_IF_SHORTER)] == [None] * STILL_IF_SHORTER + [True]
    assert held(ring, "one", "two") == ["one"]


def test_a_change_between_reading_and_watching_is_not_missed(file: Path) -> None:
    ring = KeyRing(file)
    file.write_text(entry("one") + entry("two") + entry("new"))
    assert [ring.look(), ring.look()] == [None, True]


def test_a_bad_file_is_logged_once_and_a_good_one_taken_after_it(file: Path) -> None:
    ring = KeyRing(file)
    file.write_text("nonsense" * 1000)
    assert [ring.look() for _ in range(3)] == [None, False, None]
    file.unlink()
    assert [ring.look() for _ in range(3)] == [None, False, None]
    beside = file.with_name("beside")
    beside.write_text(entry("two"))
    beside.replace(file)
    assert [ring.look() for _ in range(STILL_IF_SHORTER + 2)] == [*[None] * STILL_IF_SHORTER, True, None]
    assert held(ring, "one", "two") == ["two"]


def test_new_rights_are_a_change(file: Path) -> None:
    ring, before = KeyRing(file), file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == before:  # the system's clock for files has coarse ticks
        file.chmod(0o640)
    assert [ring.look(), ring.look()] == [None, True]


async def test_a_watched_file_is_read_again_when_it_changes(file: Path) -> None:
    ring, said = KeyRing(file), asyncio.Queue[bool]()
    watching = asyncio.create_task(watch(ring.look, said.put_nowait, every_s=0.005))
    for text, taken, keys in (
        (entry("one"), True, ["one"]),
        ("nonsense", False, ["one"]),
        (entry("two"), True, ["two"]),
    ):
        write(file, text)
        assert await asyncio.wait_for(said.get(), 60) is taken
        assert held(ring, "one", "two") == keys
    watching.cancel()
