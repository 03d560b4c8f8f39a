"""The supervisor, in a process of its own with children that it really forks: who is started again, and how all end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest

pytestmark = pytest.mark.e2e
LIMIT_S = 30.0
BEGIN = """
import os, select, signal, time
from ppd.proxy.peers import supervisor as module

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def wait(alive, *, drain_s=0.0, signals=1):
    "Until so many signals came, or the supervisor is gone; then drains."
    came = []
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)  # a handler would not run while select waits, if the signal came just before it
    for number in module.SIGNALS:
        signal.signal(number, lambda number, frame: None)
    say("ready", os.getpid())
    while len(came) < signals:
        readable, _, _ = select.select([reading, alive], [], [])
        if alive in readable:
            say("alone", os.getpid())
            return 0
        came.append(os.read(reading, 1)[0])
        say("got", os.getpid(), came[-1])
    time.sleep(drain_s)
    while select.select([reading], [], [], 0)[0]:
        say("got", os.getpid(), os.read(reading, 1)[0])
    say("drained", os.getpid())
    return 0

module.AGAIN_S = (0.01, 0.05)
count, again, reread, late = 2, {}, lambda: None, False

def started(index):
    "How often a process of this number was started."
    path = f"starts-{index}"
    with open(path, "a") as file:
        file.write("x")
    return len(open(path).read())
"""
END = """
supervisor = module.Supervisor(count, work, lambda: say("closed"), reread)
begun = time.process_time()
code = supervisor.run()
say("ended", code, round(time.process_time() - begun, 3))
if late:
    os.kill(os.getpid(), signal.SIGTERM)
raise SystemExit(code)
"""
WAITS = """
def work(member, alive):
    return wait(alive)
"""


class Supervised:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[list[str]] = []
        self._lines = Queue[str]()
        self._reader = Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def close(self) -> None:
        """Its children end by themselves."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def until(self, holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        ends_s = time.monotonic() + limit_s
        while not holds():
            self.said.append(self._lines.get(timeout=max(0.01, ends_s - time.monotonic())).split())

    def ready(self, count: int = 2) -> list[int]:
        """The processes that are ready, once there are so many."""
        self.until(lambda: len(self.pids("ready")) >= count)
        return self.pids("ready")

    def pids(self, what: str) -> list[int]:
        return [int(words[1]) for words in self.said if words[0] == what]

    def got(self) -> dict[int, list[int]]:
        found = dict[int, list[int]]()
        for words in self.said:
            if words[0] == "got":
                found.setdefault(int(words[1]), []).append(int(words[2]))
        return found

    def ends(self) -> int:
        """Its exit code, and all that was said until then."""
        code = self.process.wait(LIMIT_S)
        self._reader.join()
        while not self._lines.empty():
            self.said.append(self._lines.get().split())
        return code


@contextmanager
def supervised(folder: Path, work: str) -> Iterator[Supervised]:
    with (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + work + END],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            cwd=folder,
            start_new_session=True,
        )
    one = Supervised(process)
    try:
        yield one
    finally:
        one.close()


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def waited(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_and_all_are_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    with supervised(tmp_path, "def work(member, alive):\n    return wait(alive, drain_s=0.5 * member.index)") as one:
        pids = one.ready()
        one.process.send_signal(number)
        assert one.ends() == 0
        assert one.got() == {pid: [signal.SIGTERM] for pid in pids}
        assert sorted(one.pids("drained")) == sorted(pids)
        assert [words for words in one.said if words[0] == "closed"] == [["closed"]]
        assert not any(map(is_there, pids))


def test_who_waits_for_the_last_one_to_drain_does_not_spin(tmp_path: Path) -> None:
    with supervised(tmp_path, "def work(member, alive):\n    return wait(alive, drain_s=2.0 * member.index)") as one:
        one.ready()
        one.process.terminate()
        assert one.ends() == 0
        assert float(one.said[-1][2]) < 0.5, "seconds of CPU, of two that it waited"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_reaches_each_once(tmp_path: Path, number: signal.Signals) -> None:
    with supervised(tmp_path, "def work(member, alive):\n    return wait(alive, drain_s=0.5)") as one:
        pids = one.ready()
        os.killpg(one.process.pid, number)
        assert one.ends() == 0
        assert one.got() == {pid: [signal.SIGTERM] for pid in pids}


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    with supervised(tmp_path, "def work(member, alive):\n    return wait(alive, signals=2)") as one:
        pids = one.ready()
        one.process.terminate()
        one.until(lambda: len(one.got()) == 2)
        one.process.terminate()
        assert one.ends() == 128 + signal.SIGTERM
        assert one.got() == {pid: [signal.SIGTERM] for pid in pids}, "the other one nobody can put off"
        assert not any(map(is_there, pids))


def test_a_second_signal_after_the_drain_does_not_make_it_a_failure(tmp_path: Path) -> None:
    with supervised(tmp_path, WAITS + "late = True") as one:
        one.ready()
        one.process.terminate()
        assert one.ends() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_ends_is_started_again_and_nobody_else(tmp_path: Path, number: signal.Signals) -> None:
    with supervised(tmp_path, WAITS) as one:
        for starts in range(3, 5):
            victim = one.ready(starts - 1)[-1]
            os.kill(victim, number)
            one.ready(starts)
            waited(lambda gone=victim: not is_there(gone))  # type: ignore[misc]
            assert len(children(one.process.pid)) == 2, "none is left unburied"
            assert all(map(is_there, children(one.process.pid)))
        first = one.pids("ready")[0]
        assert first in children(one.process.pid)
        one.process.terminate()
        assert one.ends() == 0


def test_many_that_end_at_once_are_all_started_again(tmp_path: Path) -> None:
    with supervised(tmp_path, f"count = 5\n{WAITS}") as one:
        for pid in one.ready(5):
            os.kill(pid, signal.SIGKILL)
        one.ready(10)
        assert sorted(children(one.process.pid)) == sorted(one.pids("ready")[-5:])


def test_one_that_fails_at_once_again_and_again_is_started_for_ever(tmp_path: Path) -> None:
    """A night long: waits double until they are as long as they may be."""
    work = """
module.AGAIN_S = (0.0, 0.0)
def work(member, alive):
    if member.index:
        return wait(alive)
    say("failed", os.getpid())
    return 1
"""
    with supervised(tmp_path, work) as one:
        one.until(lambda: len(one.pids("failed")) > 1100, limit_s=10 * LIMIT_S)
        assert one.process.poll() is None


@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1, 2)], ids=str)
def test_settings_that_are_of_no_use_end_all_with_that_code(tmp_path: Path, bad: tuple[int, ...]) -> None:
    work = f"""
count = 3
def work(member, alive):
    if member.index in {bad}:
        return module.UNUSABLE
    return wait(alive)
"""
    with supervised(tmp_path, work) as one:
        assert one.ends() == os.EX_CONFIG
        assert sorted(one.pids("drained")) == sorted(one.pids("ready"))


def test_a_successor_that_cannot_begin_is_tried_again(tmp_path: Path) -> None:
    work = """
def work(member, alive):
    if member.index == 1 and started(1) in (2, 3):
        return module.UNUSABLE
    return wait(alive)
"""
    with supervised(tmp_path, work) as one:
        for pid in one.ready():
            os.kill(pid, signal.SIGKILL)
        one.ready(4)
        assert len((tmp_path / "starts-1").read_text()) == 4
        one.process.terminate()
        assert one.ends() == 0


def test_work_that_raises_is_logged_and_started_again(tmp_path: Path) -> None:
    work = """
def work(member, alive):
    if started(member.index) == 1:
        raise RuntimeError("as ordered")
    return wait(alive)
"""
    with supervised(tmp_path, work) as one:
        one.ready()
        assert (tmp_path / "err").read_text().count("\nRuntimeError: as ordered\n") == 2


def test_without_the_supervisor_all_end(tmp_path: Path) -> None:
    with supervised(tmp_path, f"count = 3\n{WAITS}") as one:
        pids = one.ready(3)
        os.kill(pids[0], signal.SIGKILL)
        pids = one.ready(4)
        one.process.kill()
        one.until(lambda: len(one.pids("alone")) == 3)
        waited(lambda: not any(map(is_there, pids)))


BEATS = """
module.pulse.LOOK_S = 0.02

def beat(member, alive, *, until=lambda: False):
    while not select.select([alive], [], [], 0.005)[0] and not until():
        member.pulse.beat()
"""


@pytest.mark.parametrize("how", ["it is stopped", "it loops"])
def test_one_that_hangs_is_killed_and_started_again_and_nobody_else(tmp_path: Path, how: str) -> None:
    work = f"""{BEATS}
def work(member, alive):
    loops = {how == "it loops"} and started(member.index) == 1 and member.index == 1
    say("ready", os.getpid())
    beat(member, alive, until=lambda: loops)
    while not select.select([alive], [], [], 0)[0]:
        pass
    return 0
"""
    with supervised(tmp_path, work) as one:
        pids = one.ready()
        if how == "it is stopped":
            os.kill(pids[-1], signal.SIGSTOP)
        one.ready(3)
        assert len(children(one.process.pid)) == 2
        assert "does not react and is killed" in (tmp_path / "err").read_text()


def test_all_that_were_stopped_together_go_on_together(tmp_path: Path) -> None:
    with supervised(
        tmp_path, f"{BEATS}\ndef work(member, alive):\n    say('ready', os.getpid())\n    beat(member, alive)"
    ) as one:
        pids = [*one.ready(), one.process.pid]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(1.2)
        assert sorted(children(one.process.pid)) == sorted(pids[:2])
        assert (tmp_path / "err").read_text() == ""


def test_one_that_hangs_as_it_drains_does_not_keep_the_others_up(tmp_path: Path) -> None:
    work = f"""{BEATS}
def work(member, alive):
    member.pulse.beat()
    time.sleep(0.1)
    member.pulse.beat()
    return wait(alive, drain_s=60.0 * member.index)
"""
    with supervised(tmp_path, f"module.pulse.SILENT_LOOKS = 100\n{work}") as one:
        one.ready()
        one.process.terminate()
        assert one.ends() == 128 + signal.SIGKILL, "its streams were cut"
        assert "process 1 of the proxy ended (-9) before it had drained" in (tmp_path / "err").read_text()


@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", 137), ("os._exit(3)", 3)])
def test_one_that_does_not_end_its_drain_shows_in_the_exit_code(tmp_path: Path, end: str, code: int) -> None:
    with supervised(tmp_path, f"def work(member, alive):\n    return wait(alive) or member.index and {end}") as one:
        one.ready()
        one.process.terminate()
        assert one.ends() == code
        assert (tmp_path / "err").read_text().count("before it had drained") == 1


def test_one_that_the_order_to_drain_ends_had_not_begun(tmp_path: Path) -> None:
    with supervised(tmp_path, "def work(member, alive):\n    say('ready', os.getpid())\n    time.sleep(60)") as one:
        one.ready()
        one.process.terminate()
        assert one.ends() == 0
        assert (tmp_path / "err").read_text() == ""


def test_a_signal_while_one_waits_to_be_started_again_ends_all(tmp_path: Path) -> None:
    work = """
module.AGAIN_S = (60.0, 60.0)
def work(member, alive):
    return 1 if member.index else wait(alive)
"""
    with supervised(tmp_path, work) as one:
        one.ready(1)
        waited(lambda: "process 1 of the proxy ended (1) and is started again" in (tmp_path / "err").read_text())
        one.process.terminate()
        assert one.ends() == 0
        assert len(one.pids("ready")) == 1


def test_the_processes_are_told_apart_and_share_a_secret(tmp_path: Path) -> None:
    work = """
count = 3
def work(member, alive):
    say("is", member.index, member.secret.hex(), *sorted(member.ends))
    return wait(alive)
"""
    with supervised(tmp_path, work) as one:
        one.ready(3)
        told = sorted(words[1:] for words in one.said if words[0] == "is")
        assert [(words[0], words[2:]) for words in told] == [("0", ["1", "2"]), ("1", ["0", "2"]), ("2", ["0", "1"])]
        assert len({words[1] for words in told}) == 1
