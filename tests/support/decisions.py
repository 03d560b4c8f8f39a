"""Turns and fleets to decide on, and rules to decide by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ppd.proxy.beliefs.held import BeliefEvidence, Held
from ppd.proxy.config import Mode, StageOrder, ZeroMeans
from ppd.proxy.config.yaml_document import YamlNode, parse_yaml
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.decision_table.table import DecisionTable, find
from ppd.proxy.fleet.view import Fleet, WorkerView, taking_turns
from ppd.proxy.fleet.worker import Role, Worker, WorkerId
from ppd.proxy.laws.prediction import EngineLaws
from ppd.proxy.laws.step_time import EngineProfile
from ppd.proxy.policy import Decision, Excluded, Rules, Turn, decide
from ppd.proxy.policy.profiles.endpoint_config import schedule_of
from ppd.proxy.policy.profiles.schedule import Schedule
from ppd.proxy.policy.stage_order import OrderRules


def view(role: str, number: int, **changes: Any) -> WorkerView:
    worker = Worker(role=Role(role), address=f"{role.lower()}{number}:80", models=("m",))
    return replace(WorkerView(worker=worker, name=f"{role}{number}", incarnation="i"), **changes)


P1, P2, D1, D2, R1 = view("P", 1), view("P", 2), view("D", 1), view("D", 2), view("R", 1)
Decide = Callable[..., Decision]  # `run`, with an order

FLEET = (P1, P2, D1, D2, R1)
TABLE = DecisionTable.load(find("h100-llama-3.1-8b-2P_2D"))


def held(
    worker: WorkerView, tokens: int = 1000, evidence: BeliefEvidence = BeliefEvidence.OWN_TURNS
) -> Mapping[WorkerId, Held]:
    return {worker.id: Held(tokens, evidence)}


class SameLaws:
    """All engines have these, but for some."""

    version = "1"

    def __init__(self, *unknown: WorkerView) -> None:
        self._unknown = {view.id for view in unknown}

    def of(self, view: WorkerView) -> EngineLaws | None:
        return None if view.id in self._unknown else EngineLaws(costs=EngineProfile())


FIRST = Turn(model="m", session_id="0" * 16, number=1, prompt_tokens=100, held_tokens=0, output_tokens=50)
NEXT = Turn(
    model="m",
    session_id="0" * 16,
    number=2,
    prompt_tokens=1040,
    held_tokens=1000,
    output_tokens=50,
    held={**held(D2), **held(P2, 900)},
    decode=D2.id,
)
EVICTED = replace(NEXT, held={}, lost="evicted")


LLM_D_EXAMPLE = Path(__file__).parents[1] / "data/llm_d/endpoint_picker_config.yaml"
"""Of llm-d's proposal of disaggregation, letter by letter."""

LLM_D_HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


BY_ROLES = """plugins:
- {type: prefill-filter}
- {type: decode-filter}
- {type: prefix-cache-scorer}
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 100}}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: prefix-based-pd-decider}}}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: prefix-cache-scorer}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: prefix-cache-scorer}]}
"""


def schedule_from(text: str, zero_means: ZeroMeans = ZeroMeans.API_VERSION) -> Schedule:
    """What a file of llm-d's says."""
    return schedule_of(_parsed(text), text, zero_means)


@cache
def _parsed(text: str) -> YamlNode:
    return parse_yaml("epp_config", "epp.yaml", text)  # which takes longer than most tests


def rules(mode: Mode = Mode.ALWAYS_LOCAL, **changes: Any) -> Rules:
    if mode is Mode.PROFILES:
        changes = {"schedule": schedule_from(LLM_D_HEAD + BY_ROLES), **changes}
    return replace(Rules(mode=mode), **changes)


def by_table(w_ttft: float, w_tpot: float) -> Rules:
    return Rules(mode=Mode.TABLE, scored=TABLE.scored(Weights(w_ttft, w_tpot)))


def fleet_of(views: tuple[WorkerView, ...], model: str = "m") -> Fleet:
    return Fleet.of({view.id: view for view in views}, taking_turns(views, model))


def run(
    turn: Turn,
    fleet: tuple[WorkerView, ...] = FLEET,
    by: Rules | None = None,
    avoid: Excluded = (),
    blocked: Excluded = (),
    order: StageOrder = StageOrder.MODE,
) -> Decision:
    ruled, views = replace(by or rules(), orders=OrderRules(usual=order)), fleet_of(fleet, turn.model)
    return decide(turn, views, ruled, qps=2.0, now_s=100.0, avoid=avoid, blocked=blocked)
