"""What a turn's head gives its legs, and which refusals are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.openai.request import Endpoint, Request
from ppd.proxy.policy import Route
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
