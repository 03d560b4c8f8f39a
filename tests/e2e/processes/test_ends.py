"""`ppd serve --processes 2` as programs see it: how signals end it, and what a killed process costs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.sim.launch import running_engine
from tests.support.serve_program import Program, serving, until

DONE = b"data: [DONE]"


@asynccontextmanager
async def started(engine: SimEngine, folder: Path, config: str = "", processes: int = 2) -> AsyncIterator[Program]:
    (folder / "ppd.toml").write_text(config)
    flags = ("--config", str(folder / "ppd.toml"), "--mode", "replica")
    async with serving(folder, [f"R={engine.address}"], processes, *flags) as program:
        yield program


def stream(program: Program, tokens: int) -> Any:
    messages = [{"role": "user", "content": "hold"}]
    body = {"model": "sim", "messages": messages, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    return program.session.post(f"{program.base_url}/v1/chat/completions", json=body)


def replaced(program: Program, victim: int) -> bool:
    children = program.children()
    return victim not in children and len(children) == 2


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    """As slow as a real one: about 8 ms a token."""
    async with running_engine(SimConfig(time_scale=1.0, shutdown_s=0.1)) as running:
        yield running


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to", ["supervisor", "group", "each"])
async def test_streams_under_way_end_whole(engine: SimEngine, tmp_path: Path, number: int, to: str) -> None:
    """`each`: as systemd stops a service, whose every process gets the signal."""
    async with started(engine, tmp_path) as program:
        async with stream(program, 150) as one, stream(program, 150) as two:
            await one.content.readany()
            await two.content.readany()
            pids = [program.process.pid, *program.children()]
            if to == "group":
                os.killpg(program.process.pid, number)
            else:
                for pid in pids[1:] if to == "each" else ():
                    os.kill(pid, number)
                await asyncio.sleep(0.1)  # they have heard of it when the supervisor tells them too
                program.process.send_signal(number)
            rests = [await response.content.read() for response in (one, two)]
        assert all(DONE in rest for rest in rests)
        assert await asyncio.wait_for(program.process.wait(), 60) == 0
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_hangup_ends_nothing(engine: SimEngine, tmp_path: Path, processes: int) -> None:
    """Neither does the terminal that the proxy was started from, nor whoever would have it read its files again, or
    open its logs anew, as others do at SIGUSR1."""
    async with started(engine, tmp_path, processes=processes) as program:
        async with stream(program, 150) as response:
            await response.content.readany()
            for pid in (program.process.pid, *program.children()):
                for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                    os.kill(pid, number)
            assert DONE in await response.content.read()
        async with stream(program, 2) as response:
            assert DONE in await response.content.read()
        program.process.terminate()
        assert await asyncio.wait_for(program.process.wait(), 60) == 0


async def test_a_second_signal_ends_streams_at_once(engine: SimEngine, tmp_path: Path) -> None:
    async with started(engine, tmp_path) as program, stream(program, 20_000) as response:
        await response.content.readany()
        children = program.children()
        program.process.terminate()
        await until(lambda: b"draining" in (tmp_path / "log").read_bytes())
        program.process.terminate()
        with suppress(aiohttp.ClientError):
            await asyncio.wait_for(response.content.read(), 60)
        assert await asyncio.wait_for(program.process.wait(), 60) != 0
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


async def test_without_the_supervisor_streams_end_whole_and_then_all_is_over(engine: SimEngine, tmp_path: Path) -> None:
    async with started(engine, tmp_path) as program:
        children = program.children()
        async with stream(program, 100) as response:
            await response.content.readany()
            program.process.kill()
            assert DONE in await response.content.read()
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


@pytest.mark.parametrize("place", [0, 1], ids=["the leader", "another"])
async def test_a_process_that_hangs_is_replaced_and_all_serve_again(
    engine: SimEngine, tmp_path: Path, place: int
) -> None:
    async with started(engine, tmp_path) as program:
        victim = program.children()[place]
        os.kill(victim, signal.SIGSTOP)
        stopped_s = time.monotonic()
        async with asyncio.timeout(60):
            while (tmp_path / "log").read_bytes().count(b" of this proxy serves") < 3:
                await asyncio.sleep(0.01)
        print(f"process {place}: stopped, and its successor serves after {time.monotonic() - stopped_s:.2f} s")
        assert replaced(program, victim)
        assert b"process %d of the proxy does not react and is killed" % place in (tmp_path / "log").read_bytes()
        for _ in range(10):
            async with stream(program, 2) as response:
                assert DONE in await response.content.read()


async def test_a_leader_that_dies_has_a_successor_that_serves(engine: SimEngine, tmp_path: Path) -> None:
    async with started(engine, tmp_path) as program:
        os.kill(program.children()[0], signal.SIGKILL)
        died_s = time.monotonic()
        async with asyncio.timeout(60):
            while (tmp_path / "log").read_bytes().count(b"process 0 of this proxy serves") < 2:
                await asyncio.sleep(0.01)
        print(f"killed, and its successor serves after {time.monotonic() - died_s:.2f} s")


async def test_a_successor_has_the_settings_in_force_whatever_the_file_says_by_then(
    engine: SimEngine, tmp_path: Path
) -> None:
    async with started(engine, tmp_path, "w_ttft = 1.0\n") as program:
        (tmp_path / "ppd.toml").write_text("w_ttft = 7.5\n")
        os.utime(tmp_path / "ppd.toml", ns=(1, 1))

        async def weights() -> set[float]:
            return {(await program.admin("GET", "/weights"))["w_ttft"] for _ in range(12)}

        async with asyncio.timeout(60):
            while await weights() != {7.5}:
                await asyncio.sleep(0.05)
        for victim, text in zip(program.children(), ("w_ttft = 7.5\n", ""), strict=True):
            (tmp_path / "ppd.toml").write_text(text)
            os.kill(victim, signal.SIGKILL)
            await until(partial(replaced, program, victim))
            await asyncio.sleep(3.5)  # it serves, and has looked at the file, which the other may have refused
        assert await weights() == {7.5}
