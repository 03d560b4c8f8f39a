from __future__ import annotations

import itertools
import re
from collections import Counter

import msgspec
import pytest

from benchmarks.soak.engines import SPARE, SoakEngines
from benchmarks.soak.fault_plan import ENGINES, PROXY, costs, faults, felt, plan
from benchmarks.soak.fleet import samples
from benchmarks.soak.monitor import short
from benchmarks.soak.oracle import running_oracle
from benchmarks.soak.records import FINE, ClientOutcome, Disturbance, FleetFault, RequestRecord
from benchmarks.soak.workload import Move, SoakConversation, SoakRequest
from ppd.proxy.connectors import missing_coordinates
from ppd.proxy.connectors.queries import query_of
from ppd.proxy.discovery.static_workers import parse_worker
from ppd.proxy.openai.request import Endpoint
from ppd.servers.sim.core.fault_orders import Faults
from ppd.servers.sim.protocols import PROTOCOLS

NIXL = SoakEngines()
FLEET = (
    FleetFault.KILL,
    FleetFault.RESTART,
    FleetFault.DRAIN,
    FleetFault.REMOVE,
    FleetFault.FLIP,
    FleetFault.JOIN,
    FleetFault.PAUSE,
    FleetFault.POISON,
    FleetFault.CONFIG,
    FleetFault.CLOCK,
)  # done to processes and the proxy


def asks(seed: int, number: int) -> list[SoakRequest]:
    conversation, found = SoakConversation(seed, number), list[SoakRequest]()
    while (ask := conversation.next()) is not None:
        found.append(ask)
        conversation.answered(f"answer {len(found)}")
    return found


def test_conversations_follow_from_their_seed_and_number() -> None:
    assert asks(1, 5) == asks(1, 5)
    assert asks(1, 5) != asks(2, 5)
    assert asks(1, 5) != asks(1, 6)


@pytest.mark.slow
def test_many_conversations_are_of_every_kind() -> None:
    found = [ask for number in range(300) for ask in asks(0, number)]
    assert {ask.endpoint for ask in found} == set(Endpoint)
    assert {ask.move for ask in found} == set(Move)
    assert {ask.stream for ask in found} == {True, False}
    assert {ask.force for ask in found} == {"", "LOCAL", "SPLIT", "REPLICA"}
    assert {2 <= len(asks(0, number)) <= 12 for number in range(300)} == {True}
    for leaving in ("leave_after_s", "leave_after_events", "pause_s"):
        assert 0.02 < sum(bool(getattr(ask.behaviour, leaving)) for ask in found) / len(found) < 0.1


def messages(ask: SoakRequest) -> list[str]:
    return [message["content"] for message in ask.body["messages"] if message["role"] != "system"]


@pytest.mark.slow
def test_turns_go_on_from_what_was_answered() -> None:
    """Continued: all that was said; again: the same; edited: its last words; branched: an earlier turn."""
    seen = Counter[Move]()
    for number in range(200):
        found = [ask for ask in asks(0, number) if ask.endpoint is Endpoint.CHAT and ask.move is not Move.IMPOSSIBLE]
        for before, after in itertools.pairwise(found):
            said, now = messages(before), messages(after)
            seen[after.move] += 1
            match after.move:
                case Move.CONTINUE if len(now) > len(said):
                    assert now[: len(said)] == said
                    assert now[len(said)].startswith("answer")
                case Move.AGAIN:
                    assert now == said
                case Move.EDIT:
                    assert now[:-1] == said[:-1]
                    assert now[-1] != said[-1]
                case Move.BRANCH:
                    assert len(now) <= len(said)
    assert min(seen[move] for move in (Move.CONTINUE, Move.AGAIN, Move.EDIT, Move.BRANCH)) > 10


def test_what_was_not_answered_is_asked_again() -> None:
    conversation = SoakConversation(0, 0)
    first = conversation.next()
    conversation.answered(None)
    second = conversation.next()
    assert first is not None and second is not None
    assert second.move is Move.AGAIN


def test_a_plan_follows_from_its_seed_and_ends_in_time() -> None:
    assert plan(0, 600, NIXL) == plan(0, 600, NIXL) != plan(1, 600, NIXL)
    assert all(one.at_s + one.lasts_s < 600 for one in plan(0, 600, NIXL))


@pytest.mark.parametrize("seed", range(20))
def test_three_minutes_hold_every_kind_and_leave_someone_to_serve(seed: int) -> None:
    planned = plan(seed, 180, NIXL)
    assert {one.kind for one in planned} == set(FleetFault)
    for at_s in {one.at_s for one in planned}:
        together = [one.worker for one in planned if one.at_s == at_s]
        engines = [worker for worker in together if worker != PROXY]
        assert 1 <= len(together) <= 2 and len(set(engines)) == len(engines)
    assert {one.worker for one in planned} <= {*NIXL.names, SPARE, PROXY, ENGINES}
    assert all((one.kind is FleetFault.JOIN) == (one.worker == SPARE) for one in planned)
    roles = {(one.kind, one.worker[0]) for one in planned}
    assert not roles & {
        (FleetFault.FLIP, "R"),
        (FleetFault.HANDOFF, "D"),
        (FleetFault.LOAD, "P"),
        (FleetFault.WEDGE, "D"),
        (FleetFault.WEDGE, "R"),
    }


@pytest.mark.parametrize("connector", PROTOCOLS)
def test_an_engine_is_given_no_role_that_its_connector_has_not(connector: str) -> None:
    engines = SoakEngines(connector)
    planned = plan(0, 180, engines)
    left = set(FleetFault) - {one.kind for one in planned}
    assert left == (set() if engines.may_change_role else {FleetFault.FLIP})
    assert {one.worker for one in planned} <= {*engines.names, SPARE, PROXY, ENGINES}


@pytest.mark.parametrize("connector", PROTOCOLS)
def test_engines_are_announced_with_what_their_connector_needs(connector: str) -> None:
    engines = SoakEngines(connector)
    for name in engines.names:
        worker = parse_worker(f"{name[0]}=127.0.0.1:8000{engines.told(name, 5600)}")
        assert not missing_coordinates(worker) or query_of(worker), "the proxy asks for what is missing"
        if name[0] in "PD":
            assert (worker.connector, engines.flags(name)[:2]) == (connector, ["--connector", connector])


@pytest.mark.parametrize("kind", [kind for kind in FleetFault if kind not in FLEET])
def test_every_fault_is_one_that_an_engine_knows(kind: FleetFault) -> None:
    body = faults(Disturbance(kind=kind, worker="D1", at_s=0, lasts_s=9, detail=500))
    assert msgspec.convert(body, type=Faults) != Faults()


def request(sent_s: float, ended_s: float) -> RequestRecord:
    return RequestRecord(
        id="x",
        conversation=0,
        endpoint="chat",
        move="open",
        stream=True,
        sent_s=sent_s,
        first_text_s=None,
        ended_s=ended_s,
        status=200,
        outcome=ClientOutcome.BROKEN,
        route="",
        detail="",
    )


@pytest.mark.parametrize(
    ("sent_s", "ended_s", "is_felt"),
    [(0, 9.9, False), (0, 10, True), (12, 13, True), (15.9, 20, True), (16.1, 20, False)],
)
def test_a_disturbance_is_felt_while_it_lasts_and_a_little_longer(sent_s: float, ended_s: float, is_felt: bool) -> None:
    kill = Disturbance(kind=FleetFault.KILL, worker="D1", at_s=10, lasts_s=5)
    assert bool(felt(request(sent_s, ended_s), [kill])) is is_felt
    assert (ClientOutcome.BROKEN in costs(request(sent_s, ended_s), [kill])) is is_felt


@pytest.mark.parametrize(
    "kind",
    [
        FleetFault.RESTART,
        FleetFault.DRAIN,
        FleetFault.REMOVE,
        FleetFault.FLIP,
        FleetFault.JOIN,
        FleetFault.REFUSE,
        FleetFault.GARBAGE,
    ],
)
def test_most_disturbances_may_cost_a_client_nothing(kind: FleetFault) -> None:
    assert costs(request(1, 2), [Disturbance(kind=kind, worker="D1", at_s=0, lasts_s=9)]) == FINE


def test_a_turn_that_was_aboard_both_engines_of_a_poisoned_prompt_may_be_refused() -> None:
    poison = Disturbance(kind=FleetFault.POISON, worker="engines", at_s=0, lasts_s=9)
    assert ClientOutcome.FAILED in costs(request(1, 2), [poison])


async def test_the_right_text_depends_on_every_word_and_on_the_weights() -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "n": 2}
    other = body | {"messages": [{"role": "user", "content": "ho"}]}
    async with running_oracle() as oracle, running_oracle(seed=1) as another:
        texts = await oracle.texts(Endpoint.CHAT, body)
        assert texts.keys() == {0, 1}
        assert texts == await oracle.texts(Endpoint.CHAT, body)
        assert texts != await oracle.texts(Endpoint.CHAT, other)
        assert texts != await another.texts(Endpoint.CHAT, body)


def test_metrics_are_picked_by_name() -> None:
    text = '# HELP a b\nppd_inflight_legs{role="P"} 2.0\nppd_workers 1.0\nvllm:x{engine="0",model_name="sim"} 3\n'
    assert samples(text, re.compile("ppd_inflight|vllm:x")) == {
        'ppd_inflight_legs{role="P"}': 2,
        'vllm:x{engine="0",model_name="sim"}': 3,
    }
    assert short('vllm:x{engine="0",model_name="sim"}') == "vllm:x"
    assert short('vllm:x{engine="0",finished_reason="stop",model_name="sim"}') == 'vllm:x{finished_reason="stop"}'
