"""The simulated proxy decides by its rules, from what a live proxy knows: the rate of arrivals, no answer's length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.offline.experiment.records import Record
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.simulation.routing import ProxySetup
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import simulate
from ppd.proxy.config import Mode, Uncovered
from ppd.proxy.decision_table.format import Cell
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.view import Fleet
from ppd.proxy.policy import Decision, Route, Rules, Turn, decide
from tests.support.decisions import TABLE, rules
from tests.support.stepped_engine import profile_of

SETUP = Setup(profile=profile_of())
CHATS = Workload(
    first=Profile(name="first", new_tokens=512, output_tokens=64),
    later=Profile(name="later", new_tokens=128, output_tokens=128),
    turns=4,
)


def routes(
    rules: Rules, qps: float = 4.0, topology: str = "1P_2D", turns: range = range(2, 9), **proxy: object
) -> Counter[str]:
    return Counter(record.route for record in records(rules, qps, topology, **proxy) if record.turn in turns)  # type: ignore[arg-type]


def records(rules: Rules, qps: float, topology: str, workload: Workload = CHATS, **proxy: object) -> tuple[Record, ...]:
    x = None if topology == "4R" else 0.0
    run = Run(topology=topology, workload=workload, qps=qps, x=x, seconds=3.0, conversations=20)
    return simulate(run, SETUP, proxy=ProxySetup(rules=rules, **proxy))  # type: ignore[arg-type]


def table_where(local_wins: Callable[[Cell], bool]) -> Rules:
    """A table of which each cell is measured, and whose verdict is this function's."""
    like = next(cell for cell in TABLE.cells if cell.local is not None and cell.split is not None)
    fast, slow = like.local, like.split
    if fast is not None and slow is not None and fast.ttft_s.mean > slow.ttft_s.mean:
        fast, slow = slow, fast
    assert fast is not None
    assert slow is not None
    slow = replace(fast, ttft_s=slow.ttft_s)
    cells = [
        replace(cell, local=fast if local_wins(cell) else slow, split=slow if local_wins(cell) else fast, failed=None)
        for cell in TABLE.cells
    ]
    return Rules(mode=Mode.TABLE, scored=replace(TABLE, cells=tuple(cells)).scored(Weights(1.0, 1.0)))


@pytest.mark.parametrize(
    ("by", "topology", "expected"),
    [
        (rules(Mode.ALWAYS_LOCAL), "1P_2D", {"LOCAL"}),
        (rules(Mode.ALWAYS_SPLIT), "1P_2D", {"SPLIT"}),
        (rules(Mode.FRACTION, x=0.5), "1P_2D", {"LOCAL", "SPLIT"}),
        (rules(Mode.REPLICA), "1R_1P_2D", {"REPLICA"}),
        (rules(Mode.TABLE, uncovered=Uncovered.SPLIT), "1P_2D", {"SPLIT"}),
        (rules(Mode.TABLE, uncovered=Uncovered.LOCAL), "1P_2D", {"LOCAL"}),
        (rules(Mode.ALWAYS_LOCAL), "4R", {"REPLICA"}),
    ],
)
def test_the_rules_decide_and_not_the_plan(by: Rules, topology: str, expected: set[str]) -> None:
    assert set(routes(by, qps=1.0, topology=topology)) == expected


@pytest.mark.slow
def test_the_rate_is_that_of_arrivals_as_the_live_proxy_measures_it() -> None:
    few = table_where(lambda cell: cell.qps <= 4)
    assert set(routes(few, qps=1.0)) == {"LOCAL"}
    assert set(routes(few, qps=12.0)) == {"SPLIT"}


def test_a_table_that_counts_turns_gets_the_rate_of_turns() -> None:
    few = table_where(lambda cell: cell.qps <= 4)
    assert few.scored is not None
    axes = replace(few.scored.table.axes, qps_counts="turns")
    turns = Rules(mode=Mode.TABLE, scored=replace(few.scored.table, axes=axes).scored(Weights(1.0, 1.0)))
    assert routes(few, qps=2.0)["SPLIT"] == 0
    assert routes(turns, qps=2.0)["SPLIT"] > 0.5 * routes(turns, qps=2.0).total()


SHORT_FIRST = Workload(
    first=Profile(name="first", new_tokens=512, output_tokens=8),
    later=Profile(name="later", new_tokens=64, output_tokens=900),
    turns=2,
)


@pytest.mark.parametrize(
    ("proxy", "expected"),
    [
        ({}, {"LOCAL"}),  # the session's answer before was short, and so is the forecast
        ({"max_tokens": 2048}, {"LOCAL"}),
        ({"oracle": True}, {"SPLIT"}),
    ],
)
def test_only_an_oracle_knows_how_long_an_answer_will_be(proxy: dict[str, object], expected: set[str]) -> None:
    outputs = {one.name: one.output_tokens for one in TABLE.axes.workloads}
    short = table_where(lambda cell: outputs[cell.workload] < 500)
    found = records(short, 1.0, "1P_2D", SHORT_FIRST, **proxy)
    assert {record.route for record in found if record.turn == 2} == expected


def test_a_limit_that_clients_send_bounds_the_forecast() -> None:
    outputs = {one.name: one.output_tokens for one in TABLE.axes.workloads}
    short = table_where(lambda cell: outputs[cell.workload] < 500)
    long_first = replace(SHORT_FIRST, first=Profile(name="first", new_tokens=512, output_tokens=900))
    for limit, expected in ((None, {"SPLIT"}), (16, {"LOCAL"})):
        found = records(short, 1.0, "1P_2D", long_first, max_tokens=limit)
        assert {record.route for record in found if record.turn == 2} == expected


def test_routing_of_the_published_prototype_has_no_rules() -> None:
    run = Run(topology="1P_2D", workload=CHATS, qps=1.0, x=0.0)
    with pytest.raises(ConfigError, match="published_routing"):
        simulate(run, Setup(profile=profile_of(), published_routing=True), proxy=ProxySetup())


@pytest.mark.parametrize(
    "setting", [{"qps_window_s": 0.0}, {"max_tokens": 0}, {"kv_events_delay_s": -1.0}, {"qps_window_s": float("nan")}]
)
def test_a_setting_out_of_range_is_named(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        ProxySetup(**setting)  # type: ignore[arg-type]


@pytest.mark.parametrize("queues", [True, False])
def test_where_every_engine_is_full_a_turn_waits_in_the_proxy(queues: bool) -> None:
    """In order of arrival, with its clock running, and none is forgotten; without a queue it waits in the engine."""
    run = Run(topology="1R", workload=replace(CHATS, turns=1), qps=40.0, seconds=0.5)
    proxy = ProxySetup(rules=replace(rules(Mode.REPLICA), worker_limit=1), queues=queues)
    found = sorted(simulate(run, SETUP, proxy=proxy), key=lambda one: one.scheduled_s)
    spans = [(one.first_token_s or 0.0, one.last_token_s or 0.0) for one in found]
    assert all(0 < began < ended for began, ended in spans)
    assert spans == sorted(spans)
    at_once = max(sum(began <= at < ended for began, ended in spans) for at, _ in spans)
    assert (at_once == 1) is queues


# -- KV that is fetched


def test_a_session_that_moves_takes_its_kv_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCAL on the other D each time, which fetches from the one before; then both hold it, and the proxy knows."""
    held: dict[int, set[str]] = {}

    def moving(turn: Turn, fleet: Fleet, *args: Any, **settings: Any) -> Decision:
        decision = decide(turn, fleet, *args, **settings)
        if turn.decode is None:
            return decision
        held.setdefault(turn.number, set()).update(fleet.views[worker].name for worker in turn.held)
        source = fleet.views[turn.decode]
        other = next(view for view in fleet.decodes if view.id != turn.decode)
        fetched = {"source": source, "fetched_tokens": turn.held_by(source)}
        return replace(decision, route=Route.LOCAL, decode=other, prefill=None, held=turn.held.get(other.id), **fetched)

    monkeypatch.setattr("ppd.offline.simulation.routing.decide", moving)
    found = records(rules(Mode.ALWAYS_LOCAL), 1.0, "1P_2D")
    for before, after in pairwise(found):
        if before.conversation == after.conversation:
            assert {before.decode, after.decode} == {"D1", "D2"}
            whole = before.prompt_tokens + before.output_tokens - 1
            assert after.cached_tokens == whole // 16 * 16
    assert held == {2: {"P1", "D1", "D2"}, 3: {"P1", "D1", "D2"}, 4: {"P1", "D1", "D2"}}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ((Route.SPLIT, Route.READBACK, Route.READBACK, Route.READBACK), ["SPLIT", "READBACK", "READBACK", "READBACK"]),
        ((Route.SPLIT, Route.LOCAL, Route.READBACK, Route.READBACK), ["SPLIT", "LOCAL", "READBACK", "READBACK"]),
        ((Route.SPLIT, Route.READBACK, Route.LOCAL, Route.READBACK), ["SPLIT", "READBACK", "LOCAL", "READBACK"]),
        ((Route.LOCAL, Route.READBACK, Route.READBACK, Route.LOCAL), ["SPLIT", "READBACK", "READBACK", "LOCAL"]),
    ],
)
@pytest.mark.parametrize("reads_back", [True, False])
def test_p_reads_back_what_d_keeps_where_both_can(
    monkeypatch: pytest.MonkeyPatch, wanted: tuple[Route, ...], expected: list[str], reads_back: bool
) -> None:
    known: dict[int, set[int]] = {}

    def forced(turn: Turn, *args: Any, **settings: Any) -> Decision:
        known.setdefault(turn.number, set()).add(
            0 if turn.readable is None else turn.held_tokens - turn.readable.tokens
        )
        return decide(replace(turn, forced=wanted[turn.number - 1]), *args, **settings)

    monkeypatch.setattr("ppd.offline.simulation.routing.decide", forced)
    found = sorted(records(rules(Mode.ALWAYS_LOCAL), 1.0, "1P_2D", reads_back=reads_back), key=lambda one: one.turn)
    went = [{one.route for one in found if one.turn == turn} for turn in range(1, 5)]
    assert went == [{route if reads_back or route != "READBACK" else "SPLIT"} for route in expected]
    if reads_back:
        assert known[2] == {1}, "all but the answer's last token"
    else:
        assert all(each == {0} for each in known.values())
