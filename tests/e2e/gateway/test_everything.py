"""An Envoy that asks the picker about every request, as llm-d's own configuration has it: what clients get, and engines
see, is what the proxy itself would have answered and sent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from ppd.proxy.admission.keys import Client, encode, hash_of
from tests.e2e.gateway.envoy_program import asks_of_everything, carried

pytestmark = pytest.mark.e2e
KEY = {"Authorization": "Bearer sk-secret"}
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
FORGED = {
    "x-prefiller-host-port": "10.9.9.9:1",
    "x-encoder-hosts-ports": "10.9.9.9:1",
    "x-gateway-destination-endpoint": "10.9.9.9:1",
    "x-gateway-destination-endpoint-subset": "10.9.9.9:1",
    "x-data-parallel-rank": "7",
    "x-ppd-queue-timeout": "5",
    "x-ppd-hops": "0",
}
ASKED: list[tuple[str, str, dict[str, str], Any]] = [
    ("POST", "/v1/embeddings", {}, {"model": "sim", "input": "a text"}),
    ("POST", "/v1/embeddings", KEY, {"model": "sim", "input": "a text"}),
    ("POST", "/v1/embeddings?x=1", KEY, {"model": "another", "input": "a text"}),
    ("POST", "/tokenize", KEY, {"model": "sim", "prompt": "a text"}),
    ("POST", "/tokenize", {}, {"model": "sim", "prompt": "a text"}),
    ("GET", "/v1/models", {}, None),
    ("GET", "/v1/models", KEY, None),
    ("GET", "/version", {}, None),
    ("GET", "/metrics", KEY, None),
    ("GET", "/v1/chat/completions", KEY, None),
    ("POST", "/v1/load_lora_adapter", KEY, {"lora_name": "x", "lora_path": "/x"}),
    ("POST", "/faults", KEY, {"kind": "wedge"}),
    ("POST", "/reset_prefix_cache", KEY, None),
    ("POST", "/v1/chat/%63ompletions", {}, CHAT),
    ("POST", "/v1/chat/completions", KEY, None),
]


async def asked(
    session: aiohttp.ClientSession, base: str, method: str, path: str, headers: dict[str, str], body: Any
) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    more = {} if body is None else {"content-type": "application/json"}
    async with session.request(
        method, URL(base + path, encoded=True), data=data, headers={**headers, **more}
    ) as answer:
        return answer.status, await answer.json(content_type=None)


async def test_all_that_is_no_turn_is_answered_as_by_the_proxy(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(encode(Client(name="one", tenant="one"), hash_of("sk-secret")))
    settings = {"keys_file": str(keys), "open_paths": ("/health",)}
    async with carried(tmp_path, "D1", options={"edited": asks_of_everything}, **settings) as (fleet, envoy):
        engine = fleet.engines["D1"]
        for method, path, headers, body in ASKED:
            own = await asked(fleet.session, fleet.base_url, method, path, headers, body)
            through = await asked(fleet.session, envoy.base_url, method, path, {**FORGED, **headers}, body)
            assert through == own, (method, path)
        assert not engine.received  # none of these was a turn that may be asked
        for path in ("/v1/chat/completions", "/v1/chat/%63ompletions?a=b", "//v1/chat/completions"):
            answer = await asked(fleet.session, envoy.base_url, "POST", path, {**FORGED, **KEY}, CHAT)
            assert answer[0] == 200, (path, answer)
            sent = engine.received[-1]
            assert sent.path == "/v1/chat/completions"
            told = {name.lower(): value for name, value in sent.headers.items()}
            own_names = {"x-gateway-destination-endpoint": engine.address, "x-ppd-hops": "1"}
            assert {name: told[name] for name in FORGED if name in told} == own_names
            assert "authorization" not in told
        await fleet.until(fleet.idle)


BAD: list[tuple[str, dict[str, str], bytes]] = [
    ("/v1/chat/completions", KEY, b"{"),
    ("/v1/chat/completions", KEY, b"[" * 10_000),
    ("/v1/messages", KEY, b"[]"),  # in Anthropic's shape
    ("/v1/chat/completions", {}, b"{}"),
    ("/v1/chat/completions", KEY, json.dumps({**CHAT, "model": "another"}).encode()),
    ("/v1/chat/completions", {**KEY, "x-ppd-force-route": "LOCAL"}, json.dumps(CHAT).encode()),
    ("/v1/chat/completions", {**KEY, "content-encoding": "br"}, json.dumps(CHAT).encode()),
    ("/v1/chat/completions", {**KEY, "content-encoding": "gzip"}, json.dumps(CHAT).encode()),
    ("/v1/chat/completions", KEY, json.dumps({**CHAT, "user": "x" * 5000}).encode()),
    ("/v1/chat/completions", {"Authorization": "Bearer sk-spent"}, json.dumps(CHAT).encode()),
]
TOLD = ("retry-after", "x-ppd-refused", "content-type", "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests")


async def test_what_a_turn_is_refused_for_is_told_in_the_proxys_own_words(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    spent = Client(name="spent", tenant="spent", requests_per_minute=1)
    entries = (Client(name="one", tenant="one"), "sk-secret"), (spent, "sk-spent")
    keys.write_text("".join(encode(client, hash_of(key)) for client, key in entries))
    async with carried(tmp_path, "D1", keys_file=str(keys), body_limit_bytes=4096) as (fleet, envoy):

        async def refused(base: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any, Any]:
            sent = {"content-type": "application/json", **headers}
            async with fleet.session.post(base + path, data=body, headers=sent) as answer:
                told = {name: answer.headers.get(name) for name in TOLD}
                if told["retry-after"] is not None:
                    assert 0 < int(told.pop("retry-after") or 0) <= 60
                return answer.status, json.loads(re.sub(rb"retry in [0-9.]+ s", b"", await answer.read())), told

        first = await refused(envoy.base_url, *BAD[-1])
        assert (first[0], first[2]["x-ratelimit-remaining-requests"]) == (200, "0")
        for path, headers, body in BAD:
            own = await refused(fleet.base_url, path, headers, body)
            through = await refused(envoy.base_url, path, headers, body)
            assert own[0] >= 400, (headers, body)
            assert through == own
        assert (own[0], "retry-after" in own[2]) == (429, False)  # which has told one
        await fleet.until(fleet.idle)
