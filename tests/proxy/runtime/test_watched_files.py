"""Which changes of a file are to be read, and when."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from ppd.proxy.runtime.watched_files import WatchedFiles


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
        assert [watched.are_new() for _ in range(5)] == [False] * 5
    assert [record.getMessage() for record in caplog.records] == [f"{file}: is a pipe or a device now, and is not read"]
    file.unlink()
    file.write_text("port = 2")
    assert [watched.are_new() for _ in range(3)] == [False, True, False]
