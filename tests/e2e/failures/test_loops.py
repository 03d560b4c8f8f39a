"""A worker that is a proxy, and perhaps this very one: a request that goes round ends soon, with one clear error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppd.proxy.config import Mode

BODY = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.mark.parametrize(("roles", "mode"), [("R", Mode.REPLICA), ("D", Mode.ALWAYS_LOCAL), ("PD", Mode.ALWAYS_SPLIT)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_proxy_that_is_its_own_worker_says_so(start_fleet: Any, roles: str, mode: Mode, stream: bool) -> None:
    async with start_fleet("", mode=mode) as fleet:
        own = fleet.base_url.removeprefix("http://")
        for role, host in zip(roles, (own, own.replace("127.0.0.1", "localhost")), strict=False):
            status, _ = await fleet.admin("POST", "/workers", {"worker": f"{role}={host},model=sim"})
            assert status == 201
        await fleet.until(lambda: [*fleet.states().values()] == ["up"] * len(roles))
        answer = await fleet.post("/v1/chat/completions", {**BODY, "stream": stream})
        assert answer.status == 508
        assert "a worker of a proxy is a proxy" in answer.body["error"]["message"]
        assert len((await fleet.admin("GET", "/requests?limit=1000"))[1]["newest"]) <= 7
        answer = await fleet.post("/v1/embeddings", {"model": "sim", "input": "x"})
        assert answer.status == 508
        assert fleet.idle()


async def test_a_chain_of_two_proxies_serves(start_fleet: Any) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA) as inner, start_fleet("", mode=Mode.REPLICA) as outer:
        address = inner.base_url.removeprefix("http://")
        await outer.admin("POST", "/workers", {"worker": f"R={address},model=sim"})
        await outer.until(lambda: [*outer.states().values()] == ["up"])
        assert (await outer.post("/v1/chat/completions", BODY)).status == 200
        assert [r.headers["X-PPD-Hops"] for r in inner.engines["R1"].received] == ["2"]


@pytest.mark.parametrize(
    ("hops", "status"), [("0", 200), ("2", 200), ("3", 508), ("-1", 400), ("x", 400), ("9" * 400, 400)]
)
async def test_what_a_client_says_of_hops_is_its_own_affair(start_fleet: Any, hops: str, status: int) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA) as fleet:
        for path, body in (("/v1/chat/completions", BODY), ("/v1/embeddings", {"model": "sim", "input": "x"})):
            answer = await fleet.post(path, body, {"X-PPD-Hops": hops})
            assert answer.status == status, json.dumps(answer.body)
