"""What a turn costs without its sockets: microseconds of Python from body to decision, and from there to the end.

    python -m benchmarks.small.decision_cost

The router, the dispatcher and all state are real; the worker's answer comes from memory, and the mode is `table`. A
conversation's earlier turn is played first and not timed, so that its last one is found among `--sessions` others.
`--tools` adds so many tools of 600 bytes, and a system's text, to each body.

    python -m benchmarks.small.decision_cost --fleets

times `decide` alone, with the views that it reads, on fleets of 4 to 1,000 workers, in each mode or in those that
`--mode` names, and compares with the limits. A third of the turns are first ones, some workers are full, and legs begin
and end between any two decisions.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import add
from random import Random

import click
import msgspec
from msgspec.structs import replace

from ppd.offline.experiment.statistics import percentile
from ppd.proxy.beliefs.held import BeliefEvidence, Held, PromptEntry
from ppd.proxy.config import Mode
from ppd.proxy.connectors import plain_leg
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.decision_table.table import DecisionTable, find
from ppd.proxy.errors import AllBusy
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker, WorkerId
from ppd.proxy.laws.profiles import Profiles
from ppd.proxy.laws.worker_laws import WorkerLaws
from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Request
from ppd.proxy.policy import Decision, Rules, Turn, decide, has_room
from ppd.proxy.routing.state import State
from ppd.proxy.sessions.session import Prompt, marks_of_prompt
from ppd.proxy.sessions.table import SessionMatch, TurnOutcome

from .proxy_here import ANSWER, MODEL, REPLY, TurnBench, bench

SIZES = {"200 B": (200, 1), "400 B": (400, 3), "2 KB": (2_000, 3), "130 KB": (130_000, 5), "600 KB": (600_000, 9)}
STAGES = ("parse", "decide", "legs", "learn")
DECISION_TARGETS_US = {"2 KB": 50, "130 KB": 250}  # limits from the body to the decision
WARM_UP = 30
BATCH_BYTES = 16_000_000
SYSTEM = {"role": "system", "content": "You look for what you are asked for. " * 50}


def conversation(number: int, size: int, messages: int, tools: int) -> tuple[bytes | None, bytes]:
    """The bodies of a conversation's last two turns; None instead of the first if there is only one."""
    random = Random(number)
    words = [f"{random.getrandbits(20):x}" for _ in range(97)]
    share = max(20, (size - 130) // ((messages + 1) // 2) - 100)
    history = []
    for at in range(messages):
        text = " ".join([f"{number}-{at}", *words] * (share // 500 + 1))[:share]
        history.append({"role": "assistant", "content": REPLY} if at % 2 else {"role": "user", "content": text})
    return (body(history[:-2], tools) if messages > 1 else None), body(history, tools)


def body(messages: Sequence[object], tools: int) -> bytes:
    said = {"model": MODEL, "messages": messages, "max_tokens": 64, "temperature": 0.7}
    if tools:
        said |= {"messages": [SYSTEM, *messages], "tools": [tool(number) for number in range(tools)]}
    return msgspec.json.encode(said)


def tool(number: int) -> object:
    text = {"type": "string", "description": "What it is told to look for, and where, and how long. " * 5}
    parameters = {"type": "object", "properties": {"query": text, "limit": {"type": "integer"}}, "required": ["query"]}
    function = {"name": f"search_{number}", "description": "Looks for something. " * 5, "parameters": parameters}
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class TimedTurns:
    """The timed turns of one size."""

    name: str
    kinds: Counter[str]
    stages_us: dict[str, list[float]]  # one entry a turn

    @property
    def cells(self) -> list[list[float] | str]:
        parse, decide, legs, learn = (self.stages_us[stage] for stage in STAGES)
        decision = list(map(add, parse, decide))
        target = f"<= {DECISION_TARGETS_US[self.name]}" if self.name in DECISION_TARGETS_US else ""
        return [parse, decide, decision, target, legs, learn, list(map(add, decision, map(add, legs, learn)))]


async def play(one: TurnBench, name: str, rounds: int, first: int) -> TimedTurns:
    """The last turns of `rounds` conversations, numbered from `first`, one right after the other as in a busy proxy."""
    row = TimedTurns(name, Counter(), {stage: [] for stage in STAGES})
    batch = max(1, BATCH_BYTES // SIZES[name][0])
    for start in range(first, first + rounds, batch):
        numbers = range(start, min(start + batch, first + rounds))
        bodies = [(number, *conversation(number, *SIZES[name], one.tools)) for number in numbers]
        for number, earlier, _ in bodies:
            if earlier is not None:
                await asyncio.create_task(one.turn(earlier, number))
        for number, _, last in bodies:
            row.kinds[await asyncio.create_task(one.turn(last, number))] += 1
            for stage, times_us in row.stages_us.items():
                times_us.append(one.watch.spent_us[stage])
    return row


async def measure(sessions: int, rounds: int, tools: int) -> tuple[list[TimedTurns], dict[str, dict[str, float]]]:
    one, rows = bench(tools), []
    await play(one, "200 B", sessions, 10**6)
    gc.freeze()  # so that no collection walks through the session table while a turn is timed
    for at, name in enumerate(SIZES, start=1):
        await play(one, name, WARM_UP, at * 10**7)
        rows.append(await play(one, name, rounds, at * 10**7 + WARM_UP))
    return rows, {name: await parts(one, name, at) for at, name in enumerate(SIZES)}


async def parts(one: TurnBench, name: str, number: int) -> dict[str, float]:
    """Median microseconds of single steps of a last turn, each repeated, so with warm caches."""
    earlier, last = conversation(number, *SIZES[name], one.tools)
    if earlier is not None:
        await one.turn(earlier, number)
    state, rules, request = one.proxy.state, one.proxy.chooser.rules, one.parse(last)
    now_s = state.now()
    place = state.sessions.find(request.prompt, now_s)
    held = holders(state, request, place)
    turn = Turn(
        model=request.model,
        session_id=place.session_id,
        number=place.turn,
        prompt_tokens=place.held_tokens + place.new_bytes // 4,
        held_tokens=place.held_tokens,
        output_tokens=64,
        held=held(),
        decode=None if place.decode is None else place.decode.worker,
    )
    decision = decide(turn, state.registry.fleet(turn.model), rules, qps=1.0, now_s=now_s)
    worker = decision.decode.id
    outcome = TurnOutcome(
        prompt_tokens=900,
        completion_tokens=20,
        reply_key=ReplyKey(request).key(),
        decode=state.beliefs.residency(worker, 920),
    )

    def observe() -> None:
        AnswerObserver(request.endpoint, ReplyKey(request)).observe_body(ANSWER)

    def reserve() -> None:
        state.registry.release(worker, state.registry.reserve(worker, 100))

    steps: dict[str, Callable[[], object]] = {
        "parse_request": lambda: one.parse(last),
        "find": lambda: state.sessions.find(request.prompt, now_s),
        "held": held,
        "has_room": lambda: has_room(state.registry.fleet(request.model), rules),
        "decide": lambda: decide(turn, state.registry.fleet(turn.model), rules, qps=1.0, now_s=now_s),
        "plain leg": lambda: plain_leg(request.endpoint, request.fields, "id"),
        "reserve, release": reserve,
        "read the answer": observe,
    }
    times_us = {step: _median_us(call) for step, call in steps.items()}
    return times_us | {"finish": finish_us(state, request.prompt, outcome)}


def finish_us(state: State, prompt: Prompt, outcome: TurnOutcome) -> float:
    """Each time of the turn as it is first found: once it has ended, the same match would be another session's."""
    sessions, now_s = state.sessions, state.now()
    first = match = sessions.find(prompt, now_s)
    known = sessions.of_history(match.history)
    before, keys = (None, []) if known is None else (replace(known), sessions.lookup_keys(known)[1])

    def find_again() -> None:
        nonlocal match
        if before is None:
            sessions.drop(match.session_id)
        else:
            sessions.adopt(replace(before), None, keys)
        match = sessions.find(prompt, now_s)
        assert match.kind is first.kind, "as if the turn had not ended"

    return _median_us(lambda: sessions.finish(match, prompt, outcome, now_s), find_again)


def holders(state: State, request: Request, place: SessionMatch) -> Callable[[], Mapping[WorkerId, Held]]:
    entry = PromptEntry(place.history, place.source, marks_of_prompt(request.prompt, 900), place.decode)
    return lambda: state.beliefs.held(state.registry.fleet(request.model).views, entry, place.held_tokens)


def _median_us(call: Callable[[], object], prepare: Callable[[], None] = lambda: None, calls: int = 300) -> float:
    times_us = []
    for _ in range(calls):
        prepare()
        started_ns = time.perf_counter_ns()
        call()
        times_us.append((time.perf_counter_ns() - started_ns) / 1000)
    return percentile(times_us, 0.5)


def show(rows: Sequence[TimedTurns]) -> None:
    _table(
        ["body", "turns", "parse", "to decision", "decision", "target", "legs", "answer, learning", "turn"],
        [
            [
                row.name,
                ", ".join(f"{count} {kind}" for kind, count in row.kinds.items()),
                *(cell if isinstance(cell, str) else _cell(cell) for cell in row.cells),
            ]
            for row in rows
        ],
    )


def show_parts(found: dict[str, dict[str, float]]) -> None:
    steps = next(iter(found.values()))
    _table(["step", *found], [[step, *(f"{times_us[step]:.1f}" for times_us in found.values())] for step in steps])


def _table(head: list[str], rows: list[list[str]]) -> None:
    for cells in (head, ["---"] * len(head), *rows):
        click.echo(f"| {' | '.join(cells)} |")


def _cell(times_us: Sequence[float]) -> str:
    return f"{percentile(times_us, 0.5):.0f} / {percentile(times_us, 0.99):.0f}"


# -- decisions alone, on fleets of any size

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
        if decision is None:
            turns.bookings.popleft().release(turns.now_s)
        else:
            turns.carry_out(turn, decision)
    return times_us


def show_fleets(modes: Sequence[Mode], decisions: int, repeats: int) -> None:
    click.echo(f"us of processor time, mean / p99 of {decisions} decisions, each the least of {repeats}\n")
    rows = []
    for mode in modes:
        cells = []
        for name, workers in TOPOLOGIES.items():
            turns = DecidedTurns(mode, *workers)
            decision_times_us(turns, LEGS * sum(workers))
            gc.freeze()
            times_us, limit_us = (
                decision_times_us(turns, decisions, repeats),
                FLEET_LIMITS_US.get(name, FEW_WORKERS_LIMIT_US),
            )
            mean_us, p99_us = sum(times_us) / len(times_us), percentile(times_us, 0.99)
            missed = ", missed" if mean_us > limit_us or p99_us > 3 * limit_us else ""
            cells.append(f"{mean_us:.0f} / {p99_us:.0f}{missed}")
        rows.append([mode.value, *cells])
    _table(["mode", *TOPOLOGIES], rows)


@click.command(help=__doc__)
@click.option("--fleets", is_flag=True, help="Time `decide` alone, by mode and fleet.")
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice([mode.value for mode in TIMED_MODES]),
    help="With --fleets: only these.",
)
@click.option("--decisions", default=10_000, show_default=True, help="With --fleets: in each mode on each fleet.")
@click.option("--repeats", default=5, show_default=True, help="With --fleets: of each decision.")
@click.option("--sessions", default=10_000, show_default=True, help="Known before the first timed turn.")
@click.option("--rounds", default=1000, show_default=True, help="Timed turns of each size.")
@click.option("--tools", default=0, show_default=True, help="In each body.")
def main(
    fleets: bool, modes: Sequence[str], decisions: int, repeats: int, sessions: int, rounds: int, tools: int
) -> None:
    if fleets:
        show_fleets([Mode(mode) for mode in modes or TIMED_MODES], decisions, repeats)
        return
    rows, steps = asyncio.run(measure(sessions, rounds, tools))
    click.echo(f"us, median / p99 of {rounds} turns, with {sessions} sessions known; decision = parse + to decision\n")
    show(rows)
    click.echo("\nus, medians of single steps with warm caches\n")
    show_parts(steps)


if __name__ == "__main__":
    main()
