"""Which changes of a file are to be read, and when."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from ppd.proxy.runtime.watched_files import STILL_IF_SHORTER, WatchedFiles


@pytest.mark.parametrize("became", ["pipe", "device"])
def test_what_is_no_file_any_more_is_named_once_and_never_read(
    tmp_path: Path, became: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who opens a pipe waits for its writer, and with it the whole proxy."""
    file = tmp_path / "ppd.toml"
    file.write_text("port = 1")
    watched = WatchedFiles(file)
    file.unlink()
    if became == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    with caplog.at_level(logging.ERROR):
        assert [watched.are_new() for _ in range(10)] == [False] * 10
    assert [record.getMessage() for record in caplog.records] == [f"{file}: is a pipe or a device now, and is not read"]
    file.unlink()
    file.write_text("port = 2")
    assert [watched.are_new() for _ in range(3)] == [False, True, False]


def looks_until_new(watched: WatchedFiles) -> int:
    """How often it has to be asked; 20: it never says so."""
    return next((count for count in range(1, 20) if watched.are_new()), 20)


@pytest.mark.parametrize(
    ("became", "looks"),
    [("port = 10001", 2), ("port = 2", 2), ("port =", 1 + STILL_IF_SHORTER), ("", 1 + STILL_IF_SHORTER)],
)
def test_a_file_that_became_shorter_must_be_still_for_longer(tmp_path: Path, became: str, looks: int) -> None:
    """Whoever writes it may have come no farther, and what is there of it may be valid."""
    file = tmp_path / "ppd.toml"
    file.write_text("port = 1")
    os.utime(file, (0, 0))  # the system's clock for files has coarse ticks
    watched = WatchedFiles(file)
    file.write_text(became)
    assert looks_until_new(watched) == looks
    assert looks_until_new(watched) == 20


def test_a_writer_that_goes_on_within_that_time_is_never_read_in_between(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("1\n2\n3\n")
    watched = WatchedFiles(file)
    for written in ("", "1\n", "1\n2\n"):
        file.write_text(written)
        assert [watched.are_new() for _ in range(STILL_IF_SHORTER)] == [False] * STILL_IF_SHORTER
    file.write_text("1\n2\n3\n4\n")
    assert looks_until_new(watched) == 2


def test_a_file_to_be_looked_at_again_may_be_half_written_too(tmp_path: Path) -> None:
    file = tmp_path / "ppd.toml"
    file.write_text("port = 1")
    watched = WatchedFiles(file)
    watched.look_again()
    assert looks_until_new(watched) == 1
    file.write_text("port")
    watched.look_again()
    assert looks_until_new(watched) == 1 + STILL_IF_SHORTER
