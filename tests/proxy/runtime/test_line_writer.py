"""Lines into pipes that are read, full, closed, or never read."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from ppd.proxy.runtime.line_writer import DirectLines, LineWriter, WriterLimits

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
    writer = LineWriter(pipe[1], lost_line)
    for number in range(1000):
        writer.put(b"line %d\n" % number)
    found = read_lines(pipe[0], lambda line: line == b"line 999")
    assert found == [b"line %d\n" % number for number in range(1000)]
    assert writer.lost == 0


def test_where_nothing_reads_nobody_waits_and_the_lost_are_told_when_lines_flow_again(
    pipe: tuple[int, int],
) -> None:
    writer = LineWriter(pipe[1], lost_line, limits=WriterLimits(queue_bytes=100 * len(LINE)))
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
    writer = LineWriter(pipe[1], lost_line)
    for number in range(200):
        writer.put(b"%99d\n" % number)
    assert len(read_lines(pipe[0], lambda line: line.endswith(b" 199"))) == 200
    assert writer.lost == 0


def test_a_reader_that_is_gone_costs_lines_and_no_more(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    writer = LineWriter(pipe[1], lost_line)
    writer.put(LINE)
    writer.flush(20)
    assert writer.lost == 1


def test_after_a_full_disk_a_line_begins_on_a_line_of_its_own() -> None:
    """The disk takes a line and a half, then nothing, then all again."""
    disk, room = bytearray(), [len(LINE) + 50, 0, 10_000]

    def write(fd: int, data: bytes) -> int:
        if not room[0]:
            room.pop(0)
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = data[: room[0]]
        disk.extend(taken)
        room[0] -= len(taken)
        return len(taken)

    writer = LineWriter(-1, lost_line, limits=WriterLimits(again_s=0.0), write=write)
    with writer._changed:  # so that one write takes both
        writer.put(LINE)
        writer.put(LINE)
    for line in (LINE, b"well\n"):
        writer.flush(20)
        writer.put(line)
    writer.flush(20)
    assert disk.splitlines(keepends=True) == [LINE, LINE[:50] + b"\n", b"well\n", lost_line(2)]
    assert writer.lost == 2


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
    LineWriter(pipe[1], lost_line, ticked.set, WriterLimits(tick_s=0.001))
    assert ticked.wait(20)
