"""Whole sweeps by the command line: a running fleet with a fault in the middle, fleets that are launched, virtual time
in processes and on Ray; each interrupted and resumed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from ppd.offline.experiment.records import Outcome, RunResult
from ppd.offline.sweep.folder import SweepFolder
from ppd.proxy.fleet.engine_metrics import parse_metrics
from ppd.proxy.laws.profile_file import encode
from tests.support.proxy import ADMIN_KEY
from tests.support.stepped_engine import profile_of

pytestmark = pytest.mark.e2e

PROGRAM = "from ppd.offline.cli.main import build_table; build_table()"
GRID = """
qps = [8]
seconds = 1.5
conversations = 8
seeds = {seeds}
[topologies]
{topologies}
[first]
small = {{ new_tokens = 64, output_tokens = 16 }}
[later]
tiny = {{ new_tokens = 16, output_tokens = 8 }}
"""
PROFILE = profile_of(kv_capacity_tokens=100_000)


def write_grid(tmp_path: Path, topologies: str, seeds: int = 1) -> str:
    path = tmp_path / "g.toml"
    path.write_text(GRID.format(topologies=topologies, seeds=seeds))
    return str(path)


class Program:
    """`ppd-build-table` in a process group of its own, as in a terminal."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *argv: str, cwd: Path) -> Program:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, *argv),
            cwd=cwd,
            env=os.environ | {"PPD_ADMIN_KEY": ADMIN_KEY},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return cls(process)

    def interrupt(self) -> None:
        """Ctrl-C reaches every process of the group."""
        os.killpg(self._process.pid, signal.SIGINT)

    async def ended(self, limit_s: float = 120) -> tuple[int, str]:
        out, _ = await asyncio.wait_for(self._process.communicate(), limit_s)
        assert self._process.returncode is not None
        return self._process.returncode, out.decode()


async def run_program(*argv: str, cwd: Path) -> tuple[int, str]:
    return await (await Program.start(*argv, cwd=cwd)).ended()


async def until(holds: Callable[[], bool], limit_s: float = 60) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():
            await asyncio.sleep(0.02)


def saved(folder: Path) -> list[Path]:
    return sorted((folder / "runs").rglob("*.jsonl.gz"))


def results(folder: Path) -> dict[str, RunResult]:
    found = list(SweepFolder(folder).results())
    assert len({result.run.id for result in found}) == len(found)
    return {result.run.id: result for result in found}


def routes(result: RunResult) -> Counter[tuple[int, str]]:
    return Counter((record.turn, record.route) for record in result.records)


async def test_a_sweep_of_a_running_fleet_outlives_a_worker_and_resuming_makes_it_whole(
    start_fleet: Any, tmp_path: Path
) -> None:
    grid, out = write_grid(tmp_path, "1P_2D = [0, 1]\n4R = []", seeds=3), tmp_path / "out"
    async with start_fleet("P1 D1 D2", engine={"time_scale": 0.2, "shutdown_s": 0.1}) as fleet:
        flags = ("--target", fleet.base_url, "--grid", grid, "--out", str(out))
        program = await Program.start(*flags, cwd=tmp_path)
        await until(lambda: len(saved(out)) >= 1)
        await fleet.until(lambda: not fleet.idle())
        await fleet.kill("D2")
        await fleet.start_again("D2")
        code, said = await program.ended()
        assert code == 0, said
        assert "skipped: 4R: " in said and "is 1P_2D" in said
        assert ADMIN_KEY not in said
        first = results(out)
        failed = {name for name, result in first.items() if result.outcome is Outcome.FAILED}
        assert len(first) == 6
        assert len(failed) == 1
        assert first[failed.pop()].reason == "D2 was restarted"
        assert "no table: " in said, "an arm of which a run failed is no evidence"

        code, said = await run_program(*flags, "--resume", "--only", "1P_2D", cwd=tmp_path)
        assert code == 0, said
        second = results(out)
        assert second.keys() == first.keys()
        assert all(result.outcome is Outcome.FINISHED for result in second.values())
        kept = [name for name in first if first[name].outcome is Outcome.FINISHED]
        assert all(second[name] == first[name] for name in kept), "what was measured is not measured again"
        assert (out / "tables").exists(), said


async def interrupted(program: Program, folder: Path, runs: int) -> None:
    await until(lambda: len(saved(folder)) >= runs)
    program.interrupt()
    code, said = await program.ended()
    assert code == 130, said
    assert "--resume goes on" in said
    assert "Traceback" not in said


async def test_a_sweep_that_ends_before_it_has_a_folder_names_no_flag_that_needs_one(tmp_path: Path) -> None:
    asked, out = asyncio.Event(), tmp_path / "out"

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        flags = ("--target", f"http://127.0.0.1:{port}", "--grid", write_grid(tmp_path, "1R = []"), "--out", str(out))
        program = await Program.start(*flags, cwd=tmp_path)
        async with asyncio.timeout(60):
            await asked.wait()
        program.interrupt()
        code, said = await program.ended()
    assert code == 130, said
    assert "stopped with 1 runs left; nothing has been written: the same command begins" in said
    assert not out.exists()


async def test_launched_fleets_are_measured_one_after_the_other_and_leave_nothing_behind(tmp_path: Path) -> None:
    grid, out = write_grid(tmp_path, "1P_1D = [0, 1]\n1R = []"), tmp_path / "out"
    flags = ("--launch", "--engine", "sim", "--engine-arg=--time-scale", "--engine-arg=0.2", "--out", str(out))
    await interrupted(await Program.start(*flags, "--grid", grid, cwd=tmp_path), out, 1)
    assert not engines_of(out)
    begun = {path: path.stat().st_mtime_ns for path in saved(out)}

    code, said = await run_program(*flags, "--resume", cwd=tmp_path)
    assert code == 0, said
    found = results(out)
    assert len(found) == 3
    assert {name.split("/")[0]: set(routes(result)) for name, result in found.items()} == {
        "1P_1D-x0": {(1, "SPLIT"), (2, "SPLIT")},
        "1P_1D-x1": {(1, "SPLIT"), (2, "LOCAL")},
        "1R": {(1, "REPLICA"), (2, "REPLICA")},
    }
    assert all(path.stat().st_mtime_ns == at_ns for path, at_ns in begun.items())
    assert not engines_of(out)


async def test_a_launched_fleet_that_dies_fails_its_run_and_is_started_anew(tmp_path: Path) -> None:
    grid, out = write_grid(tmp_path, "1P_1D = [1]", seeds=3), tmp_path / "out"
    flags = ("--launch", "--engine", "sim", "--engine-arg=--time-scale", "--engine-arg=0.2", "--out", str(out))
    program = await Program.start(*flags, "--grid", grid, cwd=tmp_path)
    await until(lambda: len(saved(out)) >= 1)
    lines = engines_of(out).items()
    ((agent, line),) = [(pid, line) for pid, line in lines if "agent --role D" in line and "guard.py" not in line]
    port = line.split("--port ")[1].split()[0]
    async with aiohttp.ClientSession() as session:
        while not await running_requests(session, port):
            await asyncio.sleep(0.01)
    os.kill(agent, signal.SIGKILL)
    code, said = await program.ended()
    assert code == 0, said
    found = results(out)
    assert Counter(result.outcome for result in found.values()) == {Outcome.FINISHED: 2, Outcome.FAILED: 1}
    assert {result.reason.split(" (")[0] for result in found.values()} == {"", "D1 ended with 137"}


async def running_requests(session: aiohttp.ClientSession, port: str) -> int:
    async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
        return parse_metrics(await response.text()).load.running


def engines_of(folder: Path) -> dict[int, str]:
    """Command lines of programs that log into this folder, by process id."""
    lines = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
    return {pid: line for pid, line in lines.items() if str(folder / "logs") in line}


def profile_in(folder: Path) -> str:
    path = folder / "profile.json"
    path.write_bytes(encode(PROFILE))
    return str(path)


def same_figures(one: Path, other: Path) -> bool:
    """Whether two sweeps hold the same runs with the same records; when they were done does not count."""
    figures = [
        {name: (found.outcome, found.origin, found.records) for name, found in results(folder).items()}
        for folder in (one, other)
    ]
    return figures[0] == figures[1]


async def test_a_simulated_sweep_goes_on_where_ctrl_c_ended_it(tmp_path: Path) -> None:
    flags = ("--simulate", "--grid", "quick", "--only", "*/small_*", "--hardware", profile_in(tmp_path))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    await interrupted(await Program.start(*flags, "--out", str(parts), cwd=tmp_path), parts, 5)
    before = saved(parts)
    code, said = await run_program(*flags, "--out", str(whole), "--jobs", "1", cwd=tmp_path)
    assert code == 0, said
    assert len(before) < len(saved(whole)), "it was interrupted in the middle"
    code, said = await run_program(*flags, "--out", str(parts), "--resume", cwd=tmp_path)
    assert code == 0, said
    assert same_figures(whole, parts)
    assert not list(parts.rglob("*.part"))


async def test_a_sweep_is_not_resumed_with_a_profile_that_has_changed(tmp_path: Path) -> None:
    flags = ("--simulate", "--grid", "quick", "--hardware", profile_in(tmp_path), "--out", str(tmp_path / "out"))
    code, said = await run_program(*flags, "--only", "4R/small_tiny/q1", cwd=tmp_path)
    assert code == 0, said
    slower = msgspec.structs.replace(PROFILE, costs=replace(PROFILE.costs, step_s=2 * PROFILE.costs.step_s))
    (tmp_path / "profile.json").write_bytes(encode(slower))
    code, said = await run_program(*flags, "--only", "4R/small_tiny/q4", "--resume", cwd=tmp_path)
    assert code == 1
    assert "its runs were measured in another way: another profile now" in said
    assert len(saved(tmp_path / "out")) == 2


async def test_ray_brings_the_same_figures_as_processes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    flags = ("--simulate", "--grid", "quick", "--only", "*/small_tiny/*", "--hardware", profile_in(tmp_path))
    for name, more in (("processes", ()), ("ray", ("--ray", "local"))):
        code, said = await run_program(*flags, *more, "--out", name, cwd=tmp_path)
        assert code == 0, said
    assert same_figures(tmp_path / "processes", tmp_path / "ray")


async def test_a_full_disk_ends_a_sweep_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ("--simulate", "--grid", "quick", "--only", "4R", "--hardware", profile_in(tmp_path), "--out", str(out))
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", 'trap "" XFSZ; ulimit -f 4; exec "$@"', "sh", sys.executable, "-c", PROGRAM, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    code, said = await Program(process).ended()
    assert code == 1, said
    (line,) = [line for line in said.splitlines() if line.startswith("Error: ")]
    assert "cannot be written: File too large" in line
    assert not list(out.rglob("*.part"))
    assert all(result.outcome is Outcome.FINISHED for result in results(out).values())
