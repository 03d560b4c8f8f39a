"""A picker of two processes, asked by a real Envoy over connections to both: it is one picker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.gateway.envoy_config import envoy_config
from ppd.servers.fleet.ports import free_ports
from tests.e2e.gateway.envoy_program import envoy_of
from tests.support.fleet import start_engine, static_workers
from tests.support.proxy import ADMIN_KEY
from tests.support.serve_program import Program, running

pytestmark = pytest.mark.e2e
THREADS = 16  # of Envoy: the kernel gives each one's connection to either process
TALKS, TURNS = 24, 3
ESTABLISHED = "01"


def asked_processes(program: Program, port: int) -> set[int]:
    """Those with a connection to the picker's port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(f":{port:04X}") and line[3] == ESTABLISHED}
    return {child for child in program.children() if sockets & set(open_files(child))}


def open_files(pid: int) -> Iterator[str]:
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            yield str(file.readlink())


class Talk:
    def __init__(self, url: str, session: aiohttp.ClientSession, number: int) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._session = session
        self._messages: list[dict[str, Any]] = []
        self._number = number
        self.homes: list[str] = []
        self.cached: list[int] = []

    async def turn(self) -> None:
        self._messages.append({"role": "user", "content": f"{self._number} " + "A message of some length. " * 20})
        body = {"model": "sim", "messages": self._messages, "max_tokens": 4, "temperature": 0}
        async with self._session.post(self._url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            told = await answer.json()
        self._messages.append(told["choices"][0]["message"])
        self.homes.append(answer.headers["X-PPD-Decode"])
        self.cached.append((told["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


async def test_sessions_stay_where_they_are_whichever_process_is_asked(tmp_path: Path) -> None:
    own, picker, port = free_ports(3)
    async with AsyncExitStack() as stack:
        engines = [await start_engine(stack, name) for name in ("D1", "D2")]
        workers = static_workers((name, engine.address) for name, engine in zip(("D1", "D2"), engines, strict=True))
        (file := tmp_path / "ppd.toml").write_text(
            f'port = {own}\nheartbeat_port = 0\nadmin_key = "{ADMIN_KEY}"\nworkers = {list(workers)!r}\n'
            'mode = "always_local"\ncanary_interval_s = 0.0\nwarm_up_s = 0.0\n'
        )
        flags = ("--config", str(file), "--listen", f"127.0.0.1:{picker}", "--processes", "2")
        program = await stack.enter_async_context(running(tmp_path, own, 2, "picker", *flags))
        config = ProxyConfig(port=own, picker_port=picker)
        written = envoy_config(config, ("127.0.0.1", port), [("127.0.0.1", picker)], sees_answers=True)
        url = await stack.enter_async_context(envoy_of(written, port, tmp_path, threads=THREADS))
        talks = [Talk(url, program.session, number) for number in range(TALKS)]
        for _ in range(TURNS):
            await asyncio.gather(*(talk.turn() for talk in talks))
        assert asked_processes(program, picker) == set(program.children())
        assert all(len(set(talk.homes)) == 1 for talk in talks)
        assert len({talk.homes[0] for talk in talks}) == 2
        assert all(talk.cached[-1] > talk.cached[1] > 0 for talk in talks)
