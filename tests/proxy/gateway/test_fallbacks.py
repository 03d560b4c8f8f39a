"""The workers behind the one that is chosen: who is named, and what follows when one of them serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from ppd.proxy.config import Mode
from ppd.proxy.discovery.turn_report import FailedLeg, TurnReport
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.gateway.headers import ATTEMPTS, DESTINATION, LB_NAMESPACE, PREFILLER, SERVED
from ppd.proxy.gateway.workers_file import WorkersFile
from tests.proxy.gateway.envoy import D1, D2, P1, R1, Envoy, chat, mutation, proxy_of
from tests.support.fleet import crowded, has_work

FLEET = (f"P={P1}", f"D={D1}", f"D={D2}", f"R={R1}")
D3 = "10.0.1.3:8000"


def named(envoy: Envoy) -> list[str]:
    return mutation(envoy.answers[-1])[0][DESTINATION].split(",")


@pytest.mark.parametrize(
    ("workers", "mode", "count", "found"),
    [
        (FLEET, Mode.ALWAYS_SPLIT, 3, {D1, D2}),  # an R cannot pull P's KV
        ((*FLEET, f"D={D3},connector=none"), Mode.ALWAYS_SPLIT, 3, {D1, D2}),
        (FLEET[2:], Mode.REPLICA, 1, {R1, D2}),
        (FLEET[2:], Mode.ALWAYS_LOCAL, 3, {D2, R1}),
        ((f"D={D1}",), Mode.ALWAYS_LOCAL, 3, {D1}),
        (FLEET[3:], Mode.REPLICA, 0, {R1}),
    ],
)
async def test_the_next_best_are_named_if_they_can_take_the_same_request(
    workers: tuple[str, ...], mode: Mode, count: int, found: set[str]
) -> None:
    envoy = Envoy(proxy_of(workers, mode=mode, picker_fallbacks=count))
    await envoy.turn()
    assert sorted(named(envoy)) == sorted(found)
    assert envoy.answers[-1].dynamic_metadata[LB_NAMESPACE][DESTINATION] == ",".join(named(envoy))
    envoy.call.lost()


async def served(**told: str) -> tuple[Envoy, str, str]:
    """A SPLIT whose answer begins, and the two workers that were named."""
    envoy = Envoy(proxy_of(FLEET, mode=Mode.ALWAYS_SPLIT, picker_fallbacks=1))
    await envoy.turn(chat(stream=True))
    first, second = named(envoy)
    by = told.pop("by", "") or second
    headers = {":status": "200", "content-type": "text/event-stream", **told}
    envoy.tell("response_headers", headers=headers, metadata={LB_NAMESPACE: {SERVED: by}})
    return envoy, first, second


def is_open(envoy: Envoy, worker: str) -> bool:
    state = envoy.proxy.state
    return worker in state.health.breakers.states(state.now())


async def test_who_serves_has_the_turn_and_who_was_not_reached_is_avoided() -> None:
    envoy, first, second = await served(**{ATTEMPTS: "2"})
    views = {view.id: view for view in envoy.proxy.state.registry.views()}
    assert (has_work(views[WorkerId(first)]), has_work(views[WorkerId(second)])) == (False, True)
    told, _ = mutation(envoy.answers[-1], "response_headers")
    receipt = envoy.receipt
    assert (told["x-ppd-decode"], told["x-ppd-reason"]) == (views[WorkerId(second)].name, "next_best")
    assert (receipt.route, receipt.prefill, receipt.error) == ("SPLIT", "P1", None)
    assert [(leg.address, leg.error) for leg in receipt.legs] == [(first, "refused"), (second, None)]
    assert (is_open(envoy, first), is_open(envoy, second), is_open(envoy, P1)) == (True, False, False)
    envoy.call.half_closed()
    assert (receipt.outcome, envoy.is_idle) == ("completed", True)


async def test_who_was_not_even_asked_is_not_blamed() -> None:
    envoy, first, _ = await served(**{ATTEMPTS: "1"})
    assert not is_open(envoy, first)
    assert envoy.receipt.legs[0].error is None
    envoy.call.lost()


async def test_who_serves_was_asked_after_the_first_worker() -> None:
    """So what it does counts, also where it has recovered since the turn was sent."""
    envoy = Envoy(proxy_of(FLEET, mode=Mode.ALWAYS_SPLIT, picker_fallbacks=1))
    await envoy.turn(chat(stream=True))
    state, second = envoy.proxy.state, WorkerId(named(envoy)[1])
    state.registry.recovered(second, state.now())
    headers = {":status": "200", "content-type": "text/event-stream", ATTEMPTS: "2"}
    envoy.tell("response_headers", headers=headers, metadata={LB_NAMESPACE: {SERVED: second}})
    envoy.tell("response_body", body=b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', end_of_stream=True)
    assert envoy.receipt.outcome == "broken"
    assert state.health.breakers.circuits[second].failures == 1


async def test_the_times_that_who_serves_reports_are_behind_those_of_the_first_worker() -> None:
    """Its first token came with its head, whose time is known; when it was asked is not."""
    envoy, _, _ = await served(**{ATTEMPTS: "2"})
    report = TurnReport(request_id=envoy.receipt.id, route="SPLIT", outcome="completed", status=200, ended_s=9.0)
    envoy.reports.taken(replace(report, prompt_tokens=9, completion_tokens=3, first_token_s=5.0, last_token_s=8.0))
    receipt = envoy.receipt
    assert receipt.ttft_s is not None and receipt.legs[-1].first_event_s is not None
    assert 0.0 < receipt.ttft_s <= receipt.legs[-1].first_event_s
    assert receipt.tpot_s == pytest.approx(1.5)


@pytest.mark.parametrize("by", ["10.9.9.9:1", P1, "garbage"])
async def test_a_server_that_cannot_have_answered_changes_nothing(by: str) -> None:
    envoy, first, _ = await served(by=by)
    assert [leg.address for leg in envoy.receipt.legs] == [first]
    assert envoy.receipt.reason != "next_best"
    envoy.call.lost()


async def test_a_p_that_cannot_hand_over_to_who_serves_has_no_part() -> None:
    envoy, _, _ = await served(by=R1)
    assert (envoy.receipt.route, envoy.receipt.prefill) == ("REPLICA", "")
    assert mutation(envoy.answers[1])[0][PREFILLER] == P1
    envoy.call.half_closed()
    assert envoy.is_idle


@pytest.mark.parametrize("when", ["before the head", "after the head"])
async def test_a_report_of_who_could_not_serve_is_not_the_turns_end(when: str) -> None:
    gone = FailedLeg("decode", D1, "connect", "refused")
    report = TurnReport(request_id="", route="SPLIT", outcome="failed", status=503, failed_legs=[gone], ended_s=0.1)
    envoy = Envoy(proxy_of(FLEET, mode=Mode.ALWAYS_SPLIT, picker_fallbacks=1))
    await envoy.turn()
    first, second = named(envoy)
    head = {":status": "200", ATTEMPTS: "2"}
    for step in (0, 1) if when == "before the head" else (1, 0):
        if step == 0:
            envoy.reports.taken(replace(report, request_id=envoy.receipt.id))
        else:
            envoy.tell("response_headers", headers=head, metadata={LB_NAMESPACE: {SERVED: second}})
    assert envoy.receipt.outcome == "running"
    assert (is_open(envoy, first), is_open(envoy, second)) == (True, False)
    whole = replace(report, request_id=envoy.receipt.id, outcome="completed", status=200, failed_legs=[])
    envoy.reports.taken(replace(whole, prompt_tokens=9, completion_tokens=1))
    assert (envoy.receipt.outcome, envoy.receipt.prompt_tokens, envoy.is_idle) == ("completed", 9, True)


@pytest.mark.parametrize("has_head", [True, False])
async def test_a_report_before_the_head_waits_for_who_it_is_of(has_head: bool) -> None:
    envoy = Envoy(proxy_of(FLEET, mode=Mode.ALWAYS_SPLIT, picker_fallbacks=1))
    await envoy.turn()
    first, second = named(envoy)
    request_id = envoy.receipt.id
    whole = TurnReport(request_id=request_id, route="SPLIT", outcome="completed", status=200, ended_s=0.1)
    envoy.reports.taken(replace(whole, prompt_tokens=9, completion_tokens=1))
    assert envoy.receipt.outcome == "running"
    if has_head:
        envoy.tell("response_headers", headers={":status": "200"}, metadata={LB_NAMESPACE: {SERVED: second}})
    else:  # Envoy itself has gone
        envoy.call.lost()
    assert (envoy.receipt.outcome, envoy.receipt.prompt_tokens, envoy.is_idle) == ("completed", 9, True)
    assert envoy.receipt.legs[-1].address == (second if has_head else first)


# -- the file


def listed(path: Path) -> list[tuple[str, int]]:
    (assignment,) = json.loads(path.read_text())["resources"]
    found = [each["endpoint"]["address"]["socket_address"] for each in assignment["endpoints"][0]["lb_endpoints"]]
    return [(each["address"], each["port_value"]) for each in found]


async def test_the_file_says_who_speaks_tls_and_holds_nobody_who_does_not_answer(tmp_path: Path) -> None:
    registry = proxy_of((f"P={P1}", f"E={D2}", f"D={D1},tls=true", f"R={R1}")).state.registry
    path = tmp_path / "workers.json"
    WorkersFile(path, registry).open()
    (assignment,) = json.loads(path.read_text())["resources"]
    found = assignment["endpoints"][0]["lb_endpoints"]
    told = {"filter_metadata": {"envoy.transport_socket_match": {"tls": True}}}
    assert [each.get("metadata") for each in found] == [told, None]  # D1 and R1


async def test_the_file_holds_d_and_r_by_address_and_is_replaced_when_they_change(tmp_path: Path) -> None:
    registry = proxy_of((*FLEET, "R=[fd00::1]:8000", "R=by-name:8000", "E=10.0.3.1:8000")).state.registry
    path = tmp_path / "workers.json"
    file = WorkersFile(path, registry)
    file.open()
    assert listed(path) == [("10.0.1.1", 8000), ("10.0.1.2", 8000), ("10.0.2.1", 8000), ("fd00::1", 8000)]
    before = path.stat().st_ino
    file.look()
    assert path.stat().st_ino == before
    registry.remove(WorkerId(D2))
    file.look()
    assert ("10.0.1.2", 8000) not in listed(path)


async def test_a_file_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"picker_workers_file = .*missing.*: must be a file that can be written"):
        WorkersFile(tmp_path / "missing" / "workers.json", proxy_of(()).state.registry).open()


async def test_a_p_may_be_named_too_where_p_answer() -> None:
    """Envoy then goes to P's engine, which has no sidecar before it and needs none."""
    settings = {"mode": Mode.SLO, "profile": "h100-llama-3.1-8b", "prefills_answer": True, "picker_fallbacks": 0}
    envoy = Envoy(proxy_of(FLEET[:2], **settings))
    with crowded(envoy.proxy, WorkerId(D1)):
        await envoy.turn(chat(stream=True))
        assert named(envoy) == [P1]
        assert PREFILLER not in mutation(envoy.answers[-1])[0]
        envoy.tell("response_headers", headers={":status": "200", "content-type": "text/event-stream"})
        envoy.call.half_closed()
    receipt = envoy.receipt
    assert (receipt.route, receipt.decode, receipt.prefill, receipt.outcome) == ("REPLICA", "P1", "", "completed")
    assert envoy.is_idle
