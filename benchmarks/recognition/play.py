"""Sessions played in virtual time, a fixed number at once: one record of each turn, with belief and truth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from random import Random

import msgspec

from ppd.proxy.errors import AllBusy
from ppd.proxy.fleet.worker import Role
from ppd.proxy.policy import Route

from .engines.block_cache import BLOCK_TOKENS, block_keys, known_blocks
from .engines.kv_events import EventSetup
from .engines.workers import Job, TimedWorker, VirtualTime, fleet
from .requests import Asked
from .routing import Placed, Routing, Usage
from .routings import ROUTINGS
from .templates import Template, written
from .tokens import Tokenizer, common, count

BUSY_S = 1.0  # until a turn that found every worker busy tries again
STAGGER_S = 0.4  # between the first requests of the sessions that open a run


class TurnRecord(msgspec.Struct, kw_only=True):
    """One turn. Tokens of the prompt, unless the name says otherwise."""

    session: int
    number: int  # in its session, 1-based
    follows: bool  # some of it was sent before in its session
    is_users: bool  # it ends in a user's message, not in a tool's result
    route: Route
    decode: str
    kind: str = ""  # how the proxy recognised the session
    claimed: int | None = None  # believed to be held by the worker that answers; None: nothing is believed
    believed_prompt: int = 0
    believed_output: int = 0
    prompt: int
    best: int  # held by the worker that holds most, as the turn was decided
    chosen: int  # held then by the worker that answers
    possible: int  # held if no worker ever forgot, and each knew what all know
    held: int = 0  # found by the worker that answers
    computed: int = 0  # by P, or by the worker that answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """How an engine reads conversations."""

    tokenizer: Tokenizer
    template: Template


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetup:
    """One fleet under one routing."""

    shape: str  # as 2P_2D
    capacity_tokens: int  # of each worker
    routing: str = "ppd"
    at_once: int = 24  # sessions
    events: EventSetup | None = None  # of its engines; None: they publish none
    key: int = 0  # with another one sessions begin at other moments, and ties between workers are broken otherwise


class Play:
    def __init__(self, sessions: Iterable[Iterable[Asked]], language: Language, setup: FleetSetup) -> None:
        self.time = VirtualTime()
        self.workers = fleet(setup.shape, setup.capacity_tokens, self.time, setup.events)
        self.records: list[TurnRecord] = []
        self._language = language
        self._stack = ExitStack()  # what the routing started
        self._routing: Routing = ROUTINGS[setup.routing](self.time, self.workers, self._stack, setup.key)
        self._answering = [worker for worker in self.workers if worker.role is not Role.PREFILL]
        self._sessions = iter(sessions)
        self._seen: set[int] = set()  # keys of all blocks that any worker has had
        self._last: dict[int, tuple[bytes, list[int]]] = {}  # tokens and keys of each session's last request
        self._begun = 0
        moments = Random(setup.key)
        for place in range(setup.at_once):
            early_s = moments.random() * STAGGER_S if setup.key and place else 0.0
            self.time.after(place * STAGGER_S - early_s, self._open)

    def run(self) -> Sequence[TurnRecord]:
        with self._stack:
            self.time.run()
        return self.records

    def _open(self) -> None:
        for session in islice(self._sessions, 1):
            self._begun += 1
            self._turn(iter(session), self._begun, 1)

    def _turn(self, session: Iterator[Asked], number: int, turn: int) -> None:
        asked = next(session, None)
        if asked is None:
            self._last.pop(number, None)
            self._open()
            return
        if turn == 1:
            self._ask(asked, session, number, turn)
        else:
            self.time.after(asked.think_s, lambda: self._ask(asked, session, number, turn))

    def _ask(self, asked: Asked, session: Iterator[Asked], number: int, turn: int) -> None:
        run = self._language.tokenizer(self._language.template(asked.messages, asked.tools, True))
        reply = self._language.tokenizer(written(self._language.template, asked.messages, asked.tools, asked.reply))
        prompt_tokens, output_tokens = count(run), count(reply)
        whole = self._keys(number, run + reply[:-4])  # the last token of an answer was never an input
        keys = whole[: prompt_tokens // BLOCK_TOKENS]
        try:
            placed = self._routing.place(asked, keys, prompt_tokens)
        except AllBusy:  # it waits, as in the proxy's queue
            self.time.after(BUSY_S, lambda: self._ask(asked, session, number, turn))
            return
        record = self._record(asked, placed, keys, prompt_tokens)
        record.session, record.number = number, turn

        def ended() -> None:
            self._seen.update(whole)
            self.records.append(record)
            cached = prompt_tokens - record.computed
            record.possible = max(record.possible, cached)  # it came while another computed the same
            usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=output_tokens, cached_tokens=cached)
            placed.completed(usage)
            self._turn(session, number, turn + 1)

        job = Job(keys=keys, whole=whole, prompt_tokens=prompt_tokens, output_tokens=output_tokens, ended=ended)
        self._start(job, placed, record)

    def _keys(self, session: int, tokens: bytes) -> list[int]:
        """Of all blocks; those that the session's last request had too are not hashed again."""
        before, known = self._last.get(session, (b"", []))
        keys = block_keys(tokens, known[: common(before, tokens) // BLOCK_TOKENS])
        self._last[session] = tokens, keys
        return keys

    def _start(self, job: Job, placed: Placed, record: TurnRecord) -> None:
        def began(cached: int) -> None:
            record.held = cached
            if placed.prefill is None:
                record.computed = job.prompt_tokens - cached
            placed.answering()

        job.began, job.session = began, placed.session
        if placed.prefill is None:
            placed.decode.ask(job)
            return

        def prefilled(cached: int) -> None:
            record.computed = job.prompt_tokens - cached
            placed.prefilled(cached)
            job.is_pulled = True
            placed.decode.ask(job)

        leg = Job(keys=job.keys, whole=job.keys, prompt_tokens=job.prompt_tokens, output_tokens=1, began=prefilled)
        leg.session = placed.session
        placed.prefill.ask(leg)

    def _record(self, asked: Asked, placed: Placed, keys: Sequence[int], prompt_tokens: int) -> TurnRecord:
        findable = keys[: (prompt_tokens - 1) // BLOCK_TOKENS]
        seen = known_blocks(findable, self._seen.__contains__)
        belief = placed.belief
        return TurnRecord(
            session=0,
            number=0,
            follows=asked.follows,
            is_users=asked.messages[-1]["role"] == "user",
            route=placed.route,
            decode=placed.decode.name,
            kind=belief.kind if belief else "",
            claimed=belief.claimed_tokens if belief else None,
            believed_prompt=belief.prompt_tokens if belief else 0,
            believed_output=belief.output_tokens if belief else 0,
            prompt=prompt_tokens,
            best=max(worker.held(keys, prompt_tokens) for worker in self._answering),
            chosen=placed.decode.held(keys, prompt_tokens),
            possible=seen * BLOCK_TOKENS,
        )


def spread(workers: Sequence[TimedWorker]) -> float:
    """The busiest answering worker's turns over the mean."""
    answers = [worker.answers for worker in workers if worker.role is not Role.PREFILL]
    return max(answers) * len(answers) / sum(answers) if any(answers) else 1.0
