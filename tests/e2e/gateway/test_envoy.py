"""Envoy carries the bytes and the proxy decides: a real Envoy, the picker's port, and simulated engines."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from ppd.proxy.config import EncoderUse, Mode
from ppd.proxy.gateway.messages import HealthCheckRequest, HealthCheckResponse
from ppd.servers.fleet.ports import free_ports
from tests.e2e.encoders.test_encoders import asks, picture
from tests.e2e.gateway.envoy_program import carried, is_over, is_reported, sidecar_before, until_envoy_knows
from tests.support.fleet import Fleet, has_work
from tests.support.proxy import Chat, ProxyClient

pytestmark = pytest.mark.e2e
SEEN = {"sees_answers": True}
LONG = "Tell me of a thing that lasts for long. " * 20


@pytest.mark.parametrize("sees_answers", [True, False], ids=["sees answers", "sees heads"])
async def test_a_conversation_stays_where_its_prefix_is(tmp_path: Path, sees_answers: bool) -> None:
    async with carried(tmp_path, "D1 D2", options={"sees_answers": sees_answers}) as (fleet, envoy):
        through, beside = Chat(envoy), Chat(fleet, headers={"Authorization": "Bearer another"})
        places, cached = set(), 0
        for turn in range(4):
            asked = f"{turn}: {LONG}"
            answer = await through.say(asked, max_tokens=20)
            await fleet.until(partial(is_over, fleet, answer.headers["x-request-id"]))  # it waits for a report at first
            same = await beside.say(asked, max_tokens=20)
            assert (answer.status, answer.text) == (200, same.text)
            assert answer.route == "LOCAL"
            places.add(answer.headers["x-ppd-decode"])
            assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= cached * 0.9
            cached = answer.body["usage"]["prompt_tokens"]
        assert len(places) == 1
        newest = next(one for one in fleet.proxy.state.receipts.newest(2) if not one.client and one.turn == 4)
        assert newest.kind == "next"
        await fleet.until(fleet.idle)


async def hear(fleet: Fleet, envoy: ProxyClient) -> int:
    """Both D's sidecars report, so they are waited for from then on. Returns how often P has been asked for that."""
    heard = list[str]()
    while len(set(heard)) < 2:
        answer = await Chat(envoy).say(f"{len(heard)}, are you there? {LONG}", max_tokens=20)
        heard.append(answer.headers["x-ppd-decode"])
    samples = [f'ppd_turn_reports_total{{result="{result}"}}' for result in ("taken", "late")]
    async with asyncio.timeout(60):
        while sum([await fleet.metric(sample) for sample in samples]) < len(heard):
            await asyncio.sleep(0.01)
    return len(fleet.engines["P1"].received)


async def test_envoy_picker_and_sidecars_split_and_stay(tmp_path: Path) -> None:
    async with carried(tmp_path, "P1 R1", mode=Mode.TABLE) as (fleet, envoy):
        engines = [await fleet.start(name) for name in ("D1", "D2")]
        async with (
            sidecar_before(engines[0].address, fleet.proxy) as first,
            sidecar_before(engines[1].address, fleet.proxy) as second,
        ):
            for name, engine, address in zip(("D1", "D2"), engines, (first, second), strict=True):
                await fleet.join(name, engine, address)
            force = {"X-Admin-Key": "operator", "X-PPD-Force-Route": "SPLIT"}
            apart = {**force, "X-PPD-Force-Route": "REPLICA", "Authorization": "Bearer another"}  # no retry
            chat, alone = Chat(envoy, headers=force), Chat(fleet, headers=apart)
            before = await hear(fleet, envoy)
            routes, places = [], set()
            for turn in range(3):
                answer = await chat.say(f"{turn}: {LONG}", max_tokens=20)
                assert (answer.status, answer.text) == (200, (await alone.say(f"{turn}: {LONG}", max_tokens=20)).text)
                routes.append(answer.route)
                places.add(answer.headers["x-ppd-decode"])
                await fleet.until(partial(is_reported, fleet, answer.headers["x-request-id"]))
                chat.headers = {**force, "X-PPD-Force-Route": "LOCAL"}
            assert (routes, len(places)) == (["SPLIT", "LOCAL", "LOCAL"], 1)
            assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert len(fleet.engines["P1"].received) == before + 1
            await fleet.until(fleet.idle)


@pytest.mark.parametrize("dies", ["sidecar", "engine"])
async def test_of_a_dead_worker_the_next_best_serves_and_is_learnt_of(tmp_path: Path, dies: str) -> None:
    """Nothing but Envoy finds out that the first one is dead: the probes are far apart."""
    (admin,) = free_ports(1)
    known = {"picker_fallbacks": 1, "picker_workers_file": str(tmp_path / "workers.json"), "probe_interval_s": 60.0}
    async with (
        AsyncExitStack() as stack,
        carried(tmp_path, "P1 R1", options={"admin_port": admin}, mode=Mode.TABLE, **known) as (fleet, envoy),
    ):
        engines = [await fleet.start(name) for name in ("D1", "D2")]
        lives = {}
        for name, engine in zip(("D1", "D2"), engines, strict=True):
            lives[name] = await stack.enter_async_context(AsyncExitStack())
            await fleet.join(
                name, engine, await lives[name].enter_async_context(sidecar_before(engine.address, fleet.proxy))
            )
        force = {"X-Admin-Key": "operator", "X-PPD-Force-Route": "SPLIT"}
        apart = {**force, "X-PPD-Force-Route": "REPLICA", "Authorization": "Bearer another"}
        chat, alone = Chat(envoy, headers=force), Chat(fleet, headers=apart)
        await until_envoy_knows(fleet.session, admin, 3)
        await fleet.settle()  # no probe of those that have just come is still ahead
        before = await hear(fleet, envoy)
        first = await chat.say(LONG, max_tokens=20)
        await alone.say(LONG, max_tokens=20)
        await fleet.until(partial(is_reported, fleet, first.headers["x-request-id"]))
        dead, other = sorted(lives, key=lambda name: name != first.headers["x-ppd-decode"])
        await (lives[dead].aclose() if dies == "sidecar" else fleet.kill(dead))
        second = await chat.say(LONG, max_tokens=20)
        assert (second.status, second.text) == (200, (await alone.say(LONG, max_tokens=20)).text)
        assert (second.route, second.reason, second.headers["x-ppd-decode"]) == ("SPLIT", "next_best", other)
        await fleet.until(partial(is_reported, fleet, second.headers["x-request-id"]))
        receipt = fleet.proxy.state.receipts.find(second.headers["x-request-id"])
        assert receipt is not None
        assert [(leg.worker, leg.error) for leg in receipt.legs] == [(dead, "refused"), (other, None)]
        assert len(fleet.engines["P1"].received) - before == (2 if dies == "sidecar" else 3)
        chat.headers = {**force, "X-PPD-Force-Route": "LOCAL"}
        third = await chat.say(LONG, max_tokens=20)
        assert (third.route, third.reason, third.headers["x-ppd-decode"]) == ("LOCAL", "forced", other)
        assert third.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        if dies == "sidecar":
            await fleet.until(fleet.idle)
        else:  # nobody is left to pull what P has computed for the engine: it keeps that for its lease
            await fleet.until(lambda: not any(map(has_work, fleet.proxy.state.registry.views())))
            assert fleet.engines["P1"].pinned == 1


async def test_encoders_that_the_picker_chooses_encode_for_the_sidecars_turns(tmp_path: Path) -> None:
    # No probe tells of E1's end before a turn has met it.
    settings: dict[str, Any] = {"mode": Mode.TABLE, "encoder": EncoderUse.ALWAYS, "probe_interval_s": 60.0}
    async with carried(tmp_path, "E1 P1 R1", **settings) as (fleet, envoy):
        engine = await fleet.start("D1")
        async with sidecar_before(engine.address, fleet.proxy) as sidecar:
            await fleet.join("D1", engine, sidecar)
            await fleet.settle()
            alone = Chat(fleet, headers={"X-Admin-Key": "operator", "X-PPD-Force-Route": "REPLICA"})
            expected = (await alone.say(asks(picture(1)), max_tokens=20)).text
            before = fleet.engines["E1"].encoder.encoded
            for route, computing in (("SPLIT", "P1"), ("LOCAL", "D1")):
                chat = Chat(envoy, headers={"X-Admin-Key": "operator", "X-PPD-Force-Route": route})
                chat.headers["x-encoder-hosts-ports"] = "10.9.9.9:1"  # which is not heard
                answer = await chat.say(asks(picture(1)), max_tokens=20)
                assert (answer.status, answer.route, answer.text) == (200, route, expected)
                body = json.loads(fleet.engines[computing].received[-1].body)
                assert body["ec_transfer_params"]
                await fleet.until(partial(is_over, fleet, answer.headers["x-request-id"]))
                receipt = fleet.proxy.state.receipts.find(answer.headers["x-request-id"])
                assert receipt is not None and receipt.encoder is not None
                assert receipt.encoder.items == ["image: encoded"]
            assert fleet.engines["E1"].encoder.encoded >= before
            assert engine.counters.encoded_items == fleet.engines["P1"].counters.encoded_items == 0
            await fleet.kill("E1")
            again = await Chat(envoy, headers=chat.headers).say(asks(picture(2)), max_tokens=20)
            here = [each.counters.encoded_items for each in (engine, fleet.engines["P1"])]
            assert (again.status, sum(here)) == (200, 1)
            failed = 'ppd_leg_failures_total{cause="refused",leg="encode",phase="connect"}'
            async with asyncio.timeout(60):
                while not await fleet.metric(failed):
                    await asyncio.sleep(0.05)
            await fleet.until(fleet.idle)


async def test_streams_large_bodies_and_what_is_no_turn(tmp_path: Path) -> None:
    async with carried(tmp_path, "D1", options=SEEN) as (fleet, envoy):
        body = {"model": "sim", "messages": [{"role": "user", "content": LONG}], "stream": True, "max_tokens": 50}
        body["stream_options"] = {"include_usage": True}
        async with fleet.session.post(f"{envoy.base_url}/v1/chat/completions", json=body) as answer:
            text = (await answer.read()).decode()
            assert text.endswith("data: [DONE]\n\n")
        receipt = fleet.proxy.state.receipts.find(answer.headers["x-request-id"])
        assert receipt is not None
        assert (receipt.outcome, receipt.counts_evidence) == ("completed", "usage")
        assert receipt.ttft_s is not None
        large = {"model": "sim", "messages": body["messages"], "max_tokens": 2, "user": "x" * 4_000_000}
        async with fleet.session.post(
            f"{envoy.base_url}/v1/chat/completions",
            data=io.BytesIO(json.dumps(large).encode()),
            headers={"content-type": "application/json"},
        ) as answer:
            assert answer.status == 200, await answer.text()
        async with fleet.session.get(f"{envoy.base_url}/v1/models") as answer:
            assert [each["id"] for each in (await answer.json())["data"]] == ["sim"]


async def test_a_body_that_workers_may_not_see_as_it_came_goes_on_edited(tmp_path: Path) -> None:
    """With another length: Envoy answers 503 itself where the head does not say so."""
    async with carried(tmp_path, "D1") as (fleet, envoy):
        answer = await Chat(envoy).say("hi", kv_transfer_params={"remote_host": "10.9.9.9"})
        assert answer.status == 200
        assert b"10.9.9.9" not in fleet.engines["D1"].received[-1].body


async def test_a_client_that_leaves_ends_its_leg_and_frees_the_books(tmp_path: Path) -> None:
    async with carried(tmp_path, "D1", options=SEEN, engine={"time_scale": 1.0}) as (fleet, envoy):
        body = {"model": "sim", "messages": [{"role": "user", "content": LONG}], "stream": True, "max_tokens": 4000}
        async with fleet.session.post(f"{envoy.base_url}/v1/chat/completions", json=body) as answer:
            await answer.content.readany()
        await fleet.until(fleet.idle)
        receipt = fleet.proxy.state.receipts.newest(1)[0]
        assert receipt.outcome == "broken"
        before = {**body, "stream": False, "seed": 1}
        with pytest.raises(asyncio.TimeoutError):
            async with fleet.session.post(
                f"{envoy.base_url}/v1/chat/completions", json=before, timeout=aiohttp.ClientTimeout(0.3)
            ):
                pass
        await fleet.until(fleet.idle)
        assert fleet.proxy.state.receipts.newest(1)[0].outcome == "cancelled"


async def test_refusals_are_the_proxys_own_and_a_lost_picker_is_told_in_openais_shape(tmp_path: Path) -> None:
    # No probe tells of the engine's end before Envoy has met it: the turn would wait for one that comes back.
    async with carried(tmp_path, "D1", options=SEEN, probe_interval_s=60.0) as (fleet, envoy):
        async with fleet.session.post(
            f"{envoy.base_url}/v1/chat/completions", data=b"{", headers={"content-type": "application/json"}
        ) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["type"], error["code"]) == (400, "invalid_request_error", 400)
        await fleet.kill("D1")
        turn = await Chat(envoy).say("Is anybody there?")
        assert (turn.status, turn.body["error"]["type"]) == (503, "gateway_error")
    folder = tmp_path / "alone"
    folder.mkdir()
    async with carried(folder, "D1") as (fleet, envoy):
        fleet.proxy.state.admission.close_down()
        turn = await Chat(envoy).say("And now?")
        assert (turn.status, turn.headers["x-ppd-refused"], turn.body["error"]["code"]) == (503, "draining", "draining")


async def test_the_health_service_answers_another_librarys_client(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with Fleet.of("D1", picker_port=port) as fleet:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )
            statuses = [
                (await check(HealthCheckRequest(service=each))).status for each in ("", "liveness", "readiness")
            ]
            assert statuses == [1, 1, 1]
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await check(HealthCheckRequest(service="another"))
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
            watch = channel.unary_stream(
                "/grpc.health.v1.Health/Watch",
                request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )(HealthCheckRequest())
            assert (await watch.read()).status == 1
            fleet.proxy.drain.announce()
            assert (await watch.read()).status == 2
            watch.cancel()
