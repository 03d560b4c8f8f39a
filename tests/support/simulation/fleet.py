"""A simulated fleet in which turns are sent by hand."""

from __future__ import annotations

from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.timeline import Timeline
from ppd.offline.simulation.workers.engine import SimulatedSequence
from ppd.offline.simulation.workers.fleet import FinishedPrefill, SimulatedFleet, SimulatedLeg
from ppd.offline.simulation.workers.kv_cache import Span
from ppd.offline.simulation.workers.links import Work
from ppd.proxy.laws.profile_file import Transfers
from ppd.proxy.laws.step_time import EngineProfile
from ppd.servers.fleet.topology import Topology

from ..stepped_engine import profile_of

# A token takes 1 ms to compute, and 0.13 ms to move.
COSTS = EngineProfile(transfer_bytes_per_s=1e9, transfer_s=0.0, prefill_token_s=1e-3, request_token_s=0.0)
HISTORY, REPLY, MORE = Span(1, 1000), Span(2, 200), Span(3, 100)
LATER = (HISTORY, REPLY, MORE)
HELD = 1199 // 16 * 16  # of it, where the first turn ran: an answer's last token is never written


class Lab:
    """A fleet, in which turns are sent by hand."""

    def __init__(
        self,
        topology: str = "1P_2D_2R",
        capacity: int = 400_000,
        costs: EngineProfile = COSTS,
        transfers: Transfers = Transfers.MISSING,
    ) -> None:
        self.timeline = Timeline()
        profile = profile_of(costs=costs, transfers=transfers, kv_capacity_tokens=capacity)
        setup = Setup(profile=profile)
        self.fleet = SimulatedFleet(self.timeline, Topology.parse(topology), setup)
        self.workers = {worker.name: worker for worker in self.fleet.workers}
        self.first_s: list[float] = []
        self.ended = 0
        self.failed: list[float] = []

    def ask(
        self, worker: str, *prompt: Span, source: str = "", fetched: int = 1 << 20, output: Span = REPLY
    ) -> SimulatedSequence:
        return self.fleet.ask(self.workers[worker], self.leg(prompt, source, fetched, output))

    def split(self, prefill: str, decode: str, *prompt: Span, source: str = "") -> Work:
        leg, to = self.leg(prompt, source), self.workers[decode]

        def handed_over(handoff: FinishedPrefill) -> None:
            self.fleet.decode(to, leg, handoff)

        self.fleet.prefill(self.workers[prefill], leg, to, handed_over)
        return leg.work

    def leg(self, prompt: tuple[Span, ...], source: str, fetched: int = 1 << 20, output: Span = REPLY) -> SimulatedLeg:
        def ended() -> None:
            self.ended += 1

        return SimulatedLeg(
            prompt,
            sum(span.tokens for span in prompt),
            (output,),
            output.tokens,
            lambda: self.first_s.append(self.timeline.now_s),
            ended,
            self.workers[source] if source else None,
            fetched,
            failed=lambda: self.failed.append(self.timeline.now_s),
        )

    def run(self) -> float:
        """Until nothing happens; the time that the newest first token took."""
        began_s = self.timeline.now_s
        self.timeline.run(until=lambda: False)
        return self.first_s[-1] - began_s

    def run_for(self, seconds: float) -> None:
        until_s = self.timeline.now_s + seconds
        self.timeline.at(until_s, lambda: None)
        self.timeline.run(until=lambda: self.timeline.now_s >= until_s)

    def holds(self, worker: str) -> int:
        return self.workers[worker].engine.cache.hit_tokens((*LATER, Span(99, 16)))

    @property
    def in_use(self) -> int:
        """Tokens, on workers that are not lost."""
        alive = [worker.engine for worker in self.fleet.workers if not worker.engine.is_lost]
        return sum(engine.cache.used_tokens for engine in alive)


def after_first_turn(worker: str, **settings: object) -> Lab:
    lab = Lab(**settings)  # type: ignore[arg-type]
    lab.ask(worker, HISTORY)
    lab.run()
    return lab
