"""`ppd serve` as a program of its own: started, ready, and ended."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ppd.servers.fleet.ports import free_ports
from tests.support.proxy import ADMIN_KEY, DEFAULTS


@dataclass
class Program:
    """Each request comes over a connection of its own, and so to whichever process takes it."""

    process: asyncio.subprocess.Process
    base_url: str
    session: aiohttp.ClientSession

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(text) for text in path.read_text().split()]

    def child_of(self, client_port: int) -> int:
        """The process that has taken the connection from this port."""
        port = int(self.base_url.rpartition(":")[2])
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ends = f":{port:04X}", f":{client_port:04X}"
        (inode,) = (line[9] for line in lines if line[1].endswith(ends[0]) and line[2].endswith(ends[1]))
        for pid in self.children():
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    if str(file.readlink()) == f"socket:[{inode}]":
                        return pid
        raise LookupError(f"no process has the connection from port {client_port}")

    async def is_ready(self) -> bool:
        with suppress(aiohttp.ClientError):
            async with self.session.get(f"{self.base_url}/ready") as response:
                return response.status == 200
        return False

    async def admin(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"X-Admin-Key": ADMIN_KEY}
        async with self.session.request(method, f"{self.base_url}/admin{path}", json=body, headers=headers) as response:
            return await response.json()


@asynccontextmanager
async def serving(
    folder: Path, workers: Sequence[str], processes: int, *flags: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Program]:
    """Ready, with so many processes; its log is in the folder. What has not ended by then is killed.

    tls: the client's, of a proxy that speaks it.
    """
    (port,) = free_ports(1)
    argv = ["--port", str(port), "--processes", str(processes), "--heartbeat-port", "0", "--admin-key", ADMIN_KEY]
    argv += ["--data-plane", str(DEFAULTS["data_plane"])]
    argv += [part for worker in workers for part in ("--workers", worker)]
    async with running(folder, port, processes, "serve", *argv, *flags, tls=tls) as program:
        yield program


@asynccontextmanager
async def running(
    folder: Path, port: int, processes: int, *argv: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Program]:
    """The same of any command that serves a proxy on this port. tls: of its clients, if it speaks TLS."""
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ppd.servers", *argv), stdout=log, stderr=log, start_new_session=True
        )
    try:
        connector = aiohttp.TCPConnector(force_close=True, ssl=tls or True)
        async with aiohttp.ClientSession(connector=connector) as session:
            program = Program(process, f"http{'s' if tls else ''}://127.0.0.1:{port}", session)
            await until(lambda: processes == 1 or len(program.children()) == processes)
            async with asyncio.timeout(60):
                while not await program.is_ready():
                    await asyncio.sleep(0.05)
            yield program
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)
