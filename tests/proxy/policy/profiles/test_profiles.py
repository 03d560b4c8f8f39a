"""Mode `profiles`: which worker llm-d's plugins choose, and whether a P computes the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as replace_worker
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.config import Mode, ZeroMeans
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.errors import AllBusy, AllDown, NoWorkerError
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Load
from ppd.proxy.policy import Decision, Route, Rules, Turn
from ppd.proxy.policy.profiles.pickers import MaxScorePicker, Picker, RandomPicker, WeightedRandomPicker
from ppd.proxy.policy.profiles.prompt_blocks import blocks_of
from ppd.proxy.policy.profiles.scene import Memory, Scene
from ppd.proxy.policy.profiles.schedule import Schedule
from tests.support.decisions import (
    D1,
    D2,
    FIRST,
    LLM_D_EXAMPLE,
    LLM_D_HEAD,
    NEXT,
    P1,
    P2,
    R1,
    TABLE,
    held,
    run,
    schedule_from,
    view,
)

LABELLED = ((P1, "prefill"), (P2, "prefill"), (D1, "decode"), (D2, "decode"))
PROMPT = replace(FIRST, prompt_tokens=1000)


def labelled(one: WorkerView, labels: Mapping[str, str]) -> WorkerView:
    return replace(one, worker=replace_worker(one.worker, labels=dict(labels)))


FLEET = tuple(labelled(one, {"role": role}) for one, role in LABELLED)


def decided(schedule: Schedule, turn: Turn, fleet: tuple[WorkerView, ...] = FLEET, **more: Any) -> Decision:
    return run(turn, fleet, Rules(mode=Mode.PROFILES, schedule=schedule), **more)


def by(plugins: str, zero: ZeroMeans = ZeroMeans.API_VERSION) -> Schedule:
    """One profile of all these plugins, each `type` or `type: {parameters}`."""
    listed = "".join(f"- {{type: {one}}}\n" for one in plugins.split("; "))
    return schedule_from(f"{LLM_D_HEAD}plugins:\n{listed}", zero)


ALWAYS = "always-disagg-pd-decider"
OTHER = replace(D1, worker=replace_worker(D1.worker, connector="none"))
P_FIRST = "{stageOrder: prefill-first}"
DECIDED = "{deciders: {prefill: decider}}"


def disagg(decider: str, *, prefill: str = "prefill-filter", handler: str = DECIDED) -> Schedule:
    """Two profiles of one plugin each."""
    plugins = f"- type: decode-filter\n- type: {prefill}\n- {{name: decider, type: {decider}}}\n"
    plugins += f"- {{type: disagg-profile-handler, parameters: {handler}}}\n"
    pairs = (("decode", "decode-filter"), ("prefill", prefill))
    profiles = "".join(f"- name: {name}\n  plugins: [{{pluginRef: {ref}}}]\n" for name, ref in pairs)
    return schedule_from(f"{LLM_D_HEAD}plugins:\n{plugins}schedulingProfiles:\n{profiles}")


def test_the_proposals_example_splits_what_is_new_and_keeps_what_was_sent_before() -> None:
    schedule = schedule_from(LLM_D_EXAMPLE.read_text())
    assert schedule.memory.rule is not None

    def turn(ends: tuple[int, ...]) -> Turn:
        blocks = blocks_of(range(len(ends)), ends, ends[-1], schedule.memory.rule)  # type: ignore[arg-type]
        return replace(PROMPT, prompt_tokens=ends[-1] // 4, blocks=blocks)

    first = turn((0, 400, 4000))
    split = decided(schedule, first)
    assert (split.route, split.reason) == (Route.SPLIT, "many_uncached")
    assert split.prefill is not None
    assert {split.prefill.worker.labels["role"], split.decode.worker.labels["role"]} == {"prefill", "decode"}
    schedule.memory.sent(first, (split.prefill, split.decode))
    for ends, route in (((0, 400, 4000, 4032), Route.LOCAL), ((0, 400, 4000, 4036), Route.SPLIT)):
        after = decided(schedule, turn(ends))
        assert (after.route, after.decode.id) == (route, split.decode.id), "8 tokens are not above the limit, 9 are"
    moved = tuple(replace(one, incarnation="another") for one in FLEET)
    assert decided(schedule, turn((0, 400, 4000)), moved).route is Route.SPLIT, "an engine that has restarted is empty"


@pytest.mark.parametrize(
    ("tokens", "prompt_limit", "zero", "uncached", "route"),
    [
        (8, 0, "always", 8, Route.LOCAL),
        (8, 0, "always", 9, Route.SPLIT),
        (8, 0, "never", 7, Route.LOCAL),
        (8, 0, "never", 8, Route.SPLIT),
        (0, 0, "always", 0, Route.SPLIT),
        (0, 0, "never", 1000, Route.LOCAL),
        (8, 1000, "never", 9, Route.SPLIT),
        (8, 1001, "never", 9, Route.LOCAL),
        (8, 1001, "always", 9, Route.LOCAL),
    ],
)
def test_the_prefix_decider_goes_by_what_its_d_lacks(
    tokens: int, prompt_limit: int, zero: str, uncached: int, route: Route
) -> None:
    schedule = disagg(
        f"prefix-based-pd-decider, parameters: {{nonCachedTokens: {tokens}, promptTokens: {prompt_limit}}}"
    )
    schedule = replace(schedule, decider=replace(schedule.decider, zero_means=ZeroMeans(zero)))  # type: ignore[type-var]
    decision = decided(schedule, replace(PROMPT, held=held(D1, 1000 - uncached)), (P1, D1))
    assert decision.route is route
    assert decision.reason == ("many_uncached" if route is Route.SPLIT else "few_uncached")


@pytest.mark.parametrize(
    ("schedule", "fleet", "route", "reason"),
    [
        (disagg(ALWAYS), (P1, D1), Route.SPLIT, "always_disagg"),
        (disagg(ALWAYS), (D1,), Route.LOCAL, "no_prefill_worker"),
        (disagg(ALWAYS), (R1,), Route.REPLICA, "decode_on_replica"),
        (disagg(ALWAYS, handler="{}"), (P1, D1), Route.LOCAL, "no_decider"),
        (disagg(ALWAYS, handler=P_FIRST), (P1, D1), Route.SPLIT, "prefill_first"),
        (disagg(ALWAYS, handler=P_FIRST), (P1, OTHER), Route.LOCAL, "no_prefill_worker"),
        (disagg(ALWAYS, handler=P_FIRST), (P1, R1), Route.REPLICA, "no_prefill_worker"),
        (
            disagg(ALWAYS, handler=P_FIRST),
            (D1,),
            Route.LOCAL,
            "no_prefill_worker",
        ),
        (by("queue-scorer"), (P1, D1), Route.LOCAL, "no_decider"),
        (by("queue-scorer; single-profile-handler"), (P1, R1), Route.REPLICA, "no_decider"),
    ],
)
def test_the_handler_says_which_profiles_run(
    schedule: Schedule, fleet: tuple[WorkerView, ...], route: Route, reason: str
) -> None:
    decision = decided(schedule, PROMPT, fleet)
    assert (decision.route, decision.reason) == (route, reason)


@pytest.mark.parametrize(
    ("connector", "route", "reason"),
    [("nixl", Route.SPLIT, "always_disagg"), ("none", Route.REPLICA, "decode_on_replica")],
)
def test_where_kv_may_be_moved_an_r_may_pull_it(connector: str, route: Route, reason: str) -> None:
    able = replace(R1, worker=replace_worker(R1.worker, connector=connector))
    decision = run(PROMPT, (P1, able), Rules(mode=Mode.PROFILES, schedule=disagg(ALWAYS), moves_kv=True))
    assert (decision.route, decision.reason) == (route, reason)


def test_where_kv_may_be_moved_a_worker_may_lend_itself() -> None:
    lends = labelled(D1, {"llm-d.ai/role": "prefill"})
    rules = Rules(mode=Mode.PROFILES, schedule=disagg(ALWAYS), moves_kv=True)
    decision = run(PROMPT, (lends, D2), rules)
    assert (decision.lender, decision.decode) == (lends, D2)
    assert run(PROMPT, (labelled(D1, {"llm-d.ai/role": "prefill-decode"}),), rules).route is Route.LOCAL
    assert run(PROMPT, (lends, D2), replace(rules, moves_kv=False)).route is Route.LOCAL


@pytest.mark.parametrize(("tpot", "route"), [(0.0, Route.LOCAL), (1000.0, Route.SPLIT)])
def test_our_table_may_decide(tpot: float, route: Route) -> None:
    rules = Rules(
        mode=Mode.PROFILES, schedule=disagg("ppd-decider"), scored=TABLE.scored(Weights(1.0 if not tpot else 0.0, tpot))
    )
    decision = run(replace(NEXT, held=held(D1)), (P1, D1), rules)
    assert decision.route is route
    assert decision.reason == f"table_{route.lower()}"
    assert run(replace(FIRST, prompt_tokens=5000), (P1, D1), rules).reason == "first_turn"


def test_one_engine_does_what_no_two_can() -> None:
    decision = decided(disagg(ALWAYS), replace(PROMPT, single_engine="n"), (P1, D1, D2))
    assert (decision.route, decision.reason) == (Route.LOCAL, "single_engine")


ROLES = (
    "encode",
    "prefill",
    "decode",
    "encode-prefill",
    "encode-decode",
    "prefill-decode",
    "encode-prefill-decode",
    "both",
)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_role_takes_part_in_its_phases(role: str, phase: str) -> None:
    one = labelled(D1, {"llm-d.ai/role": role})
    kept = by(f"{phase}-filter").decode.run(scene(), (one,), 0)
    assert (kept is not None) == (role == "both" or phase in role.split("-"))


@pytest.mark.parametrize(("one", "phases"), [(P1, {"prefill"}), (D1, {"decode"}), (R1, {"prefill", "decode"})])
def test_without_the_label_a_worker_has_the_role_that_the_proxy_knows(one: WorkerView, phases: set[str]) -> None:
    kept = {phase for phase in ("prefill", "decode") if by(f"{phase}-filter").decode.run(scene(), (one,), 0)}
    assert kept == phases


def scene(turn: Turn = PROMPT) -> Scene:
    return Scene(turn, Memory())


FIVE = labelled(D1, {"zone": "a", "size": "5"})


@pytest.mark.parametrize(
    ("plugin", "is_kept"),
    [
        ("by-label, parameters: {label: zone, validValues: [a, b]}", True),
        ("by-label, parameters: {label: zone, validValues: [b]}", False),
        ("by-label, parameters: {label: tier, validValues: [a]}", False),
        ("by-label, parameters: {label: tier, validValues: [a], allowsNoLabel: true}", True),
        ("label-selector-filter, parameters: {matchLabels: {zone: a}}", True),
        ("label-selector-filter, parameters: {matchLabels: {zone: a, size: '6'}}", False),
        ("label-selector-filter, parameters: {matchExpressions: [{key: size, operator: In, values: ['5']}]}", True),
        ("label-selector-filter, parameters: {matchExpressions: [{key: size, operator: NotIn, values: ['5']}]}", False),
        ("label-selector-filter, parameters: {matchExpressions: [{key: tier, operator: NotIn, values: ['5']}]}", True),
        ("label-selector-filter, parameters: {matchExpressions: [{key: zone, operator: Exists}]}", True),
        ("label-selector-filter, parameters: {matchExpressions: [{key: zone, operator: DoesNotExist}]}", False),
    ],
)
def test_labels_filter(plugin: str, is_kept: bool) -> None:
    assert (by(plugin).decode.run(scene(), (FIVE,), 0) is not None) is is_kept


ASKED = replace(PROMPT, held={**held(D2, 500), **held(P2, 900)}, decode=D2.id)
LOADED = replace(D1, load=Load(waiting=64, kv_usage=0.25, kv_capacity_tokens=1000), placed_tokens=250, inflight=2)
LESS = replace(D2, load=Load(waiting=16), inflight=1)


@pytest.mark.parametrize(
    ("plugin", "scores"),
    [
        ("prefix-cache-scorer", [0.0, 0.5]),
        ("prefix-cache-scorer, parameters: {matchLengthWeight: 0.5, matchLengthScaleTokens: 1000}", [0.0, 0.375]),
        ("queue-scorer", [0.0, 1.0]),
        ("kv-cache-utilization-scorer", [0.5, 1.0]),
        ("load-aware-scorer", [0.25, 0.4375]),
        ("load-aware-scorer, parameters: {threshold: 64}", [0.0, 0.375]),
        ("active-request-scorer", [0.0, 0.5]),
        ("active-request-scorer, parameters: {idleThreshold: 1, maxBusyScore: 0.5}", [0.0, 1.0]),
        ("session-affinity-scorer", [0.0, 1.0]),
        ("no-hit-lru-scorer", [0.5, 0.5]),
    ],
)
def test_a_scorer_says_how_good_each_worker_is(plugin: str, scores: list[float]) -> None:
    (weighted,) = by(plugin).decode.scorers
    assert weighted.scorer.scores(scene(ASKED), (LOADED, LESS)) == pytest.approx(scores)


def test_cold_turns_go_round_where_the_scorer_says_so() -> None:
    schedule, fleet = by("no-hit-lru-scorer"), (D1, D2, view("D", 3))
    gone = []
    for number in range(6):
        turn = replace(PROMPT, number=number)
        decision = decided(schedule, turn, fleet)
        schedule.memory.sent(turn, (decision.decode,))
        gone.append(decision.decode.id)
    assert len(set(gone[:3])) == 3
    assert gone[:3] == gone[3:]


def test_scores_are_clamped_and_weighted_before_they_are_added() -> None:
    text = f"""{LLM_D_HEAD}plugins: [{{type: prefix-cache-scorer}}, {{type: kv-cache-utilization-scorer}}]
schedulingProfiles:
- name: default
  plugins: [{{pluginRef: prefix-cache-scorer, weight: 2}}, {{pluginRef: kv-cache-utilization-scorer, weight: 0.5}}]
"""
    over = replace(D1, load=Load(kv_usage=0.9, kv_capacity_tokens=100), placed_tokens=5000)
    decision = decided(schedule_from(text), replace(PROMPT, held=held(D1, 800)), (over,))
    assert decision.candidates[0].terms == {"prefix-cache-scorer": 1.6, "kv-cache-utilization-scorer": 0.0}


@pytest.mark.parametrize(
    ("picker", "scores", "picked"),
    [
        (MaxScorePicker(), [0.0, 2.0, 2.0], {1: 0.5, 2: 0.5}),
        (WeightedRandomPicker(), [1.0, 0.0, 3.0], {0: 0.25, 2: 0.75}),
        (WeightedRandomPicker(), [0.0, -1.0], {0: 0.5, 1: 0.5}),
        (RandomPicker(), [1.0, 0.0], {0: 0.5, 1: 0.5}),
    ],
)
def test_a_picker_takes_one_of_them(picker: Picker, scores: list[float], picked: dict[int, float]) -> None:
    found = [picker.pick(scores, step / 1000) for step in range(1000)]
    assert {at: found.count(at) / 1000 for at in set(found)} == pytest.approx(picked, abs=0.01)


def test_the_session_stays_where_its_last_turn_was() -> None:
    stays = replace(PROMPT, decode=D2.id)
    assert decided(by("session-affinity-filter; random-picker"), stays, (D1, D2)).decode.id == D2.id
    assert decided(by("session-affinity-filter; random-picker"), stays, (D1,)).decode.id == D1.id
    schedule = disagg(ALWAYS, prefill="session-affinity-filter")
    split = decided(schedule, replace(PROMPT, held=held(P2, 100)), (P1, P2, D1))
    assert split.prefill is not None
    assert split.prefill.id == P2.id


def test_a_turn_is_decided_alike_each_time_and_turns_are_not() -> None:
    schedule = by("random-picker")
    turns = [replace(PROMPT, number=number) for number in range(40)]
    gone = [decided(schedule, turn, (D1, D2)).decode.id for turn in turns]
    assert gone == [decided(schedule, turn, (D1, D2)).decode.id for turn in turns]
    assert set(gone) == {D1.id, D2.id}


@pytest.mark.parametrize(
    ("fleet", "refusal"),
    [
        ((P1, D1), NoWorkerError),
        ((P1, D1, replace(FIVE, worker=replace_worker(FIVE.worker, address="x:1"), up=False)), AllDown),
        ((P1, D1, replace(FIVE, worker=replace_worker(FIVE.worker, address="x:1"), places=8, inflight=9)), AllBusy),
    ],
)
def test_a_turn_waits_only_where_a_worker_may_come_back(
    fleet: tuple[WorkerView, ...], refusal: type[NoWorkerError]
) -> None:
    with pytest.raises(NoWorkerError) as raised:
        decided(by("by-label, parameters: {label: zone, validValues: [a]}"), PROMPT, fleet)
    assert type(raised.value) is refusal
