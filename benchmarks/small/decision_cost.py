"""What a turn costs without its sockets: microseconds of Python from body to decision, and from there to the end.

    python -m benchmarks.small.decision_cost

The router, the dispatcher and all state are real; the worker's answer comes from memory, and the mode is `table`. A
conversation's earlier turn is played first and not timed, so that its last one is found among `--sessions` others.
`--tools` adds so many tools of 600 bytes, and a system's text, to each body.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from random import Random

import click
import msgspec
from msgspec.structs import replace

from ppd.offline.experiment.statistics import percentile
from ppd.proxy.beliefs.held import Held, PromptEntry
from ppd.proxy.connectors import plain_leg
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Request
from ppd.proxy.policy import Turn, decide, has_room
from ppd.proxy.routing.state import State
from ppd.proxy.sessions.session import Prompt, marks_of_prompt
from ppd.proxy.sessions.table import SessionMatch, SessionTable, TurnOutcome

from .proxy_here import ANSWER, MODEL, REPLY, TurnBench, bench

SIZES = {"200 B": (200, 1), "400 B": (400, 3), "2 KB": (2_000, 3), "130 KB": (130_000, 5), "600 KB": (600_000, 9)}
STAGES = ("parse", "decide", "legs", "learn")
DECISION_TARGETS_US = {"2 KB": 50, "130 KB": 250}  # limits from the body to the decision
WARM_UP = 30
BATCH_BYTES = 16_000_000
BATCH = 100  # conversations whose last turns follow their first ones: the caches hold all of them
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
    batch = max(1, min(BATCH, BATCH_BYTES // SIZES[name][0]))
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
        state.registry.release(worker, state.registry.reserve(worker))

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
    if before is None:  # in a table of its own: to drop it looks at all sessions, after which no cache is warm
        sessions = SessionTable(ttl_s=3600.0, capacity=2, beliefs=state.beliefs)

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
    show_table(
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
    show_table(["step", *found], [[step, *(f"{times_us[step]:.1f}" for times_us in found.values())] for step in steps])


def show_table(head: list[str], rows: list[list[str]]) -> None:
    for cells in (head, ["---"] * len(head), *rows):
        click.echo(f"| {' | '.join(cells)} |")


def _cell(times_us: Sequence[float]) -> str:
    return f"{percentile(times_us, 0.5):.0f} / {percentile(times_us, 0.99):.0f}"


@click.command(help=__doc__)
@click.option("--sessions", default=10_000, show_default=True, help="Known before the first timed turn.")
@click.option("--rounds", default=1000, show_default=True, help="Timed turns of each size.")
@click.option("--tools", default=0, show_default=True, help="In each body.")
def main(sessions: int, rounds: int, tools: int) -> None:
    rows, steps = asyncio.run(measure(sessions, rounds, tools))
    click.echo(f"us, median / p99 of {rounds} turns, with {sessions} sessions known; decision = parse + to decision\n")
    show(rows)
    click.echo("\nus, medians of single steps with warm caches\n")
    show_parts(steps)


if __name__ == "__main__":
    main()
