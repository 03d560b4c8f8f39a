"""What a turn's head gives its legs, which refusals are counted, and what a limited key is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ppd.proxy.admission.keys import Client
from ppd.proxy.admission.rate_limits import RateLimits
from ppd.proxy.config import ProxyConfig
from ppd.proxy.openai.request import Endpoint, Request
from ppd.proxy.policy import Route
from ppd.proxy.routing.router import TurnReply
from ppd.proxy.routing.service import TurnService
from ppd.proxy.telemetry.metrics import Metrics
from ppd.proxy.telemetry.receipts import Receipt
from tests.support.requests import parse

HEADERS = {"content-type": "application/json; charset=utf-8", "authorization": "Bearer own"}


class Bodies:
    async def turn(self, *_: object) -> Request:
        return parse()


def service(metrics: Metrics | None = None, *, may_force: bool = True, **settings: Any) -> TurnService:
    """Without keys of its own."""
    state, bodies = cast(Any, SimpleNamespace(metrics=metrics)), cast(Any, Bodies())
    return TurnService(ProxyConfig(**settings), state, cast(Any, None), None, bodies=bodies, may_force=may_force)


@pytest.mark.parametrize(("worker_key", "told"), [("", "Bearer own"), ("the proxy's", None)])
async def test_a_clients_key_goes_to_workers_only_where_the_proxy_has_none_for_them(
    worker_key: str, told: str | None
) -> None:
    tested = service(worker_api_key=worker_key)
    _, context = await tested.read(tested.caller(Endpoint.CHAT, HEADERS), b"{}")
    assert context.headers.get("authorization") == told
    assert context.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("may_force", "forced"), [(True, Route.LOCAL), (False, None)])
def test_a_route_may_be_asked_for_where_this_proxy_decides(may_force: bool, forced: Route | None) -> None:
    headers = {**HEADERS, "x-admin-key": "admin", "x-ppd-force-route": "LOCAL"}
    tested = service(may_force=may_force, admin_key="admin")
    assert tested.caller(Endpoint.CHAT, headers).forced is forced


@pytest.mark.parametrize(("outcome", "counted"), [(None, 1), ("running", 1), ("failed", 0), ("rejected", 0)])
def test_a_turn_that_has_counted_is_no_refusal_too(outcome: str | None, counted: int) -> None:
    metrics, receipt = Metrics(), None
    if outcome is not None:
        receipt = Receipt(id="r", at="", endpoint="", model="", stream=False, session="", turn=1, kind="")
        receipt.outcome = outcome
    service(metrics).rejected(429, receipt)
    assert metrics.rejected.labels("429")._value.get() == counted


@pytest.mark.parametrize("limit", ["", "requests_per_minute", "tokens_per_minute"])
async def test_what_a_limited_key_has_left_is_told_once_its_turn_has_ended(limit: str) -> None:
    """Any other turn ends once its answer is written."""
    limits, of_key = RateLimits(), cast(Any, {limit: 600} if limit else {})
    client = Client(name="k", tenant="t", **of_key)

    async def answer(*_: object) -> TurnReply:
        limits.take(client, 500, 0.0)
        return TurnReply("application/json", {"x-ratelimit-remaining-tokens": "a worker's"}, b"{}", end=end)

    def end() -> None:
        limits.settle(client, 500, 20, 0.0)
        ended.append(True)

    ended = list[bool]()
    tested = service()
    tested._state = cast(Any, SimpleNamespace(rate_limits=limits, now=lambda: 0.0, sessions=None))
    tested._router = cast(Any, SimpleNamespace(answer=answer))
    caller = replace(tested.caller(Endpoint.CHAT, HEADERS), client=client)
    reply = await tested.answer(caller, b"{}")
    assert bool(ended) == bool(limit)
    left = {"requests_per_minute": {"Requests": "599"}, "tokens_per_minute": {"Tokens": "580"}}.get(limit, {})
    told = {name: value for name, value in reply.headers.items() if "emaining" in name}
    expected = {f"X-RateLimit-Remaining-{kind}": value for kind, value in left.items()}
    assert told == (expected or {"x-ratelimit-remaining-tokens": "a worker's"})
    reply.written()
    assert ended == [True]
