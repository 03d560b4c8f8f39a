"""One exchange: a client's request to a sidecar between engines, what each was asked, and what the client was told."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from .engines import ScriptedEngine, nobody, read_body, read_headers

CHAT = "/v1/chat/completions"
CONCURRENT = ("--kv-connector=sglang", "--kv-connector=offloading")  # P may be asked after D has answered
LIMIT_S = 20.0
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# What Envoy and a client write beside what the picker does.
HEADERS = {
    "accept": "*/*",
    "accept-encoding": "gzip",
    "authorization": "Bearer a-key",
    "content-type": "application/json",
    "traceparent": "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01",
    "user-agent": "a-client",
    "x-forwarded-proto": "http",
    "x-gateway-destination-endpoint": "<sidecar>",
    "x-request-id": "gateway-1",
}
QUESTION = [{"role": "user", "content": "What is a prefix?"}]
BODY = {"model": "m", "messages": QUESTION, "max_tokens": 256, "temperature": 0}

# Of a D's host:port, and of all by name, the sidecar before it: its own host:port, as long as it is open.
Sidecar = Callable[[str, Mapping[str, str]], AbstractAsyncContextManager[str]]


@dataclass(frozen=True)
class Script:
    """engines: the answers of each by name, in order; None: it is gone. flags: of llm-d's sidecar.

    In headers `<P>`, `<P2>`, `<D>`, `<E>`, `<E2>` and `<sidecar>` stand for addresses. body: a text is sent as it is.
    """

    engines: Mapping[str, tuple[Mapping[str, Any], ...] | None]
    body: Any = field(default_factory=lambda: BODY)
    headers: Mapping[str, str] = field(default_factory=lambda: {"x-prefiller-host-port": "<P>"})
    method: str = "POST"
    path: str = CHAT
    flags: tuple[str, ...] = ("--kv-connector=nixlv2",)

    @classmethod
    def of(cls, recorded: Mapping[str, Any]) -> Self:
        """What was played, from its file."""
        engines = {name: told["answers"] for name, told in recorded["engines"].items()}
        asked = recorded["request"]
        return cls(
            {name: None if answers is None else tuple(answers) for name, answers in engines.items()},
            asked["body"],
            {name: value for name, value in asked["headers"].items() if name not in HEADERS},
            asked["method"],
            asked["path"],
            tuple(recorded["sidecar"]),
        )

    @property
    def request(self) -> dict[str, Any]:
        headers = {**HEADERS, **self.headers}
        return {"method": self.method, "path": self.path, "headers": headers, "body": self.body}


async def play(script: Script, sidecar: Sidecar) -> dict[str, Any]:
    """The exchange as its file has it."""
    engines = {name: ScriptedEngine(answers or ()) for name, answers in script.engines.items()}
    async with AsyncExitStack() as stack:
        addresses = {
            f"<{name}>": await stack.enter_async_context(nobody() if script.engines[name] is None else engine.serving())
            for name, engine in engines.items()
        }
        at = await stack.enter_async_context(sidecar(addresses["<D>"], addresses))
        addresses["<sidecar>"] = at
        answer = await ask(f"http://{at}{script.path}", script, addresses)
        if not set(CONCURRENT).isdisjoint(script.flags):
            async with asyncio.timeout(LIMIT_S):
                while not all(engine.asked for engine in engines.values()):
                    await asyncio.sleep(0.01)
    heard = {name: {"asked": engine.asked, "answers": script.engines[name]} for name, engine in engines.items()}
    played = {"sidecar": script.flags, "request": script.request, "engines": heard, "answer": answer}
    named: dict[str, Any] = json.loads(with_names(json.dumps(played), addresses))
    return named


async def ask(url: str, script: Script, addresses: Mapping[str, str]) -> dict[str, Any]:
    headers = {**HEADERS, **script.headers}
    for name, address in addresses.items():
        headers = {key: value.replace(name, address) for key, value in headers.items()}
    body = script.body if script.body is None or isinstance(script.body, str) else json.dumps(script.body)
    async with (
        aiohttp.ClientSession() as session,
        session.request(script.method, url, data=body, headers=headers) as answer,
    ):
        told = read_body(answer.headers.get("content-type", ""), await answer.text())
        return {"status": answer.status, "headers": read_headers(answer), "body": told}


def with_names(text: str, addresses: Mapping[str, str]) -> str:
    """JSON with a name for each thing that another run has anew."""
    for name, address in addresses.items():
        text = text.replace(address, name)
    text = re.sub(r'("bootstrap_room": )\d+', r'\1"<room>"', text)
    for number, each in enumerate(dict.fromkeys(found[0] for found in UUID.finditer(text)), start=1):
        text = text.replace(each, "<uuid>" if number == 1 else f"<uuid{number}>")
    return text
