"""Metrics, receipts and the access log tell the same of each turn, whatever happens to it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ppd.proxy.admission.keys import Client, encode, hash_of
from ppd.proxy.cli.why_view import told
from ppd.proxy.config import AccessFormat, Mode
from ppd.proxy.telemetry.receipts import Receipt
from ppd.servers.sim.core.fault_orders import FaultKind, FaultPhase, Faults, Order
from tests.metric_names import bare, documented
from tests.support.fleet import Fleet

TALKERS, TURNS = 8, 12
CHAT = "/v1/chat/completions"
KEY_PREFIX = "ppd_"
SETTINGS: dict[str, Any] = {
    "mode": Mode.TABLE,
    "receipts_kept": 10_000,
    "access_log": AccessFormat.JSON,
    "first_event_timeout_s": 0.5,
    "prefill_timeout_s": 0.5,
    "answer_timeout_s": 1.0,
    "queue_timeout_s": 0.5,
    "max_inflight": 6,
    "queue_limit": 2,
    "breaker_open_s": 0.1,
}
HOSTILE = ('"', "a\nb", "\u202e<b>&", "\x1b[31m\x9b1m", "[red]", "x" * 200, "x" * 300, "{{$value}}")
MANY = 1000
FAULTS = (
    Faults(),
    Faults(refuse=MANY),
    Faults(refuse=MANY, refuse_status=500),
    Faults(cut=MANY, cut_after_events=3),
    Faults(garbage=MANY),
    Faults(hang=2),
    Faults([Order(FaultKind.ERROR, phase=FaultPhase.EVENTS, after_events=2, times=MANY)]),
    Faults([Order(FaultKind.HANDOFF, times=MANY)]),
    Faults([Order(FaultKind.LOAD, times=MANY)]),
    Faults([Order(FaultKind.ABORT, phase=FaultPhase.HEAD, times=MANY)]),
)
Labels = tuple[tuple[str, str], ...]
Totals = dict[str, dict[Labels, float]]


async def talk(fleet: Fleet, draw: Random) -> None:
    messages: list[dict[str, Any]] = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": f"{draw.random()} " * draw.randint(1, 60)})
        stream, stays = draw.random() < 0.6, draw.random() < 0.85
        model = "sim" if draw.random() < 0.9 else draw.choice(HOSTILE)
        body = {"model": model, "messages": messages, "max_tokens": draw.randint(1, 40), "stream": stream}
        if draw.random() < 0.1:
            body["max_tokens"] = -1
        with suppress(aiohttp.ClientError):
            async with fleet.session.post(fleet.base_url + CHAT, json=body) as answer:
                if stays:
                    await answer.read()
                else:
                    await answer.content.read(1)
        if draw.random() < 0.3:
            messages = []


async def spoil(fleet: Fleet, draw: Random) -> None:
    while True:
        draw.choice(list(fleet.engines.values())).faults = draw.choice(FAULTS)
        await asyncio.sleep(0.05)


async def counted(fleet: Fleet) -> Totals:
    async with fleet.session.get(f"{fleet.base_url}/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    found: Totals = defaultdict(dict)
    for sample in (sample for one in families for sample in one.samples):
        found[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return found


def expected(receipts: Iterable[Receipt]) -> Totals:
    """What metrics must be, by the receipts of all turns."""
    sums: dict[str, Counter[Labels]] = defaultdict(Counter)

    def add(name: str, by: float, **labels: str) -> None:
        sums[name][tuple(sorted(labels.items()))] += by  # type: ignore[assignment]

    def spread(name: str, seconds: float, **labels: str) -> None:
        add(f"{name}_count", 1, **labels)
        add(f"{name}_sum", seconds, **labels)

    for one in receipts:
        route = one.route or "none"
        add("ppd_turns_total", 1, route=route, reason=one.reason or "none")
        add("ppd_turn_outcomes_total", 1, route=route, outcome=one.outcome)
        if one.prompt_tokens is not None:
            add("ppd_prompt_tokens_total", one.prompt_tokens, route=route)
            add("ppd_cached_tokens_total", one.cached_tokens or 0, route=route)
            add("ppd_completion_tokens_total", one.completion_tokens or 0, route=route)
        if one.ttft_s is not None:
            spread("ppd_ttft_seconds", one.ttft_s, route=route)
        if one.tpot_s is not None:
            spread("ppd_tpot_seconds", one.tpot_s, route=route)
        for leg in one.legs:
            assert leg.ended_s is not None
            spread("ppd_leg_seconds", leg.ended_s - leg.started_s, leg=leg.kind)
            if leg.error is not None and leg.phase is not None:
                add("ppd_leg_failures_total", 1, leg=leg.kind, phase=leg.phase, cause=leg.error)
    return {name: dict(counts) for name, counts in sums.items()}


def differences(wanted: Totals, found: Totals) -> Iterator[str]:
    for name, counts in wanted.items():
        for labels in {*counts, *found[name]}:
            told_of, there = counts.get(labels, 0), found[name].get(labels, 0)
            if there != pytest.approx(told_of):
                yield f"{name}{dict(labels)}: {told_of} by receipts, {there} in the metrics"


OUTCOMES = {"cancelled": "left"}  # the access log's word, where it is another


def check_line(receipt: Receipt, line: dict[str, Any]) -> None:
    outcome = OUTCOMES.get(receipt.outcome, receipt.outcome)
    if receipt.outcome == "cancelled":  # 499 is for turns; the client may have seen the beginning of an answer
        assert line["status"] in (200, 499)
    else:
        assert line["status"] == receipt.status
    workers = [leg.worker for leg in receipt.legs]
    shown = (line["outcome"], line.get("route", ""), line.get("workers", []), line.get("completion_tokens"))
    assert shown == (outcome, receipt.route, workers, receipt.completion_tokens)


@pytest.mark.parametrize("seed", range(3))
async def test_all_records_of_a_spoilt_fleet_agree(
    seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "receipts"
    settings = {"engine": {"time_scale": 0.05, "shutdown_s": 0.05}, "receipt_log": str(written), **SETTINGS}
    async with Fleet.of("P1 P2 D1 D2 R1", **settings) as fleet:
        spoiling = asyncio.create_task(spoil(fleet, Random(seed)))
        await asyncio.gather(*(talk(fleet, Random(f"{seed}/{number}")) for number in range(TALKERS)))
        spoiling.cancel()
        await asyncio.wait({spoiling})
        admission = fleet.proxy.state.admission
        await fleet.until(lambda: not (admission.inside or admission.waiting or fleet.proxy.handoff_release._tasks))
        receipts = fleet.proxy.state.receipts.newest(10_000)
        found = await counted(fleet)
        assert not list(differences(expected(receipts), found))
        labels = {
            (bare(name), tuple(label for label, _ in one if label != "le")) for name in found for one in found[name]
        }
        assert {(name, tuple(sorted(documented().get(name, ())))) for name, _ in labels} == labels
        assert len({one.outcome for one in receipts}) >= 3, "so much has happened"
        for engine in fleet.engines.values():
            engine.counters.traps.clear()
    logged = map(msgspec.json.Decoder(Receipt).decode, written.read_bytes().splitlines())
    assert {one.id: one for one in logged} == {one.id: one for one in receipts}
    lines = {line["id"]: line for line in map(json.loads, capfd.readouterr().out.splitlines()) if "id" in line}
    for one in receipts:
        check_line(one, lines[one.id])
        assert list(told(one, 80))


async def test_requests_outside_of_sessions_count_by_what_their_clients_got() -> None:
    got: Counter[Labels] = Counter()
    async with Fleet.of("R1", mode=Mode.REPLICA, queue_timeout_s=0.1, body_limit_bytes=20_000) as fleet:

        async def ask(path: str, body: Any) -> None:
            answer = await fleet.post(path, body)
            got[("endpoint", path.replace("resp_none", "{response_id}")), ("status", str(answer.status))] += 1

        for _ in range(2):
            await ask("/v1/embeddings", {"model": "sim", "input": "x"})
        await ask("/v1/embeddings", {"model": "none", "input": "x"})
        await ask("/v1/embeddings", [1])
        await ask("/v1/embeddings", {"model": "sim", "input": "x" * 30_000})
        await ask("/v1/responses/resp_none/cancel", {"x": "x" * 30_000})
        await ask("/v1/responses/resp_none/cancel", {})
        await fleet.kill("R1")
        await ask("/v1/embeddings", {"model": "sim", "input": "x"})
        assert len(got) >= 7
        assert (await counted(fleet))["ppd_passthrough_requests_total"] == got


async def test_a_receipt_tells_of_each_wait_in_the_queue() -> None:
    """Also of those after a decision: the only worker says that it is busy, and is asked again a little later."""
    async with Fleet.of("R1", mode=Mode.REPLICA) as fleet:
        fleet.engines["R1"].faults = Faults(refuse=1)
        receipt = await fleet.receipt(await fleet.conversation().say("hi"))
        assert [leg["error"] for leg in receipt["legs"]] == ["overloaded", None]
        assert receipt["waited_s"] == pytest.approx(await fleet.metric("ppd_queue_wait_seconds_sum"), rel=0.2)


async def test_what_is_refused_before_it_is_a_turn_counts_by_its_status(tmp_path: Path) -> None:
    key, limited = KEY_PREFIX + "a" * 43, KEY_PREFIX + "b" * 43
    clients = (Client(name="a", tenant="a"), key), (Client(name="b", tenant="b", requests_per_minute=1), limited)
    (tmp_path / "keys.toml").write_text("\n".join(encode(client, hash_of(secret)) for client, secret in clients))
    settings: dict[str, Any] = {"mode": Mode.REPLICA, "body_limit_bytes": 20_000, "queue_timeout_s": 0.1}
    got: Counter[str] = Counter()
    async with Fleet.of("R1", keys_file=str(tmp_path / "keys.toml"), **settings) as fleet:

        async def ask(body: Any, secret: str = key, path: str = CHAT) -> None:
            got[str((await fleet.post(path, body, {"Authorization": f"Bearer {secret}"})).status)] += 1

        chat = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        for body in (chat, [1], chat | {"max_tokens": -1}, chat | {"model": "none"}, chat | {"user": "x" * 30_000}):
            await ask(body)
        for secret in ("wrong", limited, limited, limited):
            await ask(chat, secret)
        await ask({"model": "sim", "prompt": ["a", "b"]}, limited, "/v1/completions")
        fleet.engines["R1"].faults = Faults(refuse=MANY, refuse_status=500)
        await ask({"model": "sim", "prompt": ["a", "b"]}, path="/v1/completions")
        found = await counted(fleet)
    turns: Counter[str] = Counter({"200": 2, "404": 1, "502": 1})
    assert set(got) == {"200", "400", "401", "404", "413", "429", "502"}
    assert found["ppd_rejected_requests_total"] == {
        (("status", status),): count for status, count in (got - turns).items()
    }
    assert sum(found["ppd_turn_outcomes_total"].values()) == turns.total() + 1, "of a list of two each prompt is a turn"
