"""What the doctor says of each connector and engine: verdicts that are true of it, and remedies in its own words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ppd.proxy.cli.doctor.checks import examine
from ppd.proxy.cli.doctor.gather import Said, _listed
from ppd.proxy.cli.doctor.values import EngineCounts, Facts, Finding, Level, ProbeConversation, TurnFact, WorkerFact
from ppd.proxy.connectors import CONNECTORS, usual_engine
from ppd.proxy.fleet.worker import Role, Worker
from tests.proxy.cli.doctor.test_conversation import FIRST as COUNTED

OK, WARN, FAIL, SKIP = Level.OK, Level.WARN, Level.FAIL, Level.SKIP
OF_VLLM = ("kv-transfer-config", "SIDE_CHANNEL", "enable-prompt-tokens-details", "no-enable-prefix-caching")
"""Words that no other engine's operator should read."""

FIRST = replace(COUNTED, growth=())
SECOND = replace(FIRST, reason="split", number=2, prompt_tokens=1400, cached_tokens=992)


def fact(name: str, connector: str, **changes: object) -> WorkerFact:
    engine = usual_engine(connector)
    worker = Worker(role=Role(name[0]), address=f"{name}:1", models=("m",), connector=connector, engine=engine)
    return WorkerFact(name=name, worker=replace(worker, **changes))  # type: ignore[arg-type]


def facts(connector: str, first: TurnFact, second: TurnFact = SECOND, **of_decode: object) -> Facts:
    """Where the engine counts for itself, D computed turn 1, and found it in turn 2."""
    workers = (fact("P1", connector), fact("D1", connector, **of_decode))
    if usual_engine(connector) == "vllm":
        grown = (("D1", EngineCounts(1000, 0, 0)),), (("D1", EngineCounts(0, 992, 408)),)
        first, second = replace(first, growth=grown[0]), replace(second, growth=grown[1])
    return Facts(workers=workers, conversation=ProbeConversation(model="m", turns=(first, second)))


def said(found: Facts, check: str) -> list[Finding]:
    return [finding for finding in examine(found) if finding.check == check]


MOVED_NOTHING = {  # a word of the remedy, where D answered and its metrics say that nothing came
    "nixl": (FAIL, "VLLM_NIXL_SIDE_CHANNEL_HOST"),
    "nixl_push": (FAIL, "engine_id"),
    "mooncake": (FAIL, "GET /query"),
    "moriio": (FAIL, "neither has read_mode"),
    "moriio_read": (FAIL, "both have read_mode"),
    "p2p_nccl": (FAIL, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"),
    "offload_p2p": (FAIL, "p2p_port"),
    "lmcache": (WARN, "receiver ports"),
    "none": (FAIL, "shared KV store"),
    "sglang": (OK, ""),  # it would not have answered
    "trtllm": (OK, ""),
    "trtllm_gen_first": (OK, ""),
}
NO_HANDOFF = {"trtllm": "disaggregated_params", "nixl": "kv-transfer-config", "moriio_read": "kv-transfer-config"}
COUNT_NONE = ("mooncake", "moriio", "moriio_read", "p2p_nccl", "sglang", "trtllm", "trtllm_gen_first")
UNKNOWN = {
    "nixl_push": "Add engine_id=",
    "mooncake": "bootstrap server",
    "p2p_nccl": "Add zmq_address=",
    "trtllm_gen_first": "GET /server_info",
    "offload_p2p": "Add p2p_port=",
}
CACHE_UNSEEN = {"sglang": "enable-cache-report", "trtllm": "prompt_tokens_details"}
CACHE_MISSED = {"vllm": "no-enable-prefix-caching", "sglang": "disable-radix-cache", "trtllm": "enable_block_reuse"}


@pytest.mark.parametrize("connector", CONNECTORS)
def test_nothing_moved(connector: str) -> None:
    level, word = MOVED_NOTHING[connector]
    finding = said(facts(connector, FIRST), "handoff")[0]
    assert (finding.level, word in finding.remedy) == (level, True), finding


@pytest.mark.parametrize(("connector", "word"), NO_HANDOFF.items())
def test_no_handoff(connector: str, word: str) -> None:
    finding = said(facts(connector, replace(FIRST, handoff_missing="params_missing")), "handoff")[0]
    assert (finding.level, word in finding.remedy) == (FAIL, True), finding


@pytest.mark.parametrize("is_simulated", [False, True])
@pytest.mark.parametrize("connector", CONNECTORS)
def test_failed_transfers_that_nobody_counts_are_not_taken_for_none(connector: str, is_simulated: bool) -> None:
    of_decode: Any = (
        {"engine": "sim"} if is_simulated and usual_engine(connector) == "vllm" else {}
    )  # as its agent says
    found = said(facts(connector, FIRST, **of_decode), "failed transfers")
    assert [finding.level for finding in found] == ([SKIP] if connector in COUNT_NONE else [])


@pytest.mark.parametrize("connector", ["nixl", "nixl_push", "offload_p2p"])
def test_failed_transfers_are_told_with_what_its_connector_needs(connector: str) -> None:
    found = facts(connector, FIRST)
    assert found.conversation is not None
    failed = replace(found.conversation.turns[0], growth=(("D1", EngineCounts(1000, 0, 0, failed=2)),))
    found = replace(found, conversation=ProbeConversation(model="m", turns=(failed,)))
    (finding,) = said(found, "failed transfers")
    assert (finding.level, MOVED_NOTHING[connector][1] in finding.remedy) == (WARN, True), finding


@pytest.mark.parametrize("connector", CONNECTORS)
def test_what_it_does_not_tell(connector: str) -> None:
    found = [one for one in said(facts(connector, FIRST), "connectors") if one.level is FAIL]
    assert bool(found) is (connector in UNKNOWN)
    assert all(UNKNOWN[connector] in finding.remedy for finding in found), found


@pytest.mark.parametrize("connector", CONNECTORS)
def test_follow_ups(connector: str) -> None:
    """Of engines that count nothing themselves usage tells, which after a SPLIT is P's."""
    (finding,) = said(facts(connector, FIRST), "prefix cache")
    assert finding.level is OK
    engine = usual_engine(connector)
    untold = facts(connector, FIRST, replace(SECOND, cached_tokens=None))
    if engine != "vllm":
        (finding,) = said(untold, "prefix cache")
        assert (finding.level, CACHE_UNSEEN[engine] in finding.remedy) == (WARN, True), finding
    missed = replace(SECOND, cached_tokens=0, route="LOCAL", prefill="")
    found = facts(connector, FIRST, missed)
    assert found.conversation is not None
    turns = (found.conversation.turns[0], missed)
    (finding,) = said(replace(found, conversation=ProbeConversation(model="m", turns=turns)), "prefix cache")
    assert (finding.level, CACHE_MISSED[engine] in finding.remedy) == (FAIL, True), finding


def test_a_d_that_keeps_nothing_is_not_expected_to_find_anything() -> None:
    kept = {"coordinates": {"prefix_cache": "false"}}
    (finding,) = said(facts("trtllm", FIRST, replace(SECOND, prefill=""), **kept), "prefix cache")
    assert finding.level is SKIP


@pytest.mark.parametrize("connector", [name for name in CONNECTORS if usual_engine(name) != "vllm"])
def test_operators_of_other_engines_read_nothing_of_vllms(connector: str) -> None:
    for first in (FIRST, replace(FIRST, handoff_missing="params_missing")):
        for second in (SECOND, replace(SECOND, cached_tokens=None), replace(SECOND, cached_tokens=0)):
            for finding in examine(facts(connector, first, second)):
                if finding.check == "handoff" and connector != "trtllm" and first is not FIRST:
                    continue  # D needs nothing of P's answer there
                assert not [word for word in OF_VLLM if word in finding.remedy], finding


@pytest.mark.parametrize(("said_by_proxy", "told"), [(True, "true"), (False, "false"), (None, None)])
def test_a_proxy_tells_whether_a_d_keeps_prefixes(said_by_proxy: bool | None, told: str | None) -> None:
    entry: dict[str, object] = dict.fromkeys(("id", "name", "state", "engine", "engine_version"), "") | {
        "role": "D",
        "models": [],
        "connector": "trtllm",
        "keeps_prefixes": said_by_proxy,
    }
    listed = _listed(Said(200, msgspec.json.encode({"workers": [entry]})))
    assert listed is not None
    assert listed[0].worker.coordinates.get("prefix_cache") == told
