"""Real vLLM engines of the tests, started in seconds: see `program`."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.launch import Launch

PROGRAM = Path(__file__).with_name("program.py")
READ_AT_LOAD = "LD_LIBRARY_PATH"  # when a program starts, too early for a fork

Born = Callable[[Launch], Launch]


def written(folder: Path, python: Path, text: str, *arguments: str) -> Launch:
    """A program of these lines, which asks for vLLM's modules, as one that the nursery can start."""
    (folder / "asks_vllm.py").write_text(text)
    return Launch((str(python), "-m", "asks_vllm", *arguments), {"PYTHONPATH": str(folder)})


def interpreter(folder: Path, python: str, born: Born) -> str:
    """For who starts an engine by itself: the path of a Python whose `-m MODULE ARGS...` the nursery runs."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nshift\nexec {shlex.join(born(Launch((python, "-m"))).argv)} "$@"\n')
    path.chmod(0o755)
    return str(path)


@asynccontextmanager
async def nursery(usual: Launch, folder: Path) -> AsyncIterator[Born]:
    """Yields what makes of an engine's usual launch one by way of the nursery. usual: of any of these engines."""
    socket = folder / "socket"

    def by(step: str, launch: Launch, *program: str) -> Launch:
        return Launch((launch.argv[0], "-P", str(PROGRAM), step, str(socket), *program), launch.env)

    def born(launch: Launch) -> Launch:
        assert launch.env.get(READ_AT_LOAD) in (None, usual.env.get(READ_AT_LOAD)), "it needs a nursery of its own"
        return by("start", launch, *launch.argv[2:])  # python -m MODULE ARGS...

    async with EngineProcess(by("serve", usual), folder / "nursery.log", name="nursery") as process:
        while not socket.exists():
            assert process.is_running, process.log_tail()
            await asyncio.sleep(0.05)
        yield born
