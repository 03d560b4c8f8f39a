"""Requests outside of conversations: which worker's failure is whose, what reaches a worker, and the list of models."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.proxy.passthrough import model_list
from tests.support.credentials import bearer, client, write_keys
from tests.support.proxy import Turn

EMBED = {"model": "sim", "input": "x"}
SECRET = "10.1.2.3"
LEAK = {"error": {"message": f"peer {SECRET}:5600", "code": 500}, "kv_transfer_params": {"remote_host": SECRET}}
USED = {"data": [], "usage": {"total_tokens": 3}}
CUT = -1  # in place of a status: the answer ends after its head
TORN = -2  # or after its first bytes


@dataclass
class Odd:
    """A worker that is healthy and answers as a test says."""

    status: int = 200
    body: Any = field(default_factory=lambda: USED)
    headers: dict[str, str] = field(default_factory=dict)
    models: Any = field(default_factory=lambda: [{"id": "sim"}])
    models_wait_s: float = 0.0
    address: str = ""
    asked: list[bytes] = field(default_factory=list)
    models_asked: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            self.models_asked += 1
            await asyncio.sleep(self.models_wait_s)
            return web.json_response({"data": self.models})
        if request.method == "GET":
            return web.Response(text="")
        self.asked.append(await request.read())
        if self.status > 0:
            return web.json_response(self.body, status=self.status, headers=self.headers)
        response = web.StreamResponse()
        response.content_length = 1000
        await response.prepare(request)
        if self.status == TORN:
            await response.write(b"{")
        assert request.transport is not None
        request.transport.close()
        return response


@asynccontextmanager
async def odd(fleet: Any, role: str = "R", **answers: Any) -> AsyncIterator[Odd]:
    it = Odd()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", it.answer)
    async with TestServer(app) as server:
        it.address = f"127.0.0.1:{server.port}"
        it.models = answers.pop("found_models", it.models)
        await fleet.admin("POST", "/workers", {"worker": f"{role}={it.address}"})
        await fleet.until(lambda: any(v.id == it.address and v.up for v in fleet.proxy.state.registry.views()))
        prober = fleet.proxy.prober
        prober.nudge()  # while somebody is new it looks every second; from now on, at its own interval
        await fleet.until(lambda: not prober._nudged.is_set() and not prober._probing)
        await fleet.settle()
        for name, value in answers.items():
            setattr(it, name, value)
        yield it


def open_breakers(fleet: Any) -> dict[Any, str]:
    return dict(fleet.proxy.state.health.breakers.states(fleet.proxy.state.now()))


@pytest.mark.parametrize(
    ("status", "seen", "retry_after"),
    [(500, 502, None), (502, 502, None), (503, 503, "7"), (429, 429, "7"), (501, 501, None), (CUT, 502, None)],
)
async def test_what_a_worker_says_of_itself_stays_inside(
    start_fleet: Any, status: int, seen: int, retry_after: str | None
) -> None:
    async with start_fleet("") as fleet, odd(fleet, status=status, body=LEAK, headers={"Retry-After": "7"}):
        turn: Turn = await fleet.post("/v1/embeddings", EMBED)
        assert turn.status == seen
        assert set(turn.body) == {"error"}
        assert SECRET not in json.dumps(turn.body)
        assert turn.headers.get("Retry-After") == retry_after
        assert (turn.headers.get("X-PPD-Refused") == "workers_overloaded") is (seen in (429, 503))
        await fleet.until(fleet.idle)
        assert fleet.proxy.state.admission.inside == 0


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_what_it_says_of_the_request_is_relayed_as_it_is(start_fleet: Any, status: int) -> None:
    said = {"error": {"message": "too long"}, "detail": [1]}
    async with start_fleet("") as fleet, odd(fleet, status=status, body=said) as worker, odd(fleet) as other:
        turn = await fleet.post("/v1/embeddings", EMBED)
        assert (turn.status, turn.body) == (status, said)
        assert (len(worker.asked), len(other.asked)) == (1, 0)
        assert open_breakers(fleet) == {}


@pytest.mark.parametrize("status", [500, CUT])
async def test_another_worker_answers_and_the_one_that_fails_is_passed_over(start_fleet: Any, status: int) -> None:
    async with start_fleet("", breaker_open_s=60.0) as fleet, odd(fleet, status=status) as bad, odd(fleet) as good:
        turns = [await fleet.post("/v1/embeddings", EMBED) for _ in range(12)]
        assert Counter(turn.status for turn in turns) == {200: 12}
        assert len(good.asked) == 12
        assert 3 <= len(bad.asked) <= 6  # one cut off over a kept connection is asked over a new one too
        assert open_breakers(fleet) == {bad.address: "open"}


async def test_one_that_breaks_off_under_way_is_passed_over_too(start_fleet: Any) -> None:
    async with start_fleet("", breaker_open_s=60.0) as fleet, odd(fleet, status=TORN) as bad:
        for _ in range(3):
            with pytest.raises(aiohttp.ClientPayloadError):
                await fleet.post("/v1/embeddings", EMBED)
        assert open_breakers(fleet) == {bad.address: "open"}
        await fleet.until(fleet.idle)


async def test_failures_with_answers_that_took_an_engine_between_them_open_nothing(start_fleet: Any) -> None:
    async with start_fleet("", attempts=1) as fleet, odd(fleet) as worker:
        for _ in range(3):
            for status in (500, 500, 200):
                worker.status = status
                await fleet.post("/v1/embeddings", EMBED)
        assert open_breakers(fleet) == {}


async def test_an_overloaded_worker_is_left_alone_at_the_price_of_one_retry(start_fleet: Any) -> None:
    settings = {"retry_burst": 1, "retry_share": 0.0}
    async with (
        start_fleet("", **settings) as fleet,
        odd(fleet, status=503, headers={"Retry-After": "60"}) as busy,
        odd(fleet) as free,
    ):
        turns = [await fleet.post("/v1/embeddings", EMBED) for _ in range(6)]
        assert {turn.status for turn in turns} == {200}
        assert (len(busy.asked), len(free.asked)) == (1, 6)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({"attempts": 1}, 1), ({"attempts": 2}, 2), ({"retry_burst": 0, "retry_share": 0.0}, 1)],
)
async def test_failures_are_tried_again_within_attempts_and_the_budget(
    start_fleet: Any, settings: dict[str, Any], asked: int
) -> None:
    async with (
        start_fleet("", **settings) as fleet,
        odd(fleet, status=500) as one,
        odd(fleet, status=500) as two,
        odd(fleet, status=500) as three,
    ):
        assert (await fleet.post("/v1/embeddings", EMBED)).status == 502
        assert len(one.asked + two.asked + three.asked) == asked


async def test_a_request_without_a_model_goes_to_no_draining_worker(start_fleet: Any) -> None:
    async with start_fleet("") as fleet, odd(fleet) as leaving, odd(fleet) as staying:
        fleet.proxy.state.registry.hold_back(leaving.address, True)
        assert [(await fleet.post("/v1/embeddings", {"input": "x"})).status for _ in range(3)] == [200] * 3
        assert (len(leaving.asked), len(staying.asked)) == (0, 3)


async def test_a_worker_sees_neither_private_members_nor_a_priority_above_the_keys(
    start_fleet: Any, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("batch", priority=10))
    async with start_fleet("", keys_file=keys) as fleet, odd(fleet) as worker:
        private = {"kv_transfer_params": {"remote_host": "evil"}, "request_id": "a", "priority": -1000}
        assert (await fleet.post("/v1/embeddings", {**EMBED, **private}, bearer("batch"))).status == 200
        seen = json.loads(worker.asked[0])
        assert seen.pop("cache_salt")
        assert seen == {**EMBED, "priority": 10}


async def test_what_has_no_body_costs_a_key_no_tokens(start_fleet: Any, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("one", tokens_per_minute=60))
    async with start_fleet("", keys_file=keys) as fleet, odd(fleet):
        async with fleet.session.get(f"{fleet.base_url}/v1/audio/voices", headers=bearer("one")) as answer:
            assert (answer.status, answer.headers["X-RateLimit-Remaining-Tokens"]) == (200, "60")


@pytest.mark.parametrize("path", ["/v1/audio/voices", "/v1/responses/resp_1"])
async def test_a_head_is_answered_although_the_worker_sends_no_body(start_fleet: Any, path: str) -> None:
    async with start_fleet("", answer_timeout_s=0.5, first_event_timeout_s=0.5) as fleet, odd(fleet):
        async with fleet.session.head(fleet.base_url + path) as answer:
            assert (answer.status, await answer.read()) == (200, b"")


async def test_what_is_nested_too_deep_reaches_no_worker(start_fleet: Any) -> None:
    async with start_fleet("", json_depth_limit=20) as fleet, odd(fleet) as worker:
        for depth, status in ((19, 200), (20, 400)):
            deep = b'{"model":"sim","input":' + b"[" * depth + b"]" * depth + b"}"
            async with fleet.session.post(
                f"{fleet.base_url}/v1/embeddings", data=deep, headers={"Content-Type": "application/json"}
            ) as response:
                assert response.status == status
        assert len(worker.asked) == 1


@pytest.mark.parametrize(
    "answers",
    [{"models_wait_s": 120.0}, {"models": [{"name": "x"}]}, {"models": "none"}, {"models": [{"id": "odd"}, 5]}],
    ids=["hangs", "nameless", "no-list", "no-card"],
)
async def test_one_worker_that_cannot_name_its_models_hides_no_others(
    start_fleet: Any, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]
) -> None:
    monkeypatch.setattr(model_list, "CARDS_LIMIT_S", 2.0)
    async with start_fleet("R1", probe_interval_s=60.0) as fleet:
        async with odd(fleet, found_models=[{"id": "odd"}], **answers), asyncio.timeout(60):
            async with fleet.session.get(f"{fleet.base_url}/v1/models") as response:
                assert [card["id"] for card in (await response.json())["data"]] == ["sim"]


async def test_where_none_can_name_them_it_is_a_503(start_fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_list, "CARDS_LIMIT_S", 2.0)
    async with start_fleet("", probe_interval_s=60.0) as fleet, odd(fleet, models_wait_s=120.0) as worker:
        before = worker.models_asked
        async with asyncio.timeout(60):
            urls = [f"{fleet.base_url}/v1/models"] * 20
            statuses = await asyncio.gather(*(_status(fleet, url) for url in urls))
        assert set(statuses) == {503}
        assert worker.models_asked == before + 1


async def test_the_models_are_asked_for_once_a_second_for_each_authorization(
    start_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_list, "CARDS_KEPT_S", 60.0)
    async with start_fleet("", probe_interval_s=60.0) as fleet, odd(fleet) as worker:
        before, url = worker.models_asked, f"{fleet.base_url}/v1/models"
        for key in ("a", "b"):
            headers = {"Authorization": f"Bearer {key}"}
            assert {await _status(fleet, url, headers) for _ in range(3)} == {200}
        assert worker.models_asked == before + 2
        fleet.proxy.model_list._listings.clear()
        await asyncio.gather(*(_status(fleet, url) for _ in range(20)))
        assert worker.models_asked == before + 3
        monkeypatch.setattr(model_list, "CARDS_KEPT_S", 0.0)
        fleet.proxy.model_list._listings.clear()
        assert [await _status(fleet, url) for _ in range(2)] == [200, 200]
        assert worker.models_asked == before + 5


async def _status(fleet: Any, url: str, headers: dict[str, str] | None = None) -> int:
    async with fleet.session.get(url, headers=headers) as response:
        await response.read()
        return int(response.status)
