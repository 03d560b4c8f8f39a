"""Starts an engine (or the proxy) as a process of its own, waits until it is healthy, and stops it with its children.

The program runs under `guard`, so it ends when this process does, even by SIGKILL. Its output goes to a file, whose
last lines are part of every failure's message.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections import deque
from pathlib import Path
from typing import BinaryIO

import aiohttp

from ppd.proxy.errors import PPDError

from ..vllm.launch import Launch

GUARD = Path(__file__).with_name("guard.py")
ORPHAN_GRACE_S = 10.0
_ASKED_EVERY_S = 0.2  # whether it is healthy
TAIL_LINES = 30


class EngineFailed(PPDError):
    """A program could not start, ended, or was not healthy in time; the message says why, or has its log's tail."""


class EngineProcess:
    """One program: `start`, `wait_healthy`, then `stop` or `kill`; `async with` starts and stops it."""

    def __init__(self, launch: Launch, log_path: Path, *, name: str = "engine") -> None:
        self.name = name
        self.log_path = log_path
        self._launch = launch
        self._process: asyncio.subprocess.Process | None = None
        self._orders = -1  # writing end of the guard's pipe

    def __repr__(self) -> str:
        state = "not started" if self._process is None else "running" if self.is_running else f"ended {self.returncode}"
        return f"<EngineProcess {self.name}: {state}>"

    async def __aenter__(self) -> EngineProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def returncode(self) -> int | None:
        """The exit code, 128 + signal if a signal ended the program; None while it runs or before it starts."""
        return None if self._process is None else self._process.returncode

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Where it is cancelled, the program is told to end; `stop` still waits for that."""
        assert self._process is None, "an EngineProcess starts once"
        reading, self._orders = os.pipe()
        try:
            with self._open_log() as log:
                spawning = asyncio.ensure_future(self._spawn(reading, log))
                try:
                    await asyncio.shield(spawning)
                except asyncio.CancelledError:
                    # asyncio kills a program whose start is cancelled: the guard, and not what it has started.
                    await asyncio.wait({spawning})
                    raise
        except BaseException:
            self._close_orders()
            raise
        finally:
            os.close(reading)

    async def _spawn(self, reading: int, log: BinaryIO) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", str(GUARD), str(reading), str(ORPHAN_GRACE_S)),
            *self._launch.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | self._launch.env,
            pass_fds=(reading,),
            start_new_session=True,
        )

    async def wait(self) -> int:
        assert self._process is not None
        code = await self._process.wait()
        self._close_orders()
        return code

    async def wait_healthy(self, base_url: str, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        """Returns when `GET /health` answers 200; EngineFailed if the process ends, or after `timeout_s`.

        tls: by which its certificate is trusted; None: by the authorities that this machine trusts.
        """
        assert self._process is not None
        ended = asyncio.ensure_future(self.wait())
        healthy = asyncio.ensure_future(_poll_health(f"{base_url}/health", tls or True))
        try:
            await asyncio.wait({ended, healthy}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise self._failure(f"ended with {ended.result()} before it was healthy")
            if not healthy.done():
                raise self._failure(f"was not healthy after {timeout_s:g} s")
            healthy.result()
        finally:
            for task in (ended, healthy):
                task.cancel()
            await asyncio.gather(ended, healthy, return_exceptions=True)

    async def stop(self, *, grace_s: float = 15.0) -> int | None:
        """SIGTERM, then SIGKILL to the group after `grace_s`. Returns the exit code; None if it was not started."""
        if self._process is None:
            return None
        self._order(b"T")
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """SIGKILL to the program and all its children, at once."""
        self._order(b"K")
        return await self.wait()

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        try:
            with self.log_path.open(encoding="utf-8", errors="replace") as log:
                return "".join(deque(log, maxlen=lines))
        except FileNotFoundError:
            return ""

    def last_words(self) -> str:
        """What a failure says beside its cause."""
        tail = self.log_tail()
        return f"the end of {self.log_path}:\n{tail}" if tail else f"{self.log_path} is empty, as on a full disk"

    def _order(self, order: bytes) -> None:
        if not self.is_running or self._orders < 0:
            return
        try:
            os.write(self._orders, order)
        except BrokenPipeError:  # it has just ended
            return

    def _close_orders(self) -> None:
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1

    def _open_log(self) -> BinaryIO:
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            return self.log_path.open("wb")
        except OSError as exc:
            raise EngineFailed(f"{self.name}'s log {self.log_path} cannot be written: {exc.strerror}") from exc

    def _failure(self, what: str) -> EngineFailed:
        return EngineFailed(f"{self.name} {what}; {self.last_words()}")


async def _poll_health(url: str, tls: ssl.SSLContext | bool) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while True:
            try:
                async with session.get(url, ssl=tls) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(_ASKED_EVERY_S)
