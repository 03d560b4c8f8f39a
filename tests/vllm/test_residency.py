"""What the proxy says that an engine holds, beside what the engine finds, where sessions evict each other.

And the texts, what is moved, and what is computed there, in four modes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.eviction.conversations import AskedTurn, Shape, asked_turns
from benchmarks.eviction.engines import COUNTS_EVICTIONS
from benchmarks.eviction.modes import ModeRecord, play_mode
from benchmarks.eviction.play import Player
from benchmarks.eviction.report import needed_tokens
from ppd.proxy.beliefs.held import BeliefEvidence
from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import Role, WorkerId
from ppd.servers.fleet.ports import free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.launch import TINY_ARGS, TINY_NAME, EngineSpec, command
from tests.support.fleet import proxy_before
from tests.support.proxy import ADMIN_KEY, Chat, ProxyClient
from tests.vllm.nursery.launches import Born

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 32  # tokens, the least on CPUs
BLOCKS = 64
FEW_BLOCKS = ("--max-model-len", str(BLOCK * (BLOCKS - 1)), "--num-gpu-blocks-override", str(BLOCKS))
SESSIONS, TURNS = 5, 40
LONGEST = 1100  # tokens; then the session starts over
QUIET_S = 0.05  # vLLM publishes from a thread of its own, which may be later than the answer
LINE = "Now {} more friends agreed to join us in the {} bus. Does this change our mode of transportation, and how? "
OWN_TURNS, KV_EVENTS = BeliefEvidence.OWN_TURNS, BeliefEvidence.KV_EVENTS
serial = itertools.count()
SHAPE = Shape(conversations=8, turns=4, first_tokens=(250, 400), later_tokens=(60, 160), answer_tokens=24)
KV_BYTES = 3072  # of a token of the tiny model
MODES = (Mode.TABLE, Mode.ALWAYS_LOCAL, Mode.ALWAYS_SPLIT, Mode.SLO)


@dataclass
class TightEngine:
    """Its KV cache has room for two or three of the sessions here. One engine is a D or an R as a proxy names it."""

    spec: EngineSpec
    stack: AsyncExitStack
    logs: Path
    process: EngineProcess
    born: Born
    starts: int = 0

    async def start(self) -> None:
        self.starts += 1
        process = EngineProcess(self.born(command(self.spec)), self.logs / f"tight-{self.starts}.log", name="tight")
        self.process = await self.stack.enter_async_context(process)
        await process.wait_healthy(f"http://{self.spec.address}", timeout_s=600)

    def worker(self, evidence: BeliefEvidence) -> str:
        """A static worker's address. Where it publishes events it says itself."""
        return self.spec.address + (",events=none" if evidence is OWN_TURNS else "")


@dataclass(frozen=True)
class Finding:
    """What one turn claimed, and what the engine found."""

    claimed: int
    evidence: str
    cached: int
    prompt: int

    @property
    def harms(self) -> bool:
        return 2 * self.cached < self.claimed

    def is_within(self, tokens: int) -> bool:
        return abs(self.claimed - self.cached) <= tokens


@dataclass
class Sessions(ProxyClient):
    """Conversations through one proxy before one engine."""

    engine: str = ""
    salt: str = ""
    chats: list[Chat] = field(default_factory=list)
    asked: list[tuple[list[dict[str, Any]], str]] = field(default_factory=list)  # with the answer

    async def say(self, number: int) -> Finding:
        """The next turn of this session."""
        while len(self.chats) <= number:
            self.chats.append(self.conversation())
        chat, turn = self.chats[number], len(self.asked)
        text = f"{number}: {LINE.format(turn, 'first' if turn % 2 else 'second')}" * (1 + turn % 2)
        answer = await chat.say(text, cache_salt=self.salt)
        assert (answer.status, answer.route) in ((200, "LOCAL"), (200, "REPLICA")), answer.body
        self.asked.append((list(chat.messages[:-1]), answer.text))
        receipt, usage = await self.receipt(answer), answer.body["usage"]
        if usage["prompt_tokens"] > LONGEST:
            self.chats[number] = self.conversation()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Finding(receipt["estimated_cached_tokens"], receipt["cached_evidence"], cached, usage["prompt_tokens"])

    async def straight(self, messages: list[dict[str, Any]]) -> str:
        """What the engine answers without a proxy and without anything cached; and it evicts what others use."""
        body = {"model": self.model, "messages": messages, "max_tokens": 24, "temperature": 0}
        body["cache_salt"] = f"straight-{next(serial)}"
        async with self.session.post(f"http://{self.engine}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            text: str = (await response.json())["choices"][0]["message"]["content"]
            return text

    async def check_texts(self) -> None:
        for messages, text in self.asked:
            assert text == await self.straight(messages)

    async def heard(self) -> None:
        """Nothing more comes of what the engine has published."""
        async with asyncio.timeout(60):
            taken, before = self._batches(), -1
            while taken != before or taken < 0:
                await asyncio.sleep(QUIET_S)
                taken, before = self._batches(), taken

    def _batches(self) -> int:
        """-1 while the engine is not heard."""
        streams = list(self.proxy.state.engine_caches.streams(WorkerId(self.engine)))
        return -1 if not streams or streams[0].is_behind else streams[0].expected or 0

    def incarnation(self) -> str:
        [view] = self.proxy.state.registry.views()
        return view.incarnation if view.state == "up" else ""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    tiny_spec: Callable[[Role], EngineSpec],
    born: Born,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[TightEngine]:
    events, replay = free_ports(2)
    spec = replace(
        tiny_spec(Role.REPLICA),
        kv_events_port=events,
        kv_replay_port=replay,
        extra_args=(*TINY_ARGS, *FEW_BLOCKS, *COUNTS_EVICTIONS),
    )
    logs = tmp_path_factory.mktemp("tight")
    async with AsyncExitStack() as stack:
        tight = TightEngine(spec, stack, logs, EngineProcess(command(spec), logs / "none.log"), born)
        await tight.start()
        yield tight


@asynccontextmanager
async def sessions(engine: TightEngine, role: Role, evidence: BeliefEvidence) -> AsyncIterator[Sessions]:
    """Of a D without any P each turn is LOCAL."""
    mode = Mode.REPLICA if role is Role.REPLICA else Mode.ALWAYS_LOCAL
    workers = [(role, engine.worker(evidence))]
    async with proxy_before(workers, limit_s=60, mode=mode, probe_interval_s=0.5) as running:
        yield Sessions(*running, TINY_NAME, engine.spec.address, f"residency-{next(serial)}")


def visits() -> list[int]:
    """Which session speaks: some often, some after many others."""
    random = Random(3)
    return [min(int(random.expovariate(0.7)), SESSIONS - 1) for _ in range(TURNS)]


def check_claims(found: list[Finding], evidence: BeliefEvidence, tokens: int) -> None:
    """One turn in twenty may err, by more than so many tokens."""
    claims = [one for one in found if one.claimed]
    assert {one.evidence for one in claims} == {evidence}
    assert len(claims) >= TURNS // 4
    assert sum(one.cached == 0 and one.prompt > LONGEST // 2 for one in found) >= TURNS // 10, "nothing was evicted"
    assert sum(one.harms for one in claims) <= len(claims) // 20, found
    assert sum(not one.is_within(tokens) for one in found) <= TURNS // 20, found


async def test_own_turns_tell_what_an_engine_keeps(engine: TightEngine) -> None:
    async with sessions(engine, Role.DECODE, OWN_TURNS) as some:
        found = [await some.say(number) for number in visits()]
        # Whole blocks are cached, and the book knows of those that have 16 tokens.
        check_claims(found, OWN_TURNS, 2 * BLOCK)  # the texts: in four modes below


async def test_events_tell_what_an_engine_keeps_whoever_uses_it(engine: TightEngine) -> None:
    async with sessions(engine, Role.REPLICA, KV_EVENTS) as some:
        found = []
        for turn, number in enumerate(visits()):
            if turn % 5 == 4:
                await some.straight([{"role": "user", "content": f"{turn} of another client. " * 20}])
            await some.heard()
            found.append(await some.say(number))
        check_claims(found, KV_EVENTS, BLOCK)
        await some.check_texts()
        assert await some.metric('ppd_kv_event_gaps_total{result="open"}') == 0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def asked(fleet: Any) -> tuple[AskedTurn, ...]:
    """With the texts of an engine that has room for all, and computes each prompt from its first token on."""

    async def straight(messages: list[dict[str, str]]) -> str:
        text: str = await fleet.straight(Role.REPLICA, messages, max_tokens=SHAPE.answer_tokens, cache_salt=salt())
        return text

    return await asked_turns(SHAPE, 0, straight)


def salt() -> str:
    return f"evicting-{next(serial)}"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def in_modes(fleet: Any, engine: TightEngine, asked: tuple[AskedTurn, ...]) -> dict[Mode, ModeRecord]:
    """The same conversations in four modes, with the tight engine as the only D."""
    urls = {"P1": fleet.urls[Role.PREFILL], "D1": f"http://{engine.spec.address}"}
    workers = [(Role.PREFILL, fleet.specs[Role.PREFILL].address), (Role.DECODE, engine.worker(OWN_TURNS))]
    found = {}
    for mode in MODES:
        settings = {"mode": mode, "profile": "h100-llama-3.1-8b", "probe_interval_s": 0.5}
        async with proxy_before(workers, limit_s=60, **settings) as (_, base_url, session):
            player = Player(session, base_url, TINY_NAME, SHAPE.answer_tokens, salt(), ADMIN_KEY)
            found[mode] = await play_mode(mode, player, asked, 2, urls)
    return found


@pytest.mark.parametrize("mode", MODES)
async def test_texts_are_right_and_beliefs_hold_where_conversations_evict_each_other(
    in_modes: dict[Mode, ModeRecord], mode: Mode
) -> None:
    record = in_modes[mode]
    on_d, turns = record.engines["D1"], len(record.turns)
    assert [turn for turn in record.turns if not turn.is_right] == []
    assert needed_tokens(record.turns) > 2 * BLOCK * BLOCKS
    assert on_d.evicted_blocks > BLOCKS
    assert on_d.pulled + on_d.computed > 1.2 * record.new_tokens, "what was evicted had to come again"
    assert record.refuted <= turns // 10, record.turns
    # Whole blocks are cached, and the book knows of those that have 16 tokens. A turn in twenty may find all evicted.
    assert on_d.hit / 2 < record.claimed_tokens < on_d.hit + 2 * BLOCK * turns + LONGEST * turns // 20


@pytest.mark.parametrize("mode", MODES)
async def test_engines_count_each_prompt_once_and_move_what_splits_need(
    in_modes: dict[Mode, ModeRecord], mode: Mode
) -> None:
    record = in_modes[mode]
    on_p, on_d = record.engines["P1"], record.engines["D1"]
    split = [turn for turn in record.turns if turn.route == "SPLIT"]
    assert on_d.prompts == record.prompt_tokens
    assert on_p.prompts == sum(turn.prompt_tokens for turn in split)
    moved = on_d.moved_bytes / KV_BYTES
    assert on_d.pulled <= moved <= on_d.pulled + BLOCK * len(split), "whole blocks are moved"
    alone = sum(turn.prompt_tokens - turn.cached_tokens for turn in record.turns if turn.route == "LOCAL")
    assert alone <= on_d.computed <= alone + BLOCK * len(split)


async def test_local_turns_spare_what_splits_move(in_modes: dict[Mode, ModeRecord]) -> None:
    local, split = in_modes[Mode.ALWAYS_LOCAL], in_modes[Mode.ALWAYS_SPLIT]
    assert split.routes == {"SPLIT": len(split.turns)}
    assert local.routes["LOCAL"] >= len(local.turns) // 3
    assert local.engines["D1"].moved_bytes < split.engines["D1"].moved_bytes
    assert local.engines["P1"].computed < split.engines["P1"].computed
    assert local.engines["D1"].computed > split.engines["D1"].computed


def is_another(some: Sessions, old: str) -> bool:
    return some.incarnation() not in ("", old)


async def test_a_d_that_was_started_again_is_claimed_to_hold_nothing(engine: TightEngine) -> None:
    async with (
        sessions(engine, Role.DECODE, OWN_TURNS) as believing,
        sessions(engine, Role.DECODE, KV_EVENTS) as hearing,
    ):
        await hearing.heard()
        for some in (believing, hearing):
            await some.say(0)
            assert (await some.say(0)).claimed > 0
        was = [some.incarnation() for some in (believing, hearing)]
        await engine.process.kill()
        await engine.start()
        for some, old in zip((believing, hearing), was, strict=True):
            await some.until(partial(is_another, some, old), limit_s=60)
            first = await some.say(0)
            assert (first.claimed, first.cached) == (0, 0)
        for some, evidence in ((believing, OWN_TURNS), (hearing, KV_EVENTS)):
            await hearing.heard()
            again = await some.say(0)
            assert again.evidence == evidence
            assert again.is_within(2 * BLOCK)
        for some in (believing, hearing):
            await some.check_texts()
