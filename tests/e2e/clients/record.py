"""Records what client libraries send, and what they were answered, for quick tests.

    python -m tests.e2e.clients.record            # every program; or the names of some

Each program beside this file talks to a simulated engine through a relay that keeps bodies and answers. All texts are
made up: the words below, and the engine's own. Products bring prompts, which are disguised. One file a program, in
tests/data/clients.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ppd.proxy.openai.answer import AnswerObserver, AnswerSummary
from ppd.proxy.openai.edits import Edits
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.openai.stream_relay import StreamRelay
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.launch import running_engine

from .disguise import Disguise
from .test_real_clients import PACKAGE, PROGRAMS, run

FOLDER = Path(__file__).parents[2] / "data" / "clients"
ASKED = {
    "key": "a-key",
    "system": "You help people who plan a walk. Be brief, and ask when a place is not clear. " * 3,
    "opening": [{"role": "user", "content": "We would like to walk along the river tomorrow, with a long rest. " * 3}],
    "words": [
        "Is it far from the station?",
        "And with a child of four years, in the rain?",
        "Thank you. Anything else?",
    ],
    "errors": {},
}
# And the tool that each is told to call. It harms nothing, and has no number with a fraction, which Claude Code would
# show in another form, as 5 for 5.0.
PRODUCTS = {"claude_code": "Read", "codex": "view_image"}
ENGINE = SimConfig(stores_responses=True, max_model_len=2**18, num_blocks=2**14)  # tokens are characters


class Relay:
    """called: the tool that the first answer calls, and no other answer any; empty: the engine chooses."""

    def __init__(self, address: str, called: str) -> None:
        self.kept: list[dict[str, Any]] = []
        self._address = address
        self._called = called

    async def __call__(self, request: web.Request) -> web.Response:
        body = await request.read()
        sent = json.loads(body) if body else {}
        if sent.get("stream") and request.path == Endpoint.CHAT:  # as the proxy asks for usage itself
            sent["stream_options"] = {"include_usage": True}
        if self._called and sent:
            sent["tool_choice"] = self._choice(Endpoint(request.path))
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, f"http://{self._address}{request.path}", json=sent or None) as response,
        ):
            answer = await response.read()
        if response.status == 200 and request.method == "POST" and request.path in [*Endpoint]:
            reply, summary = read_answer(Endpoint(request.path), answer, response.content_type)
            self.kept.append(
                {
                    "endpoint": request.path,
                    "body": json.loads(body),
                    "reply": reply.pieces,
                    "usage": [summary.prompt_tokens, summary.completion_tokens],
                    "response_id": summary.response_id,
                }
            )
        return web.Response(status=response.status, body=answer, content_type=response.content_type)

    def _choice(self, endpoint: Endpoint) -> Any:
        is_messages = endpoint is Endpoint.MESSAGES
        if self.kept:
            return {"type": "none"} if is_messages else "none"
        return {"type": "tool" if is_messages else "function", "name": self._called}


class Reply:
    """What the proxy's observer tells of an answer: `["text", text]`, `["call", index, id, name, arguments]`."""

    def __init__(self) -> None:
        self.pieces: list[list[Any]] = []

    def add_text(self, text: str) -> None:
        if self.pieces and self.pieces[-1][0] == "text":
            self.pieces[-1][1] += text
        else:
            self.pieces.append(["text", text])

    def add_tool_call(self, index: int, id: str | None, name: str | None, arguments: str) -> None:
        if self.pieces and self.pieces[-1][:2] == ["call", index]:
            last = self.pieces[-1]
            last[2:] = [id or last[2], name or last[3], last[4] + arguments]
        else:
            self.pieces.append(["call", index, id, name, arguments])

    def add_reasoning(self) -> None:
        self.pieces.append(["reasoning"])


def read_answer(endpoint: Endpoint, answer: bytes, content_type: str) -> tuple[Reply, AnswerSummary]:
    reply = Reply()
    observer = AnswerObserver(endpoint, reply)
    if content_type == "text/event-stream":
        StreamRelay(endpoint, Edits(), observer).feed(answer)
    else:
        observer.observe_body(answer)
    assert observer.summary.completed
    return reply, observer.summary


async def record(program: Path) -> list[dict[str, Any]]:
    async with running_engine(ENGINE) as engine:
        relay, app = Relay(engine.address, PRODUCTS.get(name_of(program), "")), web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", relay)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            await run(program.name, {**ASKED, "url": f"http://127.0.0.1:{runner.addresses[0][1]}"})
        finally:
            await runner.cleanup()
    return disguised(relay.kept) if name_of(program) in PRODUCTS else relay.kept


def disguised(recorded: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    disguise = Disguise()
    return [
        {
            **kept,
            "body": disguise.value(kept["body"]),
            "reply": [*map(disguise.reply, kept["reply"])],
            "response_id": disguise.id(kept["response_id"]),
        }
        for kept in recorded
    ]


def name_of(program: Path) -> str:
    return program.stem.removesuffix("_client")


def write(program: Path, recorded: Sequence[dict[str, Any]]) -> None:
    package = PACKAGE.findall(program.read_text())[0]
    lines = [json.dumps({"client": package, **kept}, ensure_ascii=False) for kept in recorded]
    path = FOLDER / f"{name_of(program)}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    print(f"{path}: {len(lines)} requests")


def main() -> None:
    for program in sorted(PROGRAMS.glob("*_client.*")):
        if len(sys.argv) < 2 or name_of(program) in sys.argv[1:]:
            try:
                write(program, asyncio.run(record(program)))
            except pytest.skip.Exception as skipped:
                print(f"{program.name}: {skipped}")


if __name__ == "__main__":
    main()
