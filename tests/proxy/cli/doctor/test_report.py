"""The doctor's output: lines that need no colour, a table of workers, JSON."""

from __future__ import annotations

import json
from dataclasses import replace

from ppd.proxy.cli.doctor.report import as_json, caption, counts_table, lines, verdict, workers_table
from ppd.proxy.cli.doctor.values import EngineCounts, Facts, Finding, Level, ProbeConversation, TurnFact, WorkerFact
from ppd.proxy.fleet.worker import Load, Role, Worker

FINDINGS = (
    Finding(Level.OK, "proxy", "answers"),
    Finding(Level.FAIL, "handoff", "moves nothing", "Look at D."),
)
D1 = WorkerFact(
    name="D1",
    worker=Worker(role=Role.DECODE, address="d:1", engine_version="0.33.0"),
    state="up",
    load=Load(running=2, waiting=1, kv_usage=0.25),
    counts=EngineCounts(100, 200, 300, 0, 0),
)
FAR = WorkerFact(name="D2", worker=Worker(role=Role.DECODE, address="d:2"), state="up", reachable=False, healthy=False)
ONLY_D1 = (("D1", EngineCounts(1, 2, 3, None, 0)),)
TALKED = Facts(workers=(D1, FAR), conversation=ProbeConversation(turns=(TurnFact(growth=ONLY_D1),) * 2))


def test_one_line_a_finding_with_its_remedy() -> None:
    assert lines(FINDINGS).plain.splitlines() == [
        "✓ OK    proxy    answers",
        "✗ FAIL  handoff  moves nothing -> Look at D.",
    ]
    assert lines(FINDINGS, ascii_only=True).plain.isascii()


def test_what_workers_call_themselves_makes_no_line_and_steers_no_terminal() -> None:
    """Whoever reaches an open heartbeat port may name models, versions and connectors."""
    name = "a\nx OK\x1b[31m\x9b1m\u202e\u2028[red]"
    found = lines([Finding(Level.WARN, "models", f"served: {name}", f"ask {name}")]).plain
    assert len(found.splitlines()) == 1 and found.isprintable()
    worker = Worker(role=Role.DECODE, address="d:1", engine_version=name, connector=name)
    table = workers_table(Facts(workers=(replace(D1, worker=worker),))).plain
    assert len(table.splitlines()) == 2 and table.replace("\n", "").isprintable()


def test_verdict_counts_the_levels() -> None:
    assert verdict(FINDINGS).plain == "1 OK, 1 FAIL"


def test_table_of_lifetimes() -> None:
    assert workers_table(Facts(workers=(D1,))).plain.splitlines()[1].split() == "D1 d:1 up vllm 0.33.0 nixl".split()
    assert counts_table(Facts(workers=(D1,))).plain.splitlines()[1].split() == ("D1 2 1 25.0% 100 200 300 0 0".split())
    assert "since the engine started" in caption(Facts(workers=(D1,)))


def test_table_of_a_conversation_holds_its_growth() -> None:
    rows = counts_table(TALKED).plain.splitlines()
    assert rows[1].split()[-5:] == ["2", "4", "6", "?", "0"]
    assert rows[2].split() == "D2 ? ? ? ? ? ? ? ?".split()
    assert workers_table(TALKED).plain.splitlines()[2].split() == "D2 d:2 not reachable vllm ? nixl".split()
    assert "during the probe conversation" in caption(TALKED)


def test_tables_fit_80_columns() -> None:
    workers = tuple(replace(D1, worker=replace(D1.worker, address=f"10.10.10.1{each}:30000")) for each in range(10))
    for table in (workers_table, counts_table):
        assert max(map(len, table(Facts(workers=workers)).plain.splitlines())) <= 80


def test_json_holds_findings_workers_and_the_conversation() -> None:
    document = json.loads(as_json(TALKED, FINDINGS))
    assert document["ok"] is False
    assert document["findings"][1] == {
        "level": "FAIL",
        "check": "handoff",
        "message": "moves nothing",
        "remedy": "Look at D.",
    }
    assert [worker["counts"]["computed"] for worker in document["workers"]] == [2, None]
    assert document["counts_of"] == "conversation"
    assert json.loads(as_json(Facts(workers=(D1,)), FINDINGS[:1]))["ok"] is True
