"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppd.offline.experiment.files import check_writable, write_whole
from ppd.proxy.errors import FormatError


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.skipif(not Path("/dev/null").is_char_device(), reason="there is no null device here")
def test_a_device_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    """By its name, root would put a file in its place, for all programs of the machine."""
    (tmp_path / "link").symlink_to("/dev/null")
    check_writable(tmp_path / "link")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert Path("/dev/null").is_char_device()
    assert list(tmp_path.iterdir()) == [tmp_path / "link"]


@pytest.mark.parametrize("name", ["file/records", "folder", "n" * 300])
def test_what_cannot_be_written_is_known_beforehand(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for write in (check_writable, lambda path: write_whole(path, b"new")):
        with pytest.raises(FormatError, match="cannot be written: "):
            write(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new" / "file")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert list((tmp_path / "new").iterdir()) == []
