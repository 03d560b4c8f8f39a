"""The receipts of a simulated fleet: the proxy's own policy and learning in virtual time, and each turn as it went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count

from ppd.offline.experiment.plan import plan
from ppd.offline.experiment.run import Run
from ppd.offline.simulation.attempt import Routed
from ppd.offline.simulation.clients import ClientPool, Clients
from ppd.offline.simulation.routing import PolicyRouting, ProxySetup
from ppd.offline.simulation.sessions import Asked, planned_sessions
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.timeline import Timeline
from ppd.offline.simulation.workers.fleet import SimulatedFleet
from ppd.proxy.config import Mode
from ppd.proxy.failures import Leg
from ppd.proxy.policy import Decision, Rules, Turn
from ppd.proxy.routing.receipt_notes import note_decision
from ppd.proxy.telemetry.receipts import LegRecord, Receipt
from ppd.servers.fleet.topology import Topology

from .receipts import BEGAN_S

BY_SLO = ProxySetup(rules=Rules(mode=Mode.SLO))


class RecordedRouting(PolicyRouting):
    """Writes a receipt of each turn that it routes."""

    def __init__(
        self, timeline: Timeline, fleet: SimulatedFleet, proxy: ProxySetup, setup: Setup, *, corrects: bool
    ) -> None:
        super().__init__(timeline, fleet, proxy, setup)
        self._clock = timeline
        self._noted_by = proxy.rules
        if not corrects:
            self._books = replace(self._books, laws=None)
        self._decided: list[tuple[Turn, Decision]] = []
        self.receipts: list[Receipt] = []

    def _decide(self, turn: Turn, now_s: float) -> Decision:
        decision = super()._decide(turn, now_s)
        self._decided.append((turn, decision))
        return decision

    def route(self, session: int, asked: Asked, go: Callable[[Routed], None]) -> None:
        def noted(routed: Routed) -> None:
            self._note(routed)
            go(routed)

        super().route(session, asked, noted)

    def _note(self, routed: Routed) -> None:
        turn, decision = self._decided[-1]
        began_s = self._clock.now_s
        at = datetime.fromtimestamp(BEGAN_S + began_s, UTC).isoformat(timespec="milliseconds")
        receipt = Receipt(
            id=f"{turn.session_id}-{turn.number}",
            at=at,
            endpoint="/v1/chat/completions",
            model=turn.model,
            stream=True,
            session=turn.session_id,
            turn=turn.number,
            kind="first" if turn.number == 1 else "next",
            estimated_prompt_tokens=turn.prompt_tokens,
            estimated_output_tokens=turn.output_tokens,
            slo=turn.slo,
        )
        note_decision(receipt, turn, decision, self._noted_by)
        self.receipts.append(receipt)
        first = decision.prefill or decision.decode
        receipt.legs.append(_leg(Leg.PREFILL if decision.prefill else Leg.LOCAL, first.name, 0.0))
        self._follow(receipt, routed, began_s)

    def _follow(self, receipt: Receipt, routed: Routed, began_s: float) -> None:
        prefilled, answering, completed = routed.prefilled, routed.answering, routed.completed
        cached_on_prefill = list[int]()

        def note_prefilled(cached: int) -> None:
            took_s = self._clock.now_s - began_s
            receipt.legs[-1].first_event_s = receipt.legs[-1].ended_s = took_s
            receipt.legs.append(_leg(Leg.DECODE, receipt.decode, took_s))
            cached_on_prefill.append(cached)
            prefilled(cached)

        def note_answering() -> None:
            receipt.ttft_s = receipt.legs[-1].first_event_s = self._clock.now_s - began_s
            answering()

        def note_completed(prompt: int, output: int, cached: int) -> None:
            receipt.legs[-1].ended_s = receipt.ended_s = self._clock.now_s - began_s
            receipt.outcome, receipt.finish_reason = "completed", "stop"
            receipt.prompt_tokens, receipt.completion_tokens = prompt, output
            receipt.cached_tokens = cached_on_prefill[0] if cached_on_prefill else cached
            completed(prompt, output, cached)

        routed.prefilled, routed.answering, routed.completed = note_prefilled, note_answering, note_completed


def _leg(kind: Leg, worker: str, started_s: float) -> LegRecord:
    return LegRecord(kind=kind, worker=worker, address=f"{worker.lower()}:8000", started_s=started_s)


def recorded(run: Run, setup: Setup, proxy: ProxySetup = BY_SLO, *, corrects: bool = True) -> list[Receipt]:
    """corrects: turns teach the laws how long they took, which no replay makes again."""
    timeline = Timeline()
    fleet = SimulatedFleet(timeline, Topology.parse(run.topology), setup)
    routing = RecordedRouting(timeline, fleet, proxy, setup, corrects=corrects)
    clients = Clients(timeline, fleet, routing, ClientPool(timeline, None))
    clients.play(planned_sessions(plan(run, None), count(1), is_retokenised=lambda: False, forced=False))
    timeline.run(until=lambda: clients.open_sessions == 0)
    return routing.receipts
