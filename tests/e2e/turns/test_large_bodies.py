"""Large bodies and answers, on both data planes: the same turns as small ones, and nothing of them is kept."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import signal
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ppd.proxy.config import DataPlane
from tests.support.clock import LeapingTime
from tests.support.proxy import Turn
from tests.support.scripted_workers import odd_worker

MIB = 1024 * 1024
PLANES = pytest.mark.parametrize("plane", DataPlane)
CHAT = "/v1/chat/completions"


def answer(content: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}


class Echo:
    """Keeps the bodies that it was sent, and answers with `content`."""

    def __init__(self, content: str = "ok") -> None:
        self.bodies: list[Any] = []
        self.content = content

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(json.loads(await request.read()))
        return web.json_response(answer(self.content))


async def posted(fleet: Any, body: Any) -> Turn:
    """As `fleet.post`; aiohttp does not take a large body as bytes."""
    data, headers = io.BytesIO(json.dumps(body).encode()), {"Content-Type": "application/json"}
    async with fleet.session.post(fleet.base_url + CHAT, data=data, headers=headers) as response:
        return Turn(response.status, response.headers, json.loads(await response.read()), "")


def chat(*texts: str, **members: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return {"model": "sim", "messages": messages, **members}


@PLANES
async def test_a_conversation_that_grows_large_goes_on(start_fleet: Any, plane: DataPlane) -> None:
    worker, long = Echo(), 'a "quoted" line, and more\n' * 60_000
    async with start_fleet("", data_plane=plane) as fleet, odd_worker(fleet, worker.answer):
        texts = ["hi", "ok"]
        first = await posted(fleet, chat("hi"))
        texts.append(long)
        second = await posted(fleet, chat(*texts))
        texts += ["ok", "and now?"]
        third = await posted(fleet, chat(*texts))
        kinds = [(await fleet.receipt(turn))["kind"] for turn in (first, second, third)]
        assert kinds == ["first", "next", "next"]
        assert worker.bodies[-1] == chat(*texts)
        assert await fleet.metric("ppd_body_memory_bytes") == 0


@PLANES
async def test_a_large_answer_is_passed_on_and_learnt_from(start_fleet: Any, plane: DataPlane) -> None:
    worker = Echo("a word, " * (MIB // 6))
    async with start_fleet("", data_plane=plane) as fleet, odd_worker(fleet, worker.answer):
        turn = await posted(fleet, chat("hi"))
        assert turn.body == answer(worker.content)
        receipt = await fleet.receipt(turn)
        assert (receipt["outcome"], receipt["prompt_tokens"], receipt["completion_tokens"]) == ("completed", 3, 2)


@PLANES
async def test_a_large_body_is_refused_in_the_words_of_a_small_one(start_fleet: Any, plane: DataPlane) -> None:
    async with start_fleet("", data_plane=plane, request_units_limit=1000) as fleet, odd_worker(fleet, Echo().answer):
        for count in (1001, 400_000):
            turn = await posted(fleet, chat(*["hi"] * count))
            assert (turn.status, turn.body["error"]["type"]) == (400, "invalid_request_error")
            assert f"has {count} units" in turn.body["error"]["message"]


async def test_a_helper_process_that_is_killed_is_replaced(start_fleet: Any) -> None:
    async with start_fleet("") as fleet, odd_worker(fleet, Echo().answer):
        body = chat("hi " * MIB)
        assert (await posted(fleet, body)).status == 200
        process = fleet.proxy.bodies._helper._process
        os.kill(process.pid, signal.SIGSTOP)
        asking = asyncio.create_task(posted(fleet, body))
        await fleet.until(fleet.proxy.bodies._helper._lane.locked)
        os.kill(process.pid, signal.SIGKILL)
        turn = await asking
        assert (turn.status, turn.headers["X-PPD-Refused"]) == (503, "body_reader")
        assert (await posted(fleet, body)).status == 200


@PLANES
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_bodies_beyond_the_memory_wait_and_are_then_refused(
    start_fleet: Any, plane: DataPlane, is_chunked: bool
) -> None:
    """The first half is sent and the rest held back, so the room stays taken."""
    settings = {"data_plane": plane, "body_memory_bytes": 8 * MIB, "head_timeout_s": 60.0}
    async with start_fleet("", **settings) as fleet, odd_worker(fleet, Echo().answer):
        assert (await posted(fleet, chat("x" * 2 * MIB))).status == 200  # the helper process has started
        more, body = asyncio.Event(), json.dumps(chat("x" * 5 * MIB)).encode()

        async def halves() -> Any:
            yield body[:-MIB]
            await more.wait()
            yield body[-MIB:]

        async def post(data: Any) -> tuple[int, str]:
            headers = {"Content-Type": "application/json"} | ({} if is_chunked else {"Content-Length": str(len(body))})
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with fleet.session.post(fleet.base_url + CHAT, data=data, headers=headers) as response:
                    return response.status, response.headers.get("X-PPD-Refused", "")
            return 0, ""

        first = asyncio.create_task(post(halves()))
        memory = fleet.proxy.body_memory
        await fleet.until(lambda: memory.held_bytes >= 4 * MIB)
        refused = asyncio.create_task(post(io.BytesIO(body)))
        await fleet.until(lambda: len(memory._waiting) == 1)
        LeapingTime.of(asyncio.get_running_loop()).leap(60.1)
        assert await refused in ((503, "body_memory"), (0, ""))
        assert (await posted(fleet, chat("small"))).status == 200
        waiting = asyncio.create_task(post(io.BytesIO(body)))
        await fleet.until(lambda: len(memory._waiting) == 1)
        more.set()
        assert [await first, await waiting] == [(200, ""), (200, "")]
        await fleet.until(lambda: memory.held_bytes == 0)


@PLANES
async def test_a_client_that_leaves_gives_its_room_back(start_fleet: Any, plane: DataPlane) -> None:
    async with start_fleet("", data_plane=plane, body_memory_bytes=8 * MIB) as fleet:
        memory = fleet.proxy.body_memory
        for path in (CHAT, "/v1/embeddings"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(fleet.base_url.rsplit(":", 1)[1]))
            head = f"POST {path} HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {5 * MIB}\r\n\r\n".encode() + b"x" * MIB)
            await fleet.until(lambda: memory.held_bytes == 5 * MIB)
            writer.close()
            await fleet.until(lambda: memory.held_bytes == 0)
            assert await reader.read() == b""
        turn = await posted(fleet, chat("x" * 9 * MIB))
        assert turn.status == 413
        assert memory.held_bytes == 0


@PLANES
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_body_that_does_not_come_makes_room_for_one_that_waits(
    start_fleet: Any, plane: DataPlane, path: str
) -> None:
    settings = {"data_plane": plane, "body_memory_bytes": 8 * MIB, "head_timeout_s": 1.0}
    async with start_fleet("", **settings) as fleet, odd_worker(fleet, Echo().answer):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(fleet.base_url.rsplit(":", 1)[1]))
        head = f"POST {path} HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {5 * MIB}\r\n\r\n".encode() + b"x" * 1000)
        await fleet.until(lambda: fleet.proxy.body_memory.held_bytes == 5 * MIB)
        assert (await posted(fleet, chat("x" * 5 * MIB))).status == 200
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()
        await fleet.until(lambda: fleet.proxy.body_memory.held_bytes == 0)


@PLANES
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_body_that_has_come_is_not_taken_for_a_slow_one(start_fleet: Any, plane: DataPlane, path: str) -> None:
    """Its answer is waited for, and so is its room."""
    settings = {"data_plane": plane, "body_memory_bytes": 8 * MIB, "head_timeout_s": 0.5}
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        await request.read()
        asked.set()
        await may_answer.wait()
        return web.json_response(answer("ok"))

    async with start_fleet("", **settings) as fleet, odd_worker(fleet, late):
        data, headers = json.dumps(chat("x" * 5 * MIB)).encode(), {"Content-Type": "application/json"}
        first = asyncio.create_task(fleet.session.post(fleet.base_url + path, data=io.BytesIO(data), headers=headers))
        async with asyncio.timeout(30.0):
            await asked.wait()
            assert (await posted(fleet, chat("x" * 5 * MIB))).status == 503
        may_answer.set()
        async with await first as response:
            assert response.status == 200
        assert await fleet.metric("ppd_bodies_refused_total") == 1  # the other one


@PLANES
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_compressed_body_counts_as_what_it_decodes_to(start_fleet: Any, plane: DataPlane, path: str) -> None:
    async with start_fleet("", data_plane=plane, body_memory_bytes=8 * MIB) as fleet, odd_worker(fleet, Echo().answer):
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        for size, status in ((5 * MIB, 200), (9 * MIB, 413)):
            body = gzip.compress(json.dumps(chat("x" * size)).encode())
            async with fleet.session.post(fleet.base_url + path, data=body, headers=headers) as response:
                assert response.status == status
            await fleet.until(lambda: fleet.proxy.body_memory.held_bytes == 0)
