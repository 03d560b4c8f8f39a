"""Lines into pipes that are read, full, closed, or never read."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ppd.proxy.runtime.line_writer import (
    BATCH_BYTES,
    DescriptorSink,
    DirectLines,
    FileSink,
    LineWriter,
    WriterLimits,
)

ROOM = 4096
LINE = b"x" * 99 + b"\n"


def lost_line(count: int) -> bytes:
    return b"lost %d\n" % count


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A small one: reading end, writing end."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, ROOM)
    yield ends
    for end in ends:
        with suppress(OSError):
            os.close(end)


def read_lines(fd: int, until: Callable[[bytes], bool]) -> list[bytes]:
    """What comes, line by line, until it holds of a line."""
    data = b""
    while not any(until(line) for line in data.splitlines()):
        ready, _, _ = select.select([fd], [], [], 20)
        assert ready, data[-200:]
        data += os.read(fd, 65536)
    return data.splitlines(keepends=True)


def test_lines_come_whole_and_in_order(pipe: tuple[int, int]) -> None:
    writer = LineWriter(DescriptorSink(pipe[1]), lost_line)
    for number in range(1000):
        writer.put(b"line %d\n" % number)
    found = read_lines(pipe[0], lambda line: line == b"line 999")
    assert found == [b"line %d\n" % number for number in range(1000)]
    assert writer.lost == 0


def test_where_nothing_reads_nobody_waits_and_the_lost_are_told_when_lines_flow_again(
    pipe: tuple[int, int],
) -> None:
    writer = LineWriter(DescriptorSink(pipe[1]), lost_line, limits=WriterLimits(queue_bytes=100 * len(LINE)))
    for _ in range(5000):
        writer.put(LINE)
    writer.flush(0.01)
    assert 4000 < writer.lost < 5000
    found = read_lines(pipe[0], lambda line: line.startswith(b"lost"))
    assert len(found[:-1]) == 5000 - writer.lost
    assert set(found[:-1]) == {LINE}
    assert found[-1] == lost_line(writer.lost)
    writer.put(b"later\n")
    assert read_lines(pipe[0], lambda line: line == b"later") == [b"later\n"]


def test_a_pipe_that_does_not_block_is_waited_for(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    writer = LineWriter(DescriptorSink(pipe[1]), lost_line)
    for number in range(200):
        writer.put(b"%99d\n" % number)
    assert len(read_lines(pipe[0], lambda line: line.endswith(b" 199"))) == 200
    assert writer.lost == 0


def test_a_reader_that_is_gone_costs_lines_and_no_more(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    writer = LineWriter(DescriptorSink(pipe[1]), lost_line)
    writer.put(LINE)
    writer.flush(20)
    assert writer.lost == 1


class Disk:
    """Takes so many bytes, fails once, takes so many again, and so on."""

    def __init__(self, *room: int, write: Callable[[int, bytes], int]) -> None:
        self.room = list(room)
        self._write = write

    def __call__(self, fd: int, data: bytes) -> int:
        if not self.room[0]:
            self.room.pop(0)
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._write(fd, data[: self.room[0]])
        self.room[0] -= taken
        return taken


def test_after_a_full_disk_a_line_begins_on_a_line_of_its_own() -> None:
    written = bytearray()

    def write(fd: int, data: bytes) -> int:
        written.extend(data)
        return len(data)

    sink = DescriptorSink(-1, Disk(len(LINE) + 50, 0, 10_000, write=write))
    assert [sink(lines) for lines in ([LINE, LINE], [LINE], [b"well\n"])] == [1, 0, 1]
    assert written.splitlines(keepends=True) == [LINE, LINE[:50] + b"\n", b"well\n"]


@pytest.mark.parametrize("room", [(150, 0, 10_000), (200, 10_000), (50, 10_000), (0, 0, 10_000)])
def test_a_file_on_a_full_disk_holds_no_half_line(tmp_path: Path, room: tuple[int, ...]) -> None:
    file, errors = tmp_path / "log", list[OSError]()
    sink = FileSink(file, errors.append, Disk(*room, write=os.write))
    given = [[b"%99d\n" % (3 * batch + number) for number in range(3)] for batch in range(4)]
    counts = [sink(lines) for lines in given]
    kept = [line for lines, count in zip(given, counts, strict=True) for line in lines[:count]]
    assert file.read_bytes() == b"".join(kept)
    assert len(errors) == sum(count < 3 for count in counts) > 0
    assert counts[-1] == 3


def test_a_rotated_file_is_left_alone(tmp_path: Path) -> None:
    file, errors = tmp_path / "log", list[OSError]()
    sink = FileSink(file, errors.append)
    assert sink([LINE]) == 1
    file.rename(tmp_path / "log.1")
    assert sink([b"new\n"]) == 1
    assert ((tmp_path / "log.1").read_bytes(), file.read_bytes(), errors) == (LINE, b"new\n", [])


def test_a_pipe_that_nobody_reads_is_an_error_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "log")
    errors = list[OSError]()
    sink = FileSink(pipe, errors.append)
    assert (sink([LINE]), len(errors)) == (0, 1)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        assert sink([LINE]) == 1
        assert reader.read(len(LINE)) == LINE
    assert sink([LINE]) == 0


def test_what_forks_writes_only_what_can_be_written_at_once(pipe: tuple[int, int]) -> None:
    lines = DirectLines(pipe[1], lost_line)
    for _ in range(1000):
        lines.put(LINE)
    assert lines.lost > 900
    before = len(read_lines(pipe[0], lambda line: line + b"\n" == LINE))
    lost = lines.lost
    lines.put(b"later\n")
    assert before == 1000 - lost
    assert read_lines(pipe[0], lambda line: line == b"later") == [lost_line(lost), b"later\n"]
    assert os.get_blocking(pipe[1]), "others write to the same pipe"


def test_a_tick_comes_where_no_line_does(pipe: tuple[int, int]) -> None:
    ticked = threading.Event()
    LineWriter(DescriptorSink(pipe[1]), lost_line, ticked.set, WriterLimits(tick_s=0.001))
    assert ticked.wait(20)


def test_a_pause_gathers_lines_and_holds_no_whole_batch_back() -> None:
    taken, has_all = list[bytes](), threading.Event()
    half = b"x" * (BATCH_BYTES // 2 - 1) + b"\n"

    def sink(lines: list[bytes]) -> int:
        taken.extend(lines)
        if len(taken) >= 8:  # of nine: less than a batch may wait for more
            has_all.set()
        return len(lines)

    writer = LineWriter(sink, lost_line, limits=WriterLimits(pause_s=3600.0))
    for _ in range(9):
        writer.put(half)
    assert has_all.wait(5), len(taken)
    writer.close(5)
    assert len(taken) == 9


def test_after_a_write_that_failed_a_batch_waits_too() -> None:
    failed, has_failed = list[int](), threading.Event()

    def full(lines: list[bytes]) -> int:
        failed.append(len(lines))
        has_failed.set()
        return 0

    writer = LineWriter(full, lost_line, limits=WriterLimits(again_s=3600.0))
    writer.put(b"x" * BATCH_BYTES)
    assert has_failed.wait(5)
    for _ in range(3):
        writer.put(b"x" * BATCH_BYTES)
    assert failed == [1]
    writer.close(5)
