"""Engines that note what they are asked, and give the answers that they are told to give."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.servers.fleet.ports import free_ports

EVENTS = "text/event-stream"
DONE = "[DONE]"
UNSAID = frozenset(("content-length", "date", "server", "connection", "transfer-encoding"))  # each HTTP stack's own


class ScriptedEngine:
    """`asked` has the requests in order; of a body that is no JSON it has the text."""

    def __init__(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """answers: in order, each with its `status` and `body`; a list is the events of a stream."""
        self.asked: list[dict[str, Any]] = []
        self._answers = list(answers)

    async def answer(self, request: web.Request) -> web.Response:
        body = read_body(request.headers.get("content-type", ""), await request.text())
        self.asked.append(
            {"method": request.method, "path": request.path_qs, "headers": read_headers(request), "body": body}
        )
        if not self._answers:
            return web.json_response({"error": {"message": "one request too many"}}, status=500)
        answer = self._answers.pop(0)
        content_type, text = written(answer["body"])
        return web.Response(text=text, content_type=content_type, status=answer["status"])

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Gives host:port."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        async with TestServer(app) as server:
            yield f"127.0.0.1:{server.port}"


@asynccontextmanager
async def nobody() -> AsyncIterator[str]:
    """The address of an engine that is gone."""
    yield f"127.0.0.1:{free_ports(1)[0]}"


def read_headers(message: Any) -> dict[str, str]:
    """Names in lower case; of a header that came twice both values, with a bar between."""
    read: dict[str, str] = {}
    for name, value in message.headers.items():
        low = name.lower()
        if low not in UNSAID:
            read[low] = f"{read[low]} | {value}" if low in read else value
    return dict(sorted(read.items()))


def read_body(content_type: str, text: str) -> Any:
    if content_type.startswith(EVENTS):
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [each if each == DONE else json.loads(each) for each in data]
    try:
        return json.loads(text)
    except ValueError:
        return text


def written(body: Any) -> tuple[str, str]:
    """Content type and text of an answer."""
    if isinstance(body, list):
        return EVENTS, "".join(f"data: {each if each == DONE else json.dumps(each)}\n\n" for each in body)
    return "application/json", json.dumps(body)
