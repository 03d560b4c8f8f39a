"""What a decision costs: microseconds of `decide` alone, with the views that it reads, on fleets of 4 to 1,000 workers.

    python -m benchmarks.turns.fleet_decisions                              # beside the limits
    python -m benchmarks.turns.fleet_decisions --mode slo --instructions    # of Python's bytecode, by function

In each mode or in those that `--mode` names. A third of the turns are first ones, some workers are full, and legs begin
and end between any two decisions. Instructions are counted as `benchmarks.turns.calls` does.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from random import Random

import click
from msgspec.structs import replace

from ppd.offline.experiment.statistics import percentile
from ppd.proxy.beliefs.held import BeliefEvidence, Held
from ppd.proxy.config import Mode
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.decision_table.table import DecisionTable, find
from ppd.proxy.errors import AllBusy
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker, WorkerId
from ppd.proxy.laws.profiles import Profiles
from ppd.proxy.laws.worker_laws import WorkerLaws
from ppd.proxy.policy import Decision, Rules, Turn, decide

from ..small.decision_cost import show_table
from ..small.proxy_here import MODEL
from .calls import SHOWN, TurnWork, counting

TOPOLOGIES = {
    "1P_3D": (1, 3, 0),
    "2P_2D": (2, 2, 0),
    "4R": (0, 0, 4),
    "12P_4D": (12, 4, 0),
    "16R": (0, 0, 16),
    "16P_48D": (16, 48, 0),
    "250P_750D": (250, 750, 0),
}
FLEET_LIMITS_US = {"250P_750D": 1000.0}  # mean of a decision; p99 is three times that
FEW_WORKERS_LIMIT_US = 100.0  # the same for all other fleets
TIMED_MODES = (
    *(Mode.TABLE, Mode.ALWAYS_LOCAL, Mode.SESSION_HASH, Mode.FREE_KV),
    *(Mode.SLO, Mode.WEIGHTS, Mode.LEAST_TTFT, Mode.LMETRIC, Mode.SLACK),
)
PROFILE = "h100-llama-3.1-8b"
LEGS = 3  # turns under way for each worker
KNOWN = 20  # sessions for each worker
COUNTED = 300  # decisions, where instructions are
STEP_S = 0.3  # between two decisions for each worker
JOINED_S = 50.0  # beyond slow start, and not at 0, which no clock says


class DecidedTurns:
    """Turns of many sessions on one fleet, without anything but the registry and what `decide` is given."""

    def __init__(self, mode: Mode, prefills: int, decodes: int, replicas: int, seed: int = 1) -> None:
        scored = DecisionTable.load(find("h100-llama-3.1-8b-2P_2D")).scored(Weights(1.0, 1.0))
        laws = WorkerLaws(Profiles(PROFILE))
        self.rules = Rules(mode=mode, scored=scored, laws=laws, moves_kv=True, warm_up_s=10.0)
        self.random, self.registry, self.now_s = Random(seed), Registry(), 100.0
        roles = (Role.PREFILL, prefills), (Role.DECODE, decodes), (Role.REPLICA, replicas)
        workers = [
            Worker(role=role, address=f"10.0.{role}.{n}:8000", models=(MODEL,), source=Source.AGENT)
            for role, count in roles
            for n in range(count)
        ]
        for worker in workers:
            self.registry.apply(Announcement(worker, Load(kv_capacity_tokens=450_000)), JOINED_S)
        self.ids = [worker.id for worker in workers]
        self.sessions: list[Turn] = []
        self.bookings: deque[LegBooking] = deque()

    def next_turn(self) -> Turn:
        """A first turn in three; of the others a few are also held by many, as a head that they share is."""
        if len(self.sessions) < LEGS or self.random.random() < 1 / 3:
            tokens = self.random.choice((200, 2_000, 20_000))
            return Turn(
                model=MODEL,
                session_id=f"{self.random.getrandbits(64):016x}",
                number=1,
                prompt_tokens=tokens,
                held_tokens=0,
                output_tokens=200,
                held=self._shared(tokens // 2),
            )
        last = self.sessions.pop(self.random.randrange(len(self.sessions)))
        return replace(last, held={**self._shared(500), **last.held})

    def _shared(self, tokens: int) -> dict[WorkerId, Held]:
        count = self.random.choice((0, 0, 0, 1, len(self.ids) // 2))
        chosen = self.random.sample(self.ids, count) if count else ()
        return {worker: Held(tokens, BeliefEvidence.SHARED_PREFIX) for worker in chosen}

    def end(self, turn: Turn, decision: Decision | None) -> None:
        """decision: None where all workers were busy; then the oldest turn ends."""
        if decision is None:
            self.bookings.popleft().release(self.now_s)
        else:
            self.carry_out(turn, decision)

    def carry_out(self, turn: Turn, decision: Decision) -> None:
        """Books its legs, ends others, and lets one worker report its load, of which some say that they are full."""
        prefill = None if decision.prefill is None else decision.prefill.id
        booking = LegBooking(self.registry, decision.decode.id, prefill, decision.estimates(turn))
        booking.reserve(self.now_s)
        self.bookings.append(booking)
        self.now_s += STEP_S / len(self.ids)
        if len(self.bookings) > LEGS * len(self.ids):
            self.bookings.popleft().release(self.now_s)
        self.bookings[-(1 + len(self.bookings) // 2)].computed(self.now_s)
        engine = self.registry.view(self.random.choice(self.ids))
        assert engine is not None, "none ever leaves"
        keeps_queue = self.random.random() < 0.1  # twice without a change: it has as many legs as it should have
        load = Load(1, 9, 0.4, 450_000) if keeps_queue else Load(engine.inflight, 0, 0.4, 450_000)
        for _ in range(2 if keeps_queue else 1):
            self.registry.loaded(engine.id, load, self.now_s)
        held = Held(turn.prompt_tokens + turn.output_tokens, BeliefEvidence.OWN_TURNS)
        holders = {worker: held for worker in (prefill, decision.decode.id) if worker is not None}
        held_tokens = turn.prompt_tokens + turn.output_tokens
        later = replace(turn, number=turn.number + 1, held_tokens=held_tokens, prompt_tokens=held_tokens + 150)
        self.sessions.append(replace(later, held={**turn.held, **holders}, decode=decision.decode.id))
        if len(self.sessions) > KNOWN * len(self.ids):
            self.sessions.pop(0)


def decision_times_us(turns: DecidedTurns, decisions: int, repeats: int = 1) -> list[float]:
    """Processor time; of equal decisions the least, as other programs only ever add to it."""
    times_us = list[float]()
    for _ in range(decisions):
        turn, began_ns = turns.next_turn(), time.thread_time_ns()
        fleet = turns.registry.fleet(MODEL)
        read_ns, took_ns = time.thread_time_ns() - began_ns, []
        decision: Decision | None = None
        for _ in range(repeats):
            began_ns = time.thread_time_ns()
            with suppress(AllBusy):
                decision = decide(turn, fleet, turns.rules, qps=1.0, now_s=turns.now_s)
            took_ns.append(time.thread_time_ns() - began_ns)
        times_us.append((read_ns + min(took_ns)) / 1000)
        turns.end(turn, decision)
    return times_us


def counted(turns: DecidedTurns, decisions: int) -> TurnWork:
    """What so many decisions do, in sum."""
    work = TurnWork()
    for _ in range(decisions):
        turn = turns.next_turn()
        decision: Decision | None = None
        with suppress(AllBusy), counting(work):
            decision = decide(turn, turns.registry.fleet(MODEL), turns.rules, qps=1.0, now_s=turns.now_s)
        turns.end(turn, decision)
    return work


def count_lines(work: TurnWork, decisions: int) -> Iterator[str]:
    yield f"{work.instructions.total() / decisions:.0f} instructions, {work.calls.total() / decisions:.0f} calls"
    for name, times in work.instructions.most_common(SHOWN):
        yield f"{times / decisions:7.1f} in {work.calls[name] / decisions:5.2f} calls: {name}"


def show_fleets(modes: Sequence[Mode], decisions: int, repeats: int) -> None:
    click.echo(f"us of processor time, mean / p99 of {decisions} decisions, each the least of {repeats}\n")
    rows = []
    for mode in modes:
        cells = []
        for name, workers in TOPOLOGIES.items():
            turns = _busy(mode, workers)
            gc.freeze()
            times_us, limit_us = (
                decision_times_us(turns, decisions, repeats),
                FLEET_LIMITS_US.get(name, FEW_WORKERS_LIMIT_US),
            )
            mean_us, p99_us = sum(times_us) / len(times_us), percentile(times_us, 0.99)
            missed = ", missed" if mean_us > limit_us or p99_us > 3 * limit_us else ""
            cells.append(f"{mean_us:.0f} / {p99_us:.0f}{missed}")
        rows.append([mode.value, *cells])
    show_table(["mode", *TOPOLOGIES], rows)


def show_counts(modes: Sequence[Mode]) -> None:
    for mode in modes:
        for name, workers in TOPOLOGIES.items():
            click.echo(f"\n{mode.value} on {name}, mean of {COUNTED} decisions:")
            for line in count_lines(counted(_busy(mode, workers), COUNTED), COUNTED):
                click.echo(line)


def _busy(mode: Mode, workers: tuple[int, int, int]) -> DecidedTurns:
    """As many legs run as ever will."""
    turns = DecidedTurns(mode, *workers)
    decision_times_us(turns, LEGS * sum(workers))
    return turns


@click.command(help=__doc__)
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice([mode.value for mode in TIMED_MODES]),
    help="Only these.",
)
@click.option("--decisions", default=10_000, show_default=True, help="In each mode on each fleet.")
@click.option("--repeats", default=5, show_default=True, help="Of each decision.")
@click.option("--instructions", is_flag=True, help="Count instructions, and take no times.")
def main(modes: Sequence[str], decisions: int, repeats: int, instructions: bool) -> None:
    chosen = [Mode(mode) for mode in modes or TIMED_MODES]
    if instructions:
        show_counts(chosen)
    else:
        show_fleets(chosen, decisions, repeats)


if __name__ == "__main__":
    main()
