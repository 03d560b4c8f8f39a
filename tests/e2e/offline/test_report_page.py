"""A report in a real browser, headless Chromium over its DevTools protocol: PPD_CHROMIUM, or one on PATH."""

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
import pytest

from ppd.offline.report.write import write_published_report

ROWS = Path(__file__).parents[3] / "tables" / "source" / "ppd-h100-grid.csv.gz"
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


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published_report(ROWS, tmp_path_factory.mktemp("report"))


async def test_the_page_shows_all_of_itself_and_asks_for_nothing(report: Path, tmp_path: Path) -> None:
    async with tab(tmp_path / "profile") as page:
        await page.open(report.as_uri())
        widths = await page.value("Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth)))")
        assert len(widths) == len(list(report.parent.glob("*.png")))
        assert all(width >= 900 for width in widths)
        assert not await page.value("[...document.images].some(image => image.alt.length < 40)")

        headings = await page.value("[...document.querySelectorAll('h1, main h2')].map(heading => heading.innerText)")
        contents = await page.value("[...document.querySelectorAll('nav a')].map(link => link.innerText)")
        assert headings == ["The published PPD measurements", *contents]
        assert "Which mode wins" in contents
        dangling = (
            "[...document.querySelectorAll('nav a')].filter(a => !document.querySelector(a.getAttribute('href')))"
        )
        assert await page.value(f"{dangling}.length") == 0

        assert {url.split(":")[0] for url in page.requests} == {"file", "data"}
        assert [url for url in page.requests if url.startswith("file")] == [report.as_uri()]
        assert page.complaints == []


async def test_rows_are_filtered_by_every_word(report: Path, tmp_path: Path) -> None:
    async with tab(tmp_path / "profile") as page:
        await page.open(report.as_uri())
        assert await page.value("document.querySelector('output').textContent") == "1260 of 1260 rows"
        await page.value(
            "{ const field = document.querySelector('input'); field.value = '4R SMALL_tiny';"
            " field.dispatchEvent(new Event('input')); }"
        )
        assert await page.value("document.querySelector('output').textContent") == "10 of 1260 rows"
        await page.value("document.querySelector('details').open = true")
        shown = "[...document.querySelectorAll('details tbody tr')].filter(row => row.offsetHeight > 0)"
        rows = await page.value(f"{shown}.map(row => row.innerText)")
        assert len(rows) == 10
        assert all(row.startswith("4R") and "small_tiny" in row for row in rows)
        assert page.complaints == []


async def test_the_page_fits_a_narrow_screen_and_follows_the_dark(report: Path, tmp_path: Path) -> None:
    async with tab(tmp_path / "profile") as page:
        await page.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
        await page.open(report.as_uri())
        await page.value("document.querySelector('details').open = true")
        assert await page.value("document.documentElement.scrollWidth") == 400
        assert await page.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert await page.value("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert page.complaints == []
