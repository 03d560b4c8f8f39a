"""The doctor's checks, as tables of (facts, findings), and the order in which they speak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ppd.proxy import doctor, doctor_conversation, doctor_fleet
from ppd.proxy.doctor import (
    CHECKS,
    Check,
    admin_api_is_on,
    config_is_valid,
    examine,
    exit_code,
    heartbeats_are_guarded,
    is_loopback,
    ports_are_free,
    proxy_answers,
    table_can_be_used,
)
from ppd.proxy.doctor_conversation import (
    follow_ups_hit_the_cache,
    handoff_works,
    nothing_is_lost,
    prefill_computes,
    turns_are_answered,
)
from ppd.proxy.doctor_fleet import (
    connectors_agree,
    connectors_are_known,
    models_are_shared,
    prefix_caching_is_on,
    versions_agree,
    ways_to_serve,
    workers_answer,
)
from ppd.proxy.doctor_values import (
    ConfigFact,
    Conversation,
    Counts,
    Facts,
    Finding,
    Level,
    PortFact,
    ProxyFact,
    TurnFact,
    WorkerFact,
)
from ppd.proxy.workers import Role, Worker

OK, WARN, FAIL, SKIP = Level
Said = list[tuple[Level, str]]  # a level, and words that the message must hold


def worker(name: str, **changes: Any) -> WorkerFact:
    """A healthy worker; `changes` are of the fact, or of the worker itself."""
    own = {key: changes.pop(key) for key in list(changes) if key in Worker.__dataclass_fields__}
    made = Worker(
        **{"role": Role(name[0]), "address": f"{name.lower()}:1", "models": ("m",), "engine_version": "0.33.0"} | own
    )
    return WorkerFact(name=name, worker=made, **changes)


P1, D1, R1 = worker("P1"), worker("D1"), worker("R1")
PROXY = ProxyFact(address="proxy:1", ready_status=200, ways=("split",), admin_status=200, mode="table")


def fleet(*workers: WorkerFact, **facts: Any) -> Facts:
    return Facts(workers=workers, **facts)


def config(**changes: Any) -> Facts:
    return Facts(config=ConfigFact(**changes))


def check_said(check: Check, facts: Facts, expected: Said) -> None:
    found = list(check(facts))
    assert [finding.level for finding in found] == [level for level, _ in expected], found
    for finding, (_, words) in zip(found, expected, strict=True):
        assert words in finding.message
    assert_actionable(found)


def assert_actionable(findings: list[Finding]) -> None:
    """Every failure and warning says what to do, in one sentence."""
    for finding in findings:
        if finding.level in (WARN, FAIL):
            assert finding.remedy.rstrip().endswith(".")


# -- a config


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Facts(config_error="w_ttft = -1: must be a number of at least 0"), [(FAIL, "w_ttft = -1")]),
        (config(), [(OK, "valid")]),
        (Facts(proxy=PROXY), []),
    ],
)
def test_config(facts: Facts, expected: Said) -> None:
    check_said(config_is_valid, facts, expected)


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ([("port", 10001, "")], [(OK, "h:10001 is free")]),
        ([("port", 10001, "Address already in use")], [(FAIL, "h:10001 can't be bound (Address already in use)")]),
        ([("port", 0, ""), ("heartbeat_port", 0, "")], [(SKIP, "any free port"), (SKIP, "off")]),
        (
            [("port", 7, ""), ("heartbeat_port", 7, "")],
            [(OK, "free"), (OK, "free"), (FAIL, "port and heartbeat_port are both 7")],
        ),
    ],
)
def test_ports(ports: list[tuple[str, int, str]], expected: Said) -> None:
    facts = config(ports=tuple(PortFact(key, "h", port, error) for key, port, error in ports))
    check_said(ports_are_free, facts, expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"table": "t", "table_cells": 150}, [(OK, "t, 150 cells")]),
        ({"table": "t", "table_cells": 0}, [(WARN, "t holds no evidence")]),
        ({"table_error": "no table 't'"}, [(FAIL, "no table 't'")]),
        ({"mode": "always_local", "table_error": "no table 't'"}, [(SKIP, "always_local")]),
    ],
)
def test_table(changes: dict[str, Any], expected: Said) -> None:
    check_said(table_can_be_used, config(**changes), expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"heartbeat_port": 0, "heartbeat_host": "0.0.0.0"}, []),
        ({"heartbeat_port": 1, "heartbeat_host": "127.0.0.1"}, [(OK, "only from this machine")]),
        ({"heartbeat_port": 1, "heartbeat_host": "0.0.0.0"}, [(WARN, "anyone who reaches 0.0.0.0:1")]),
        ({"heartbeat_port": 1, "heartbeat_host": "10.0.0.1", "has_allow_list": True}, [(OK, "heartbeat_allow")]),
        ({"heartbeat_port": 1, "heartbeat_host": "*", "has_curve": True}, [(WARN, "by vLLM's ping")]),
        ({"heartbeat_port": 0, "curve_error": "no certificate"}, [(FAIL, "no certificate")]),
    ],
)
def test_heartbeats(changes: dict[str, Any], expected: Said) -> None:
    check_said(heartbeats_are_guarded, config(**changes), expected)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("0.0.0.0", False), ("*", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


# -- a proxy


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (config(has_admin_key=True), [(OK, "on")]),
        (config(has_admin_key=False), [(OK, "off, as admin_key is empty")]),
        (Facts(proxy=PROXY), [(OK, "answers")]),
        (Facts(proxy=replace(PROXY, admin_status=401)), [(FAIL, "missing or wrong")]),
        (Facts(proxy=replace(PROXY, admin_status=404)), [(WARN, "off")]),
        (Facts(proxy=replace(PROXY, admin_status=500)), [(FAIL, "500")]),
        (Facts(proxy=replace(PROXY, admin_status=0)), [(FAIL, "did not answer")]),
        (Facts(proxy=replace(PROXY, error="refused", admin_status=0)), []),
    ],
)
def test_admin_api(facts: Facts, expected: Said) -> None:
    check_said(admin_api_is_on, facts, expected)


@pytest.mark.parametrize(
    ("proxy", "expected"),
    [
        (PROXY, [(OK, "proxy:1 answers"), (OK, "split")]),
        (replace(PROXY, ready_status=503), [(OK, "answers"), (FAIL, "503")]),
        (replace(PROXY, ready_status=0), [(OK, "answers"), (FAIL, "in time")]),
        (replace(PROXY, error="connection refused"), [(FAIL, "connection refused")]),
    ],
)
def test_proxy(proxy: ProxyFact, expected: Said) -> None:
    check_said(proxy_answers, Facts(proxy=proxy), expected)


# -- a fleet


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (fleet(P1, D1), [(OK, "all healthy: P1, D1")]),
        (fleet(P1, worker("D1", reachable=False, healthy=False)), [(FAIL, "D1 at d1:1 is not reachable")]),
        (fleet(P1, worker("D1", healthy=False)), [(FAIL, "D1 at d1:1 is not healthy")]),
        (fleet(worker("D1", state="up")), [(OK, "D1")]),
        (fleet(worker("D1", state="down")), [(FAIL, "not reachable")]),
        (
            fleet(worker("D1", state="up", reachable=False, healthy=False)),
            [(WARN, "does not answer here, though the proxy calls it up")],
        ),
        (fleet(worker("D1", state="draining")), [(WARN, "draining")]),
        (config(), [(SKIP, "agents")]),
        (Facts(proxy=PROXY), [(FAIL, "knows no worker")]),
        (Facts(proxy=replace(PROXY, admin_status=404)), [(SKIP, "admin API")]),
    ],
)
def test_workers(facts: Facts, expected: Said) -> None:
    check_said(workers_answer, facts, expected)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (fleet(P1, D1, R1), [(OK, "SPLIT, LOCAL, REPLICA")]),
        (fleet(P1, D1), [(OK, "SPLIT, LOCAL")]),
        (fleet(R1), [(OK, "REPLICA")]),
        (fleet(D1), [(WARN, "no P; turns can be LOCAL")]),
        (fleet(P1, R1), [(WARN, "serves nobody")]),
        (fleet(P1), [(FAIL, "no worker can answer")]),
        (fleet(worker("D1", healthy=False)), [(FAIL, "no worker can answer")]),
        (fleet(worker("P1", connector="none"), D1), [(FAIL, "no P can hand over to any D; turns can be LOCAL")]),
        (fleet(P1, D1, proxy=replace(PROXY, mode="replica")), [(OK, "SPLIT"), (WARN, "mode is replica")]),
        (fleet(R1, proxy=replace(PROXY, mode="replica")), [(OK, "REPLICA")]),
        (config(), []),
    ],
)
def test_ways_to_serve(facts: Facts, expected: Said) -> None:
    check_said(ways_to_serve, facts, expected)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"P1": "0.33.0", "D1": "0.33.0"}, [(OK, "0.33.0")]),
        ({"P1": "0.33.0", "D1": "0.32.0"}, [(FAIL, "P1 0.33.0, D1 0.32.0")]),
        ({"P1": "0.33.0", "D1": "0.33.0", "D2": "0.32.0"}, [(FAIL, "D2 0.32.0")]),
        ({"P1": "0.33.0", "P2": "0.32.0", "D1": "0.32.0", "D2": "0.33.0"}, [(WARN, "like with like")]),
        ({"P1": "0.33.0", "D1": ""}, [(WARN, "D1 unknown")]),
        ({"P1": "", "D1": ""}, [(SKIP, "not known")]),
        ({"D1": "0.33.0", "R1": "0.32.0"}, []),
        ({"P1": "0.33.0", "D1": "0.33.0", "R1": "0.32.0"}, [(OK, "0.33.0")]),
    ],
)
def test_versions(versions: dict[str, str], expected: Said) -> None:
    workers = [worker(name, engine_version=version) for name, version in versions.items()]
    check_said(versions_agree, fleet(*workers), expected)


@pytest.mark.parametrize(
    ("connectors", "expected"),
    [
        ({"P1": "nixl", "D1": "nixl"}, [(OK, "nixl")]),
        ({"P1": "nixl", "D1": "none"}, [(FAIL, "P1 nixl, D1 none")]),
        ({"P1": "nixl", "P2": "none", "D1": "none", "D2": "nixl"}, [(WARN, "like with like")]),
    ],
)
def test_connectors_agree(connectors: dict[str, str], expected: Said) -> None:
    workers = [worker(name, connector=connector) for name, connector in connectors.items()]
    check_said(connectors_agree, fleet(*workers), expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"connector": "moriio"}, [(FAIL, "P1 uses 'moriio', which is not known")]),
        ({"connector": "p2p_nccl", "coordinates": {"zmq_address": "a:1"}, "engine_version": "0.23.1"}, []),
        ({"connector": "p2p_nccl", "engine_version": ""}, [(FAIL, "where its KV transfer listens")]),
        (
            {"connector": "p2p_nccl", "coordinates": {"zmq_address": "a:1"}, "engine_version": "0.24.0"},
            [(FAIL, "no p2p_nccl any more")],
        ),
    ],
)
def test_connectors_known(changes: dict[str, Any], expected: Said) -> None:
    check_said(connectors_are_known, fleet(worker("P1", **changes), R1), expected)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ({"P1": "m", "D1": "m"}, [(OK, "served: m")]),
        ({"P1": "m", "D1": "n"}, [(FAIL, "P serves m, D n")]),
        ({"P1": "m", "D1": "m n"}, [(WARN, "n is on D only")]),
        ({"P1": "m", "D1": "m", "R1": "n"}, [(OK, "served: m, n")]),
        ({"P1": "m", "D1": ""}, [(SKIP, "not known of D1")]),
        ({"P1": "m", "D1": "m", "R1": ""}, [(SKIP, "not known of R1"), (OK, "served: m")]),
        ({"D1": "m", "R1": "n"}, [(OK, "served: m, n")]),
    ],
)
def test_models(models: dict[str, str], expected: Said) -> None:
    workers = [worker(name, models=tuple(names.split())) for name, names in models.items()]
    check_said(models_are_shared, fleet(*workers), expected)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"P1": True, "D1": True}, [(OK, "P1, D1")]),
        ({"P1": None, "D1": None}, [(SKIP, "do not tell")]),
        ({"P1": None, "D1": False}, [(FAIL, "off on D1")]),
        ({"P1": False, "D1": True}, [(WARN, "off on P1")]),
        ({"R1": False}, [(FAIL, "off on R1")]),
        ({}, []),
    ],
)
def test_prefix_caching(told: dict[str, bool | None], expected: Said) -> None:
    check_said(prefix_caching_is_on, fleet(*(worker(n, prefix_caching=v) for n, v in told.items())), expected)


# -- the probe conversation

FIRST = TurnFact(
    route="SPLIT",
    reason="first_turn",
    number=1,
    decode="D1",
    prefill="P1",
    prompt_tokens=1000,
    completion_tokens=8,
    cached_tokens=0,
    growth=(("P1", Counts(1000, 0, 0, 0, 0)), ("D1", Counts(0, 0, 1000, 0, 0))),
)
LOCAL = TurnFact(
    route="LOCAL",
    reason="table_local",
    number=2,
    decode="D1",
    prompt_tokens=1400,
    completion_tokens=8,
    cached_tokens=992,
    growth=(("P1", Counts(0, 0, 0, 0, 0)), ("D1", Counts(408, 992, 0, 0, 0))),
)
SPLIT = replace(
    LOCAL,
    route="SPLIT",
    prefill="P1",
    growth=(("P1", Counts(408, 992, 0, 0, 0)), ("D1", Counts(0, 992, 408, 0, 0))),
)
REPLICA = replace(LOCAL, route="REPLICA", decode="R1", growth=(("R1", Counts(408, 992, 0, 0, 0)),))


def talk(*turns: TurnFact, workers: tuple[WorkerFact, ...] = (P1, D1)) -> Facts:
    return Facts(proxy=PROXY, workers=workers, conversation=Conversation(model="m", turns=turns))


def d1(*counts: int | None) -> tuple[tuple[str, Counts], ...]:
    """Growth on D1: computed, local hits, transferred, expired, failed."""
    return (("D1", Counts(*counts)),)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (talk(FIRST, LOCAL), [(OK, "SPLIT on P1 -> D1 (first_turn)"), (OK, "LOCAL on D1 (table_local)")]),
        (talk(replace(FIRST, status=503, error="no worker")), [(FAIL, "answered with 503: no worker")]),
        (talk(replace(FIRST, status=0, error="no answer in 120 s")), [(FAIL, "not answered: no answer in 120 s")]),
        (talk(FIRST, replace(LOCAL, number=1)), [(OK, "SPLIT"), (WARN, "taken for turn 1 of its session")]),
        (talk(replace(FIRST, number=0, cached_tokens=None)), [(OK, "unknown cached")]),
        (Facts(conversation=Conversation(skipped="no model")), [(SKIP, "no model")]),
        (config(), []),
    ],
)
def test_turns(facts: Facts, expected: Said) -> None:
    check_said(turns_are_answered, facts, expected)


NONE = (worker("P1", connector="none"), worker("D1", connector="none"))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (talk(FIRST, LOCAL), [(OK, "turn 1: 1000 of the 1000 tokens that D1 lacked came from P1")]),
        (talk(FIRST, SPLIT), [(OK, "turn 1"), (OK, "turn 2: 408 of the 408")]),
        (
            talk(replace(FIRST, growth=d1(1000, 0, 0, 0, 0))),
            [(FAIL, "turn 1: handoff does not work: D1 pulled nothing and computed 1000 tokens")],
        ),
        (talk(replace(FIRST, growth=d1(1000, 0, 0)), workers=NONE), [(FAIL, "does not work")]),
        (talk(replace(FIRST, growth=d1(600, 0, 400))), [(WARN, "only 400 of the 1000")]),
        (talk(replace(FIRST, growth=d1(10, 980, 0))), [(SKIP, "held nearly all")]),
        (talk(replace(FIRST, growth=())), [(SKIP, "metrics of D1 do not tell")]),
        (talk(replace(FIRST, growth=d1(1000, 0, None))), [(SKIP, "metrics of D1 do not tell")]),
        (talk(replace(FIRST, growth=d1(None, None, 0))), [(FAIL, "computed an unknown number of tokens")]),
        (talk(replace(FIRST, handoff_missing="params_missing")), [(FAIL, "no usable handoff (params_missing)")]),
        (talk(replace(LOCAL, number=1, reason="single_engine")), [(SKIP, "was SPLIT: single_engine")]),
        (talk(REPLICA, REPLICA, workers=(R1,)), [(SKIP, "no P serves")]),
        (talk(replace(FIRST, status=500)), []),
        (config(), []),
    ],
)
def test_handoff(facts: Facts, expected: Said) -> None:
    check_said(handoff_works, facts, expected)


def test_a_missing_handoff_is_explained_by_its_connector() -> None:
    turn = replace(FIRST, growth=d1(1000, 0, 0))
    (shared,) = handoff_works(talk(turn, workers=NONE))
    (pulled,) = handoff_works(talk(turn))
    assert "shared KV store" in shared.remedy
    assert "SIDE_CHANNEL_HOST" in pulled.remedy


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (talk(FIRST), [(OK, "P1 computed 1000 tokens")]),
        (talk(replace(FIRST, growth=(("P1", Counts(0, 0, 0)),))), [(WARN, "computed 0 of 1000")]),
        (talk(replace(FIRST, growth=())), [(SKIP, "do not tell")]),
        (talk(REPLICA), []),
        (talk(replace(FIRST, status=0)), []),
    ],
)
def test_prefill(facts: Facts, expected: Said) -> None:
    check_said(prefill_computes, facts, expected)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (talk(FIRST, LOCAL), [(OK, "D1 found 992 of 1400")]),
        (talk(FIRST, SPLIT), [(OK, "D1 found 992")]),
        (talk(REPLICA, REPLICA), [(OK, "R1 found 992")]),
        (talk(FIRST, replace(LOCAL, growth=d1(1400, 0, 0))), [(FAIL, "D1 found 0 of the 1000")]),
        (talk(FIRST, replace(SPLIT, decode="D2")), [(OK, "P1 found 992")]),
        (talk(FIRST, replace(LOCAL, decode="D2")), [(SKIP, "none of turn 1's workers")]),
        (talk(FIRST, replace(LOCAL, growth=())), [(OK, "D1 found 992")]),
        (talk(FIRST, replace(LOCAL, growth=(), cached_tokens=None)), [(WARN, "neither metrics nor usage")]),
        (talk(FIRST, replace(SPLIT, growth=())), [(WARN, "neither metrics nor usage")]),
        (talk(FIRST), [(SKIP, "no second turn")]),
        (talk(FIRST, replace(LOCAL, status=500)), [(SKIP, "no second turn")]),
        (config(), []),
    ],
)
def test_prefix_cache(facts: Facts, expected: Said) -> None:
    check_said(follow_ups_hit_the_cache, facts, expected)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (talk(FIRST, LOCAL), []),
        (talk(replace(FIRST, growth=d1(0, 0, 1000, 2, 0)), LOCAL), [(WARN, "2 on D1")]),
        (talk(FIRST, replace(LOCAL, growth=d1(0, 0, 0, 0, 3))), [(WARN, "3 on D1")]),
        (config(), []),
    ],
)
def test_losses(facts: Facts, expected: Said) -> None:
    check_said(nothing_is_lost, facts, expected)


# -- counters


@pytest.mark.parametrize(
    ("now", "then", "growth"),
    [
        (Counts(5, 4, 3, 2, 1), Counts(1, 1, 1, 1, 1), Counts(4, 3, 2, 1, 0)),
        (Counts(5), Counts(), Counts(5)),
        (Counts(), Counts(5), Counts()),
        (Counts(5, 4), Counts(6, 1), None),
    ],
)
def test_growth_of_counters(now: Counts, then: Counts, growth: Counts | None) -> None:
    assert now.since(then) == growth


# -- all of it


def test_a_healthy_fleet_has_nothing_but_good_findings() -> None:
    workers = tuple(replace(fact, state="up", prefix_caching=True) for fact in (P1, D1))
    found = examine(talk(FIRST, LOCAL, workers=workers))
    assert {finding.level for finding in found} == {OK}
    assert exit_code(found) == 0
    for said in ("handoff", "prefix cache", "versions", "connectors", "models", "ways to serve"):
        assert said in {finding.check for finding in found}


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert {finding.level for finding in examine(Facts())} == {SKIP}


@pytest.mark.parametrize(("level", "code"), [(OK, 0), (WARN, 0), (SKIP, 0), (FAIL, 1)])
def test_only_a_failure_is_an_error(level: Level, code: int) -> None:
    assert exit_code([Finding(OK, "a", "b"), Finding(level, "a", "b")]) == code


def test_every_check_is_run_once() -> None:
    public = {
        check
        for module in (doctor, doctor_fleet, doctor_conversation)
        for name, check in vars(module).items()
        if getattr(check, "__module__", "") == module.__name__ and not name.startswith("_")
    }
    others = {doctor.examine, doctor.exit_code, doctor.is_loopback}
    assert set(CHECKS) == public - others
    assert len(CHECKS) == len(set(CHECKS))
