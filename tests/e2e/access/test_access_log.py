"""`ppd serve --access-log`: a line for each request, on both data planes, whatever became of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ppd.proxy.admission.keys import Client, encode, hash_of
from ppd.servers.fleet.ports import free_ports
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.sim.launch import running_engine

PROMPT, KEY = "Chrysanthemum", "ppd_" + "k" * 43


@dataclass
class Served:
    process: asyncio.subprocess.Process
    port: int
    session: aiohttp.ClientSession

    async def line(self) -> dict[str, Any]:
        """The next one that is no look at the readiness."""
        assert self.process.stdout is not None
        while True:
            text = await asyncio.wait_for(self.process.stdout.readline(), 60)
            assert PROMPT.encode() not in text and KEY.encode() not in text
            line: dict[str, Any] = json.loads(text)
            if line.get("path") != "/ready":
                return line

    def ask(self, path: str, body: Any, key: str = KEY) -> Any:
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "mine"}
        return self.session.post(f"http://127.0.0.1:{self.port}{path}", json=body, headers=headers)

    async def raw(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(1000), 60)
        writer.close()
        return answer


@asynccontextmanager
async def serving(folder: Path, plane: str, worker: str) -> AsyncIterator[Served]:
    (port,) = free_ports(1)
    (folder / "keys.toml").write_text(encode(Client(name="acme-1", tenant="acme"), hash_of(KEY)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ppd.servers", "serve", "--port", str(port), "--heartbeat-port", "0"),
        *("--mode", "replica", "--workers", f"R={worker}", "--data-plane", plane, "--access-log", "json"),
        *("--keys-file", str(folder / "keys.toml")),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with aiohttp.ClientSession() as session:
            served = Served(process, port, session)
            async with asyncio.timeout(60):
                while not await is_ready(served):
                    await asyncio.sleep(0.05)
            yield served
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def is_ready(served: Served) -> bool:
    assert served.process.returncode is None
    try:
        async with served.session.get(f"http://127.0.0.1:{served.port}/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


CHAT = "/v1/chat/completions"


def chat(**members: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, **members}


@pytest.mark.parametrize("plane", ["native", "asgi"])
async def test_every_request_is_a_line(tmp_path: Path, plane: str, engine: SimEngine) -> None:
    async with serving(tmp_path, plane, engine.address) as served:
        whole = await answered(served, CHAT, chat())
        assert whole.pop("duration_s") > 0 and whole.pop("at")
        assert whole.pop("prompt_tokens") > 0 and whole.pop("cached_tokens") is not None
        assert whole == {
            "status": 200,
            "method": "POST",
            "path": CHAT,
            "client": "acme-1",
            "model": "sim",
            "workers": ["R1"],
            "id": "mine",
            "route": "REPLICA",
            "reason": "mode_replica",
            "completion_tokens": 5,
            "outcome": "completed",
        }
        streamed = await answered(served, CHAT, chat(stream=True))
        assert streamed["ttft_s"] > 0 and streamed["completion_tokens"] == 5
        for path, body, key, expected in (
            (CHAT, chat(), PROMPT, (401, None)),
            (CHAT, [PROMPT], KEY, (400, "acme-1")),
            (CHAT, chat(model="none"), KEY, (404, "acme-1")),
            ("/nowhere?key=" + KEY, {}, KEY, (404, None)),
            ("/v1/embeddings", {"model": "sim", "input": PROMPT}, KEY, (200, "acme-1")),
        ):
            line = await answered(served, path, body, key)
            assert (line["status"], line.get("client")) == expected, line
            assert line["path"] == path.partition("?")[0]
        assert b" 400 " in await served.raw(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
        if plane == "native":  # Hypercorn's parser answers by itself
            assert (await served.line())["status"] == 400


@pytest.mark.parametrize("plane", ["native", "asgi"])
async def test_a_client_that_leaves_is_a_line(tmp_path: Path, plane: str, engine: SimEngine) -> None:
    async with serving(tmp_path, plane, engine.address) as served:
        async with served.ask(CHAT, chat(stream=True, max_tokens=5000)) as response:
            await response.content.readany()
        line = await served.line()
        assert (line["status"], line["outcome"], line["workers"]) == (200, "left", ["R1"])


async def answered(served: Served, path: str, body: Any, key: str = KEY) -> dict[str, Any]:
    """The line about it."""
    async with served.ask(path, body, key) as response:
        await response.read()
    return await served.line()


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with running_engine(replace(SimConfig(), time_scale=0.2, shutdown_s=0.1)) as running:
        yield running
