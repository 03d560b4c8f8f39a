"""A chat page in headless Chromium, served on another port than the proxy that it talks to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.chromium import Tab, tab
from tests.support.credentials import client, key_of, write_keys

# Reads the stream as it comes, as a chat page does; everything that it may see of an answer is in its result.
SAY = """
async (url, key, body, type) => {
    try {
        const headers = {"Content-Type": type, ...(key && {Authorization: `Bearer ${key}`})};
        const answer = await fetch(url, {method: "POST", headers, body: JSON.stringify(body)});
        const reader = answer.body.getReader(), decoder = new TextDecoder();
        let text = "", piece;
        while (!(piece = await reader.read()).done) text += decoder.decode(piece.value, {stream: true});
        return {status: answer.status, text, id: answer.headers.get("X-Request-Id"),
                route: answer.headers.get("X-PPD-Route"), after: answer.headers.get("Retry-After")};
    } catch (error) { return {refused: error.name}; }
}
"""
BODY = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}


@asynccontextmanager
async def page_on_another_port(profile: Path) -> AsyncIterator[tuple[Tab, str]]:
    """The page in its browser, and its origin."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(
            text="<!doctype html><link rel=icon href=data:,><title>chat</title>", content_type="text/html"
        )

    app = web.Application()
    app.router.add_get("/", page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with tab(profile) as opened:
            origin = f"http://127.0.0.1:{runner.addresses[0][1]}"
            await opened.open(origin + "/")
            yield opened, origin
    finally:
        await runner.cleanup()


async def say(page: Tab, url: str, key: str = "", body: Any = BODY, content_type: str = "application/json") -> Any:
    values = ", ".join(json.dumps(value) for value in (url, key, body, content_type))
    return await page.value(f"({SAY})({values})")


@pytest.mark.parametrize("is_any", [False, True])
async def test_an_allowed_page_chats_and_reads_errors(start_fleet: Any, tmp_path: Path, is_any: bool) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("some", requests_per_minute=2))
    async with page_on_another_port(tmp_path / "profile") as (page, origin):
        async with start_fleet("R1", keys_file=keys, cors_allow_origins=("*" if is_any else origin,)) as fleet:
            url = f"{fleet.base_url}/v1/chat/completions"
            said = await say(page, url, key_of("some"))
            assert said["status"] == 200 and said["text"].endswith("data: [DONE]\n\n")
            assert said["id"] and said["route"]
            assert (await say(page, url))["status"] == 401
            assert (await say(page, url, key_of("some"), {}))["status"] == 400
            for _ in range(2):
                limited = await say(page, url, key_of("some"))
            assert limited["status"] == 429 and int(limited["after"]) > 0
            assert (await say(page, f"{fleet.base_url}/admin/weights", "operator")) == {"refused": "TypeError"}


async def test_a_page_that_is_not_allowed_reaches_no_worker(start_fleet: Any, tmp_path: Path) -> None:
    async with page_on_another_port(tmp_path / "profile") as (page, _):
        async with start_fleet("R1", cors_allow_origins=("https://chat.example",)) as fleet:
            url = f"{fleet.base_url}/v1/chat/completions"
            for content_type in ("application/json", "text/plain"):
                assert await say(page, url, content_type=content_type) == {"refused": "TypeError"}
            assert not fleet.engines["R1"].received
