"""What a turn costs without its sockets: microseconds of Python from body to decision, and from there to the end.

    python -m benchmarks.small.decision_cost

The router, the dispatcher and all state are real; the worker's answer comes from memory, and the mode is `table`. A
conversation's earlier turn is played first and not timed, so that its last one is found among `--sessions` others.
`--tools` adds so many tools of 600 bytes, and a system's text, to each body.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from random import Random
from typing import Any, cast

import click
import msgspec

from ppd.offline.experiment.statistics import percentile
from ppd.proxy.admission.keys import Client
from ppd.proxy.assembly import Proxy, assemble, make_canary
from ppd.proxy.beliefs.held import Held, PromptEntry
from ppd.proxy.config import ProxyConfig
from ppd.proxy.connectors import plain_leg
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint, ReadingRules, Request, parse_request
from ppd.proxy.policy import Turn, decide, has_room
from ppd.proxy.routing.attempt import TurnContext
from ppd.proxy.routing.dispatch import Dispatcher
from ppd.proxy.routing.handoff_release import HandoffRelease
from ppd.proxy.routing.learning import Learner
from ppd.proxy.routing.router import Router
from ppd.proxy.routing.state import State
from ppd.proxy.runtime.tasks import Drain
from ppd.proxy.sessions.session import marks_of_prompt
from ppd.proxy.sessions.table import SessionMatch, TurnOutcome
from ppd.proxy.settings import Settings
from ppd.proxy.telemetry.receipts import Receipt

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
WORKERS = tuple(f"{role}=10.0.{net}.{n}:8000,model={MODEL}" for net, role in enumerate("PD") for n in range(1, 5))
SIZES = {"200 B": (200, 1), "400 B": (400, 3), "2 KB": (2_000, 3), "130 KB": (130_000, 5), "600 KB": (600_000, 9)}
STAGES = ("parse", "decide", "legs", "learn")
DECISION_TARGETS_US = {"2 KB": 50, "130 KB": 250}  # limits from the body to the decision
WARM_UP = 30
BATCH_BYTES = 16_000_000
REPLY = "The answer is forty-two, as far as anybody can tell; shall I go on? "
SYSTEM = {"role": "system", "content": "You look for what you are asked for. " * 50}
CONTEXT = TurnContext(Client(name="", tenant=""), {"content-type": "application/json"})


class StageStopwatch:
    """Microseconds that one turn spends in each stage."""

    def start(self) -> None:
        self.spent_us: defaultdict[str, float] = defaultdict(float)
        self._since_ns = time.perf_counter_ns()

    def lap(self, stage: str) -> None:
        now_ns = time.perf_counter_ns()
        self.spent_us[stage] += (now_ns - self._since_ns) / 1000
        self._since_ns = time.perf_counter_ns()


PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(64))],
    "remote_engine_id": "0b4d6d5a-8a8e-4d61-9a4e-0f7c1d1f2a3b",
    "remote_request_id": "chatcmpl-6f0d9a5e4c9b4b6e8e9d1c2b3a4f5e6d",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


def _answer(**members: object) -> bytes:
    return msgspec.json.encode(
        {
            "id": "chatcmpl-6f0d9a5e4c9b4b6e8e9d1c2b3a4f5e6d",
            "object": "chat.completion",
            "created": 1_760_000_000,
            "model": MODEL,
            "choices": [{"index": 0, "message": {"role": "assistant", "content": REPLY}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 900, "completion_tokens": 20, "total_tokens": 920},
            **members,
        }
    )


ANSWER, HANDOFF = _answer(), _answer(kv_transfer_params=PARAMS)


class MemoryAnswer:
    """A worker's whole answer, without waiting."""

    status = 200
    content_type = "application/json"
    retry_after_s = 0.0
    is_event_stream = False

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def body(self) -> bytes:
        return self._body

    async def parts(self) -> AsyncIterator[bytes]:
        yield self._body

    def relayed(self, _rules: object) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


class MemoryUpstream:
    """Stands in for `Upstream`; P's answers hold a handoff."""

    uptime = staticmethod(time.monotonic)

    def __init__(self, watch: StageStopwatch) -> None:
        self._watch = watch
        self.uptime = time.monotonic

    async def ask(self, _call: object, _path: str, **_leg: object) -> MemoryAnswer:
        self._watch.lap("legs")
        return MemoryAnswer(ANSWER)

    @contextlib.asynccontextmanager
    async def answer(self, _call: object, _path: str, **_leg: object) -> AsyncIterator[MemoryAnswer]:
        self._watch.lap("legs")
        yield MemoryAnswer(HANDOFF)


@dataclass(frozen=True, slots=True)
class TurnBench:
    """One proxy without sockets."""

    proxy: Proxy
    router: Router
    tools: int
    watch: StageStopwatch

    def parse(self, body: bytes) -> Request:
        return parse_request(
            Endpoint.CHAT,
            body,
            {},
            ReadingRules(hasher=self.proxy.state.hasher, tenant="", session_key=self.proxy.settings.config.session_key),
        )

    async def turn(self, body: bytes, number: int) -> str:
        """Plays a turn as `app` does; returns its kind and route."""
        self.watch.start()
        request = await self.proxy.bodies.turn(Endpoint.CHAT, {}, CONTEXT.client, body)
        self.watch.lap("parse")
        receipt = Receipt(
            id=f"{number:032x}",
            at="2026-01-01T00:00:00.000+00:00",
            endpoint=Endpoint.CHAT.value,
            model=request.model,
            stream=request.stream,
            session="",
            turn=0,
            kind="",
        )
        await self.router.answer(request, receipt, CONTEXT)
        self.watch.lap("learn")
        return f"{receipt.kind} {receipt.route}"


class WatchedDispatcher(Dispatcher):
    """Ends the stage `decide` when it is given a decision."""

    watch: StageStopwatch

    async def open(self, running: Any) -> Any:
        self.watch.lap("decide")
        return await super().open(running)


def bench(tools: int) -> TurnBench:
    settings, watch = Settings(ProxyConfig(workers=WORKERS, heartbeat_port=0)), StageStopwatch()
    proxy = assemble(settings)
    state, upstream = proxy.state, cast(Any, MemoryUpstream(watch))
    for worker in settings.static_workers:
        state.registry.add_static(worker, state.now())
        state.registry.probed(worker.id, worker, None, state.now())
    dispatcher = WatchedDispatcher(
        settings.config,
        upstream,
        HandoffRelease(state, upstream),
        ledger=state.ledger,
        admission=state.admission,
        metrics=state.metrics,
        bodies=proxy.bodies,
        session_id=state.engine_caches.session_id,
        now=state.now,
    )
    dispatcher.watch = watch
    canary = make_canary(settings.config, state, upstream)
    router = Router(
        settings.config,
        settings.rules(),
        state,
        dispatcher,
        Learner(state, Drain(), None),
        passed_over=canary.passed_over,
        examine=proxy.upstream.examine,
    )
    return TurnBench(proxy, router, tools, watch)


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
    state, rules, request = one.proxy.state, one.router.rules, one.parse(last)
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
        state.registry.reserve(worker, 100)
        state.registry.release(worker)

    steps: dict[str, Callable[[], object]] = {
        "parse_request": lambda: one.parse(last),
        "find": lambda: state.sessions.find(request.prompt, now_s),
        "held": held,
        "has_room": lambda: has_room(state.registry.fleet(request.model), rules),
        "decide": lambda: decide(turn, state.registry.fleet(turn.model), rules, qps=1.0, now_s=now_s),
        "plain leg": lambda: plain_leg(request.endpoint, request.fields, "id"),
        "reserve, release": reserve,
        "read the answer": observe,
        "finish": lambda: state.sessions.finish(place, request.prompt, outcome, now_s),
    }
    return {step: _median_us(call) for step, call in steps.items()}


def holders(state: State, request: Request, place: SessionMatch) -> Callable[[], Mapping[WorkerId, Held]]:
    entry = PromptEntry(place.history, place.source, marks_of_prompt(request.prompt, 900), place.decode)
    return lambda: state.beliefs.held(state.registry.fleet(request.model).views, entry, place.held_tokens)


def _median_us(call: Callable[[], object], calls: int = 300) -> float:
    times_us = []
    for _ in range(calls):
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
