"""What a sidecar's report makes of a turn, before, after and instead of what Envoy tells."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.app.client_routes import create_app
from ppd.proxy.discovery.turn_report import FailedLeg, TurnReport, decode, is_report
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.gateway import picked_turn
from ppd.proxy.gateway.headers import TURN
from ppd.proxy.gateway.picking import PickerCall
from ppd.proxy.gateway.reports import KNOWN_LIMIT, LATE_LIMIT, Reports
from ppd.proxy.gateway.server import Gateway
from ppd.proxy.telemetry.receipts import Receipt
from tests.proxy.gateway.envoy import D1, D2, P1, R1, Envoy, chat, mutation, proxy_of
from tests.support.processes import Pair, worker

WHOLE = TurnReport(
    request_id="",
    route="SPLIT",
    prefill=P1,
    outcome="completed",
    status=200,
    prompt_tokens=900,
    completion_tokens=20,
    prefill_cached_tokens=128,
    first_token_s=0.25,
    last_token_s=0.63,
    ended_s=0.7,
)
HEAD = {":status": "200", "content-type": "text/event-stream"}


async def picked(**changes: Any) -> tuple[Envoy, TurnReport]:
    """A turn that is under way, and the report that its sidecar would send."""
    envoy = Envoy(
        changes.pop("proxy", None) or proxy_of(mode="always_split"), reports=changes.pop("reports", Reports())
    )
    await envoy.turn(chat(stream=True))
    return envoy, replace(WHOLE, request_id=envoy.receipt.id, **changes)


def end(envoy: Envoy) -> None:
    envoy.tell("response_headers", headers=HEAD)
    envoy.call.half_closed()


@pytest.mark.parametrize("when", ["before the head", "before the end", "after the end"])
async def test_a_report_is_learnt_from_whenever_it_comes(when: str) -> None:
    envoy, report = await picked()
    envoy.reports.taken(replace(report, request_id="another"))
    assert envoy.receipt.outcome == "running"
    receipt = envoy.receipt
    envoy.reports.missed("earlier", "turn", WorkerId(receipt.legs[0].address))
    envoy.reports.taken(replace(report, request_id="earlier"))  # so this worker's sidecar reports
    if when == "before the head":
        envoy.reports.taken(report)
    envoy.tell("response_headers", headers=HEAD)
    if when == "before the end":
        envoy.reports.taken(report)
    envoy.call.half_closed()
    if when == "after the end":
        assert (receipt.outcome, envoy.is_idle) == ("running", True)
        envoy.reports.taken(report)
    assert (receipt.outcome, receipt.counts_evidence) == ("completed", "report")
    assert (receipt.prompt_tokens, receipt.completion_tokens, receipt.cached_tokens) == (900, 20, 128)
    assert receipt.tpot_s == pytest.approx(0.02)
    assert envoy.is_idle
    assert not envoy.reports._open
    envoy.reports.taken(report)  # once more
    again = Envoy(envoy.proxy)
    await again.turn(chat(stream=True))
    assert (again.receipt.kind, again.receipt.estimated_prompt_tokens) == ("retry", 900)
    again.call.lost()


async def test_a_leg_that_is_open_ends_with_its_turn() -> None:
    """In the receipt, which is logged then, and in the metrics, which count the leg when it is closed."""
    envoy, report = await picked()
    envoy.reports.taken(report)
    end(envoy)
    [leg] = envoy.receipt.legs
    assert leg.ended_s is not None
    assert leg.ended_s == envoy.receipt.ended_s
    took_s = envoy.proxy.state.metrics.registry.get_sample_value("ppd_leg_seconds_sum", {"leg": leg.kind})
    assert took_s == leg.ended_s - leg.started_s


async def test_who_has_reported_late_is_waited_for_the_next_time_and_no_longer_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(picked_turn, "REPORTED_S", 0.0)
    envoy, report = await picked()
    end(envoy)
    assert (envoy.receipt.outcome, envoy.receipt.counts_evidence) == ("completed", "estimate"), (
        "nobody has reported yet"
    )
    envoy.reports.taken(report)  # too late for this turn
    assert envoy.receipt.prompt_tokens is None
    later, report = await picked(proxy=envoy.proxy, reports=envoy.reports)
    end(later)
    assert (later.receipt.outcome, later.is_idle) == ("running", True)
    await later.settled()
    assert (later.receipt.outcome, later.receipt.counts_evidence) == ("completed", "estimate")
    counts = [sample.value for metric in envoy.reports.gauges() for sample in metric.samples]
    assert counts == [0, 1, 0, 0]


def test_few_turns_are_remembered_that_no_report_came_for() -> None:
    reports = Reports()
    for number in range(2 * LATE_LIMIT):
        reports.missed(str(number), "turn", WorkerId("a:1"))
    assert list(reports._ended) == [str(number) for number in range(LATE_LIMIT, 2 * LATE_LIMIT)]


@pytest.mark.parametrize(
    ("changes", "outcome", "error", "counted"),
    [
        (
            {"outcome": "failed", "status": 502, "failure": "decode headers: reset"},
            "failed",
            "decode headers: reset",
            True,
        ),
        ({"outcome": "cancelled", "status": 499}, "cancelled", None, True),
        ({"outcome": "broken", "failure": "decode mid_stream: reset"}, "broken", "decode mid_stream: reset", True),
        ({"prompt_tokens": None}, "completed", None, False),
    ],
)
async def test_what_else_may_have_become_of_it(
    changes: dict[str, Any], outcome: str, error: str | None, counted: bool
) -> None:
    envoy, report = await picked(**changes)
    envoy.reports.taken(report)
    assert (envoy.receipt.outcome, envoy.receipt.error) == (outcome, error)
    assert envoy.receipt.counts_evidence == ("report" if counted else "estimate")
    assert envoy.is_idle
    envoy.call.lost()
    assert envoy.receipt.outcome == outcome


@pytest.mark.parametrize(
    ("failed", "opened"),
    [
        (FailedLeg("prefill", P1, "connect", "refused"), P1),
        (FailedLeg("prefill", "10.9.9.9:1", "connect", "refused"), None),  # none of ours
        (FailedLeg("decode", "127.0.0.1:8200", "connect", "refused"), ""),  # the worker that this turn was sent to
        (FailedLeg("decode", D1, "of another", "version"), None),
    ],
)
async def test_legs_that_failed_count_against_their_workers(failed: FailedLeg, opened: str | None) -> None:
    proxy = proxy_of(mode="always_split", breaker_failures=1)
    envoy, report = await picked(proxy=proxy, failed_legs=[failed], outcome="failed", status=400)
    envoy.reports.taken(report)
    states = proxy.state.health.breakers.states(proxy.state.now())
    wanted = envoy.receipt.legs[0].address if opened == "" else opened
    assert [key for key in states if key in (P1, D1, D2)] == ([] if wanted is None else [wanted])


async def test_what_a_replica_computes_is_called_so_whatever_its_sidecar_calls_it() -> None:
    """A sidecar does not know whether its engine is a D or an R: all that it computes alone is local there."""
    proxy = proxy_of((f"R={R1}",))
    failed = [FailedLeg("local", "127.0.0.1:8200", "mid_stream", "reset")]
    envoy, report = await picked(
        proxy=proxy, route="LOCAL", prefill="", outcome="broken", failure="local mid_stream: reset", failed_legs=failed
    )
    envoy.reports.taken(report)
    assert (envoy.receipt.route, envoy.receipt.error) == ("REPLICA", "replica mid_stream: reset")
    counted = list(proxy.state.metrics.failures._metrics)
    assert counted == [("replica", "mid_stream", "reset")]


def test_reports_are_told_from_heartbeats() -> None:
    assert is_report(WHOLE.encode())
    assert decode(WHOLE.encode()) == WHOLE
    assert not is_report(b"")
    assert not is_report(b"\x82\xa7version\x01\xa4kind\xabturn_report")  # its kind is not first: refused as a heartbeat


TwoProcesses = tuple[Pair, list[Gateway]]


@pytest.fixture
async def two() -> AsyncIterator[TwoProcesses]:
    """Of one picker, which know the same workers."""
    pair = Pair()
    try:
        await pair.join()
        for one in pair.ones:
            worker(one.state.registry)
        yield pair, [Gateway(one, create_app(one)) for one in pair.ones]
    finally:
        await pair.hush()
        pair.close()


@pytest.mark.parametrize("decided_by", [0, 1])
async def test_a_report_reaches_the_process_that_decided_the_turn(two: TwoProcesses, decided_by: int) -> None:
    pair, gateways = two
    envoy, report = await picked(proxy=pair.ones[decided_by], reports=gateways[decided_by].reports)
    listened = pair.ones[0].listener.on_report
    assert listened is not None
    listened(replace(report, route="REPLICA", prefill=""))
    listened(replace(report, request_id="nobody's"))
    pair.ones[1 - decided_by].membership.catch_up()
    pair.ones[decided_by].membership.catch_up()
    assert (envoy.receipt.outcome, envoy.receipt.prompt_tokens) == ("completed", 900)
    results = {one.labels["result"]: one.value for one in gateways[0].reports.gauges()[0].samples}
    assert results == {"taken": 1.0 - decided_by, "late": 0.0, "unknown": 0.0, "passed_on": 1.0 + decided_by}


async def test_a_report_of_an_id_that_two_processes_know_is_of_the_turn_whose_sidecar_sends_it(
    two: TwoProcesses,
) -> None:
    """Clients choose ids. All reports come to the first process here."""
    pair, gateways = two
    envoys = [Envoy(gateway._proxy, reports=gateway.reports) for gateway in gateways]
    for envoy in envoys:
        await envoy.turn(chat(stream=True), headers={"x-request-id": "same"})
    listened = pair.ones[0].listener.on_report
    assert listened is not None
    report = replace(WHOLE, request_id="same", turn_id=sent_turn_id(envoys[1]), route="REPLICA", prefill="")
    listened(report)
    pair.ones[1].membership.catch_up()
    assert [envoy.receipt.outcome for envoy in envoys] == ["running", "completed"]
    listened(replace(report, turn_id=sent_turn_id(envoys[0])))
    assert [envoy.receipt.outcome for envoy in envoys] == ["completed"] * 2


async def test_of_turns_that_share_an_id_each_has_its_own_report() -> None:
    reports = Reports()
    first, second, receipts = await two_of_one_id(reports)
    report = replace(WHOLE, request_id="same", turn_id=sent_turn_id(second))
    reports.taken(report)
    assert [receipt.outcome for receipt in receipts] == ["running", "completed"]
    reports.taken(report)  # once more
    reports.taken(replace(report, turn_id="another picker's"))
    assert receipts[0].outcome == "running"
    reports.taken(replace(report, turn_id=sent_turn_id(first)))
    assert [receipt.counts_evidence for receipt in receipts] == ["report"] * 2
    assert not reports._open


def test_a_late_report_of_another_turn_with_the_same_id_tells_nothing_of_this_one() -> None:
    reports = Reports()
    reports.missed("same", "turn", WorkerId(D1))
    reports.taken(replace(WHOLE, request_id="same", turn_id="another picker's"))
    assert not reports.comes_from(WorkerId(D1))
    reports.taken(replace(WHOLE, request_id="same", turn_id="turn"))
    assert reports.comes_from(WorkerId(D1))


async def two_of_one_id(reports: Reports) -> tuple[Envoy, Envoy, list[Receipt]]:
    """Two turns under way, and their receipts."""
    first = Envoy(proxy_of(mode="always_split"), reports=reports)
    second = Envoy(first.proxy, reports=reports)
    for envoy, seed in ((first, 0), (second, 1)):
        await envoy.turn(chat(stream=True, seed=seed), headers={"x-request-id": "same"})
    receipts = []
    for envoy in (first, second):
        assert isinstance(envoy.call, PickerCall) and envoy.call._caller is not None
        receipts.append(envoy.call._caller.receipt)
    return first, second, receipts


def sent_turn_id(envoy: Envoy) -> str:
    sent, _ = mutation(envoy.answers[-1])
    return sent[TURN]


async def test_a_report_of_a_shared_id_by_a_sidecar_that_names_no_turn_counts_for_none_of_them() -> None:
    """By the other turn's counts a session would be believed to hold what it does not."""
    reports = Reports()
    first, second, receipts = await two_of_one_id(reports)
    reports.taken(replace(WHOLE, request_id="same"))
    assert [receipt.outcome for receipt in receipts] == ["running"] * 2
    end(first)
    reports.taken(replace(WHOLE, request_id="same"))  # it may be of either still
    end(second)
    assert [receipt.outcome for receipt in receipts] == ["completed"] * 2
    assert "report" not in [receipt.counts_evidence for receipt in receipts]
    assert not reports._open


def test_sidecars_that_report_for_the_first_time_are_known_however_many_there_were() -> None:
    reports = Reports()
    for number in range(KNOWN_LIMIT + 1):
        at = WorkerId(f"10.0.0.{number}:80")
        reports.missed("earlier", "turn", at)
        reports.taken(replace(WHOLE, request_id="earlier", turn_id="turn"))
        assert reports.comes_from(at)
    assert len(reports._known) == KNOWN_LIMIT
