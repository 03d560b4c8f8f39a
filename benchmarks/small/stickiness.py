"""How many of the possible prefix-cache hits do conversations without any id get, and how even is the load?

    python -m benchmarks.small.stickiness                        # 200 conversations, 6 turns, 4 D, every mode
    python -m benchmarks.small.stickiness --conversations 500 --turns 8

Plays conversations through a real proxy with 1 P and 4 D, simulated engines with ample KV. Some share their opener;
some turns ask for an answer again or edit an earlier message. A hit is a prompt token that the engine had cached, by
the answer's usage. The ideal is each prompt's longest common prefix with an earlier prompt and answer of the same
conversation, in whole blocks. Hits beyond it, on other conversations' KV, do not count.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any

import aiohttp
import msgspec

from ppd.proxy.config import Mode, ProxyConfig
from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.api.prompts import chat_prompt
from ppd.servers.sim.api.requests import JsonBody
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.core.tokens import encode
from ppd.servers.sim.launch import running_engine

from .proxy_here import serving

MODES = (Mode.ALWAYS_LOCAL, Mode.TABLE, Mode.FRACTION, Mode.ALWAYS_SPLIT)
DECODES = 4
BLOCK = SimConfig().block_size
ANSWER_TOKENS = 48
SHARED_OPENERS = 0.3  # share of conversations that begin with an opener which others have too
AGAIN, EDIT = 0.1, 0.1  # shares of all turns after the first
_WORDS = "tide lamp river stone letter orchard signal winter copper harbour glass engine paper north garden".split()


class StepKind(Enum):
    SAY = "say"  # continues after the last answer
    AGAIN = "again"  # asks for the last answer once more, and continues after the new one
    EDIT = "edit"  # replaces the last user message


@dataclass(frozen=True, slots=True)
class UserStep:
    kind: StepKind
    text: str


@dataclass(frozen=True, slots=True)
class UserScript:
    steps: tuple[UserStep, ...]


@dataclass(slots=True)
class Ideal:
    """A cache of one conversation's own KV, without limit."""

    block: int = BLOCK
    held: list[tuple[int, ...]] = field(default_factory=list)

    def of(self, prompt: tuple[int, ...]) -> int:
        """Cached tokens of a prompt, in whole blocks; its last token is always computed."""
        longest = max((_common(prompt, one) for one in self.held), default=0)
        return min(longest, len(prompt) - 1) // self.block * self.block

    def learn(self, tokens: tuple[int, ...]) -> None:
        """tokens: a prompt and its answer but for the last token, which was never an input."""
        self.held.append(tokens)


@dataclass(slots=True)
class Played:
    turns: int = 0
    failures: int = 0
    ideal_tokens: int = 0
    hit_tokens: int = 0
    routes: Counter[str] = field(default_factory=Counter)
    workers: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        return self.hit_tokens / self.ideal_tokens if self.ideal_tokens else 0.0

    @property
    def shares(self) -> Mapping[str, float]:
        return {name: count / self.turns for name, count in sorted(self.workers.items())}


def conversations(count: int, turns: int, seed: int) -> tuple[UserScript, ...]:
    random = Random(seed)

    def text(words: int) -> str:
        return " ".join(random.choices(_WORDS, k=words))

    shared = [text(40), "hi"]
    scripts = []
    for _ in range(count):
        opener = random.choice(shared) if random.random() < SHARED_OPENERS else text(random.randint(20, 120))
        steps = [UserStep(StepKind.SAY, opener)]
        while len(steps) < turns:
            kind = random.choices([*StepKind], weights=[1 - AGAIN - EDIT, AGAIN, EDIT])[0]
            steps.append(UserStep(kind, "" if kind is StepKind.AGAIN else text(random.randint(5, 60))))
        scripts.append(UserScript(tuple(steps)))
    return tuple(scripts)


async def play(session: aiohttp.ClientSession, base_url: str, scripts: Sequence[UserScript], at_once: int) -> Played:
    played, permits = Played(), asyncio.Semaphore(at_once)

    async def one(script: UserScript) -> None:
        async with permits:
            await _converse(session, base_url, script, played)

    await asyncio.gather(*(one(script) for script in scripts))
    return played


async def _converse(session: aiohttp.ClientSession, base_url: str, script: UserScript, played: Played) -> None:
    messages: list[dict[str, str]] = []
    ideal = Ideal()
    for step in script.steps:
        messages = _next(messages, step)
        # Sampled, so that asking again gives another answer.
        body = {"model": "sim", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 1.0}
        prompt = chat_prompt(JsonBody.decode(msgspec.json.encode(body)))
        async with session.post(f"{base_url}/v1/chat/completions", json=body) as response:
            played.turns += 1
            if response.status != 200:
                played.failures += 1
                return
            answer = await response.json()
            played.routes[response.headers["X-PPD-Route"]] += 1
            played.workers[response.headers["X-PPD-Decode"]] += 1
        text = answer["choices"][0]["message"]["content"]
        possible = ideal.of(prompt)
        played.ideal_tokens += possible
        played.hit_tokens += min(possible, _cached(answer))
        ideal.learn((*prompt, *encode(text)[:-1]))
        messages = [*messages, {"role": "assistant", "content": text}]


def _next(messages: list[dict[str, str]], step: UserStep) -> list[dict[str, str]]:
    """`messages` ends with an answer, or is empty."""
    match step.kind:
        case StepKind.AGAIN:
            return messages[:-1]
        case StepKind.EDIT:
            return [*messages[:-2], {"role": "user", "content": step.text}]
        case _:
            return [*messages, {"role": "user", "content": step.text}]


def _cached(answer: Any) -> int:
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


@asynccontextmanager
async def fleet(mode: Mode) -> AsyncIterator[str]:
    """The base URL of a proxy with 1 P and 4 D, all of them up."""
    async with AsyncExitStack() as stack:
        roles = [Role.PREFILL, *[Role.DECODE] * DECODES]
        engines = [await stack.enter_async_context(running_engine(SimConfig(role=role))) for role in roles]
        workers = tuple(f"{role}={engine.address}" for role, engine in zip(roles, engines, strict=True))
        config = ProxyConfig(port=0, heartbeat_port=0, mode=mode, workers=workers, warm_up_s=0.0, probe_interval_s=0.5)
        yield await stack.enter_async_context(serving(config))


async def measure(scripts: Sequence[UserScript], at_once: int) -> dict[Mode, Played]:
    found = {}
    for mode in MODES:
        async with fleet(mode) as base_url, aiohttp.ClientSession() as session:
            found[mode] = await play(session, base_url, scripts, at_once)
    return found


def table(found: Mapping[Mode, Played]) -> str:
    rows = ["| mode | turns | failed | local | hits / ideal | share of turns per D |", "|---|---:|---:|---:|---:|---|"]
    for mode, played in found.items():
        local = played.routes["LOCAL"] / played.turns
        shares = ", ".join(f"{name} {share:.3f}" for name, share in played.shares.items())
        rows.append(f"| {mode} | {played.turns} | {played.failures} | {local:.3f} | {played.share:.4f} | {shares} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small.stickiness",
        description="Prefix hits of conversations without ids, and every D's share.",
    )
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    scripts = conversations(args.conversations, args.turns, args.seed)
    print(table(asyncio.run(measure(scripts, args.at_once))))


if __name__ == "__main__":
    main()
