"""The doctor's check of KV that is read back, as a table of (facts, findings)."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from ppd.proxy.cli.doctor.gather import Said, _listed
from ppd.proxy.cli.doctor.readback import may_read_back, reading_back_works
from ppd.proxy.cli.doctor.values import EngineCounts, Facts, Level, ProbeConversation, ProxyFact, TurnFact, WorkerFact
from ppd.proxy.fleet.worker import Role, Worker

OK, WARN, FAIL, SKIP = Level.OK, Level.WARN, Level.FAIL, Level.SKIP
PROXY = ProxyFact(address="proxy:1", ready_status=200, admin_status=200)
FIRST = TurnFact(route="SPLIT", decode="D1", prefill="P1", prompt_tokens=1000)
READ = replace(FIRST, route="READBACK", prompt_tokens=1400, growth=(("P1", EngineCounts(400, 0, 1000)),))


def fact(name: str, *, says: bool) -> WorkerFact:
    told = {"bidirectional_kv_xfer": "true"} if says else {}
    return WorkerFact(name=name, worker=Worker(role=Role(name[0]), address=f"{name}:1", coordinates=told))


def facts(*turns: TurnFact, p: bool = True, d: bool = True, proxy: ProxyFact = PROXY) -> Facts:
    talk = ProbeConversation(model="m", turns=(FIRST,), read_back=turns)
    return Facts(proxy=proxy, workers=(fact("P1", says=p), fact("D1", says=d)), conversation=talk)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (facts(FIRST, READ), [(OK, "P1 read back 1000 tokens from D1")]),
        (facts(FIRST, replace(READ, growth=(("P1", EngineCounts(1400, 0, 0)),))), [(WARN, "P1 read back 0 tokens")]),
        (facts(FIRST, replace(READ, growth=())), [(SKIP, "metrics of P1 do not tell")]),
        (facts(FIRST, replace(READ, handoff_missing="handle_refused")), [(FAIL, "D1: handle_refused")]),
        (
            facts(FIRST, replace(READ, status=0, prefill="", error="no answer in 30 s", is_late=True)),
            [(FAIL, "no answer in 30 s")],
        ),
        # The proxy is away, or is another process than before: neither P nor D is to blame.
        (facts(FIRST, replace(READ, status=0, prefill="", error="refused")), [(SKIP, "was not answered: refused")]),
        (facts(FIRST, replace(READ, status=503, error="draining")), [(SKIP, "was not answered: draining")]),
        (facts(FIRST, replace(READ, status=502, failed_legs="prefill on P1: reset")), [(FAIL, "P1: reset")]),
        (facts(FIRST, replace(READ, route="SPLIT", reason="no_handle", number=1)), [(SKIP, "has restarted")]),
        (facts(FIRST, replace(READ, route="LOCAL", failed_legs="prefill on P1: timeout")), [(FAIL, "timeout")]),
        (facts(FIRST, replace(READ, route="SPLIT", reason="no_handle", number=2)), [(WARN, "D1 told no handle")]),
        (facts(replace(FIRST, status=503, error="busy")), [(SKIP, "busy")]),
        (facts(), []),
        (facts(p=False, d=False), []),
        (facts(d=False), [(WARN, "P1 reads back, but no D does")]),
        (facts(p=False), [(WARN, "D1 reads back, but no P does")]),
        (Facts(proxy=PROXY), []),
    ],
)
def test_what_is_read_back(found: Facts, expected: list[tuple[Level, str]]) -> None:
    findings = list(reading_back_works(found))
    assert [finding.level for finding in findings] == [level for level, _ in expected], findings
    for finding, (level, words) in zip(findings, expected, strict=True):
        assert words in finding.message
        assert bool(finding.remedy) is (level in (WARN, FAIL))
        assert not finding.remedy or "bidirectional_kv_xfer" in finding.remedy


@pytest.mark.parametrize(
    ("found", "is_tried"),
    [
        (facts(), True),
        (facts(p=False), False),
        (facts(d=False), False),
        (facts(proxy=replace(PROXY, admin_status=404)), False),
        (Facts(workers=(fact("P1", says=True), fact("D1", says=True))), False),
    ],
)
def test_it_is_tried_where_both_say_so_and_a_route_can_be_forced(found: Facts, is_tried: bool) -> None:
    assert may_read_back(found) is is_tried


@pytest.mark.parametrize("says", [True, False, None])
def test_a_proxy_tells_who_reads_back(says: bool | None) -> None:
    entry: dict[str, object] = dict.fromkeys(("id", "name", "state", "engine", "engine_version"), "")
    entry |= {"role": "P", "models": [], "connector": "nixl"} | ({} if says is None else {"reads_back": says})
    listed = _listed(Said(200, msgspec.json.encode({"workers": [entry]})))
    assert listed is not None
    assert ("bidirectional_kv_xfer" in listed[0].worker.coordinates) is bool(says)
