"""Headless Chromium over its DevTools protocol: PPD_CHROMIUM, or one on PATH."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-port=0",
)
PATIENCE_S = 60.0


def browser() -> str:
    found = os.environ.get("PPD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert found, f"no browser: install chromium (apt-get install chromium), or set PPD_CHROMIUM; looked for {NAMES}"
    return found


@dataclass
class Tab:
    """One page, and what it asked for and complained about since it was opened."""

    socket: aiohttp.ClientWebSocketResponse
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    is_loaded: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        await self.socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self.socket.receive_json()
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    async def open(self, url: str) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        while not self.is_loaded:
            self._note(await self.socket.receive_json())

    async def value(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.is_loaded = True
        elif method == "Log.entryAdded":
            self.complaints.append(str(params["entry"]))
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(str(params))


@asynccontextmanager
async def tab(profile: Path) -> AsyncIterator[Tab]:
    process = await asyncio.create_subprocess_exec(
        browser(),
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
            address = await _address(process.stderr)
            drain = asyncio.create_task(process.stderr.read())
            async with session.get(f"http://{address}/json/list") as answer:
                (target, *_) = [page for page in await answer.json() if page["type"] == "page"]
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                found = Tab(socket)
                yield found
                await found.call("Browser.close")
            await drain
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _address(errors: asyncio.StreamReader) -> str:
    """Where the browser listens, which it says on standard error."""
    said = []
    while line := (await errors.readline()).decode(errors="replace"):
        said.append(line)
        _, found, address = line.partition("DevTools listening on ws://")
        if found:
            return address.split("/")[0]
    raise AssertionError(f"the browser did not start: {''.join(said)}")
