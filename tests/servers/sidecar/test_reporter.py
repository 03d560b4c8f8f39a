"""What the picker hears of turns, and that a picker that does not listen costs nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from ppd.proxy.discovery.turn_report import TurnReport, decode
from ppd.proxy.gateway.headers import ENCODERS, TURN
from ppd.proxy.openai.request import Endpoint
from ppd.servers.sidecar.reporter import COMPLAIN_EVERY_S, Reporter
from ppd.servers.sim.core.fault_orders import Faults
from tests.e2e.encoders.test_encoders import asks, picture
from tests.servers.sidecar.site import BODY, WORDS, Site
from tests.support.clock import FakeClock

pytestmark = pytest.mark.slow

REPORT = TurnReport(request_id="r", route="LOCAL", outcome="completed", status=200, ended_s=1.0)


class Picker:
    """A ROUTER socket, as a picker's heartbeat port has it."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self.address = f"127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.payloads: list[bytes] = []

    async def hear(self) -> TurnReport:
        _, payload = await self._socket.recv_multipart()
        self.payloads.append(payload)
        return decode(payload)


@asynccontextmanager
async def heard(names: str = "P1 D1") -> AsyncIterator[tuple[Site, Picker]]:
    context = zmq.asyncio.Context()
    picker = Picker(context)
    try:
        async with Site.of(report=picker.address, names=names) as site:
            yield site, picker
    finally:
        context.destroy(linger=0)


async def test_the_picker_hears_how_each_turn_went() -> None:
    async with heard() as (site, picker):
        headers, p = {**site.to_p, "X-Request-Id": "one", TURN: "picked"}, site.engines["P1"].address
        await site.ask(headers, stream=True)
        split = await picker.hear()
        assert (split.request_id, split.turn_id) == ("one", "picked")
        assert (split.route, split.prefill, split.outcome) == ("SPLIT", p, "completed")
        assert split.prompt_tokens is not None and split.completion_tokens == 24
        assert (split.prefill_cached_tokens, split.decode_cached_tokens) == (0, None)
        assert split.first_token_s is not None and split.last_token_s is not None
        assert 0.0 < split.first_token_s <= split.last_token_s <= split.ended_s
        assert (split.failure, split.failed_legs) == ("", [])

        site.engines["P1"].faults = Faults(refuse=1, refuse_status=500)
        await site.ask(headers)
        saved = await picker.hear()
        assert (saved.route, saved.prefill, saved.outcome, saved.first_token_s) == ("LOCAL", p, "completed", None)
        assert (saved.prefill_cached_tokens, (saved.decode_cached_tokens or 0) > 0) == (None, True)
        assert [(leg.leg, leg.address, leg.phase, leg.cause) for leg in saved.failed_legs] == [
            ("prefill", p, "headers", "5xx")
        ]

        await site.ask({"x-prefiller-host-port": "10.9.9.9:1", TURN: "t" * 300})  # no picker of ours sends that
        refused = await picker.hear()
        assert refused.turn_id == "t" * 256
        assert (refused.route, refused.outcome, refused.status) == ("", "rejected", 403)
        assert refused.failure == "prefill_not_allowed"

        site.engines["D1"].faults = Faults(cut=1, cut_after_events=4)
        await site.ask(stream=True)
        broken = await picker.hear()
        assert broken.turn_id == ""
        assert (broken.outcome, broken.status, broken.prompt_tokens) == ("broken", 200, None)
        assert [leg.leg for leg in broken.failed_legs] == ["local"]
        own = (await site.get("/ppd/metrics")).raw.decode().splitlines()
        assert 'ppd_turns_total{reason="prefill_named",route="SPLIT"} 1.0' in own
        assert {"ppd_reports_lost_total 0.0", "ppd_handoffs_outstanding 0.0"} <= set(own)
        assert not any(WORDS[:20].encode() in payload for payload in picker.payloads)


async def test_the_picker_hears_which_encoder_has_failed() -> None:
    async with heard("E1 P1 D1") as (site, picker):
        named = {ENCODERS: site.engines["E1"].address, **site.to_p}
        seen: dict[str, Any] = {"messages": [{"role": "user", "content": asks(picture(1))}]}
        await site.ask(named, **seen)
        assert (await picker.hear()).failed_legs == []
        await site.kill("E1")
        site.engines["P1"].faults = Faults(refuse=1, refuse_status=500)
        await site.ask(named, **seen)
        saved = await picker.hear()
        assert [(leg.leg, leg.address, leg.phase, leg.cause) for leg in saved.failed_legs] == [
            *[("encode", named[ENCODERS], "connect", "refused")] * 2,  # for P, and then for D alone
            ("prefill", site.engines["P1"].address, "headers", "5xx"),
        ]
        assert saved.outcome == "completed"


async def test_a_picker_that_is_away_costs_only_its_reports(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter("127.0.0.1:1", held=2, now=clock)
    for _ in range(10):
        reporter.send(REPORT)
    assert reporter.lost == 8
    assert caplog.messages == ["picker 127.0.0.1:1 takes no reports: 1 are lost"]
    clock.advance(COMPLAIN_EVERY_S)
    reporter.send(REPORT)
    assert caplog.messages[1:] == ["picker 127.0.0.1:1 takes no reports: 8 are lost"]
    reporter.close()
    reporter.send(REPORT)
    assert reporter.lost == 10


async def test_the_picker_is_told_before_the_client_hears() -> None:
    """Whose next turn may come there at once."""
    async with heard() as (site, picker):
        turns = site.sidecar.turns
        caller = turns.caller(Endpoint.CHAT, {"content-type": "application/json", "x-request-id": "one"})
        reply = await turns.answer(caller, msgspec.json.encode(BODY))
        assert (reply.status, reply.end) == (200, None)
        assert (await picker.hear()).request_id == "one"
