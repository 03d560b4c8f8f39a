"""Plays conversations: each turn at its time, each later one when the answer before it has ended.

A turn's clock starts when it is due. If the player is late, that counts: it shows as the time from `scheduled_s` to
`sent_s`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ..experiment.records import Record
from ..traces.turns import TracedTurn
from .answer import Answer, short
from .dialogue import Author, Dialogue
from .script import Script
from .target import Target

LEAD_S = 0.2  # a turn's body is made this long before it is due, so that making it delays nothing


@dataclass(frozen=True, slots=True)
class Progress:
    at_s: float  # since the run began
    requests: int  # that the run will have, unless it ends early
    in_flight: int
    done: int  # failed ones included
    failed: int


class Asks(Protocol):
    async def ask(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Never raises, except when it is cancelled: a failure is in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a player needs of the run."""

    target: Target
    author: Author
    caller: Asks
    now: Callable[[], float]  # seconds since the run began
    sleep: Callable[[float], Awaitable[None]]
    record: Callable[[Record], None]
    progress: Callable[[Progress], None] | None = None
    name: str = ""  # of the run; conversations are named after it
    seed: int = 0  # of the sampling
    until_s: float = math.inf  # turns that are due later are not sent, and are no failures


class Player:
    def __init__(self, stage: Stage, requests: int) -> None:
        self._stage = stage
        self._requests = requests
        self._counts: Counter[str] = Counter()

    @property
    def author(self) -> Author:
        return self._stage.author

    async def open_loop(self, scripts: Iterable[Script]) -> None:
        """Each conversation begins at its arrival, however many are in flight."""
        async with asyncio.TaskGroup() as group:
            for script in scripts:
                if script.arrival_s > self._stage.until_s:
                    break
                await self._sleep_until(script.arrival_s - LEAD_S)
                group.create_task(self._converse(script, script.arrival_s))

    async def closed_loop(self, scripts: Iterable[Script], concurrency: int) -> None:
        """`concurrency` conversations at a time: when one ends, the next begins."""
        await self._sleep_until(0.0)
        waiting = iter(scripts)

        async def one_after_another() -> None:
            for script in waiting:
                if self._stage.now() > self._stage.until_s:
                    return
                await self._converse(script, None)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one_after_another())

    async def _converse(self, script: Script, arrival_s: float | None) -> None:
        """`arrival_s`: None if the conversation begins as soon as its first prompt is made."""
        dialogue = self._stage.author.begin(script)
        headers = self._headers(script)
        due_s = arrival_s
        for index, turn in enumerate(script.turns):
            body, prompt = self._body(dialogue, index, turn)
            due_s = self._stage.now() if due_s is None else due_s
            if due_s > self._stage.until_s:
                return
            await self._sleep_until(due_s)
            answer = await self._ask(script, index, body, headers)
            self._judge(answer, turn, prompt)
            self._note(_record(script, index, due_s, answer))
            following = script.turns[index + 1] if index + 1 < len(script.turns) else TracedTurn()
            ended_s, due_s = answer.ended_s, max(answer.ended_s + following.think_s, due_s + following.gap_s)
            if answer.error:
                self._give_up(script, index, ended_s)
                return
            dialogue.answered(answer.text, answer.token_ids)

    def _body(self, dialogue: Dialogue, index: int, turn: TracedTurn) -> tuple[bytes, Mapping[str, Any]]:
        prompt = dialogue.ask(index)
        return msgspec.json.encode({**prompt, **self._members(turn.output_tokens)}), prompt

    def _members(self, output_tokens: int | None) -> dict[str, Any]:
        # Greedy with one seed: vLLM samples row by row where requests have their own seeds, which would be measured.
        members: dict[str, Any] = {
            "model": self._stage.target.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "seed": self._stage.seed,
        }
        if output_tokens is not None:
            members["max_tokens"] = output_tokens
            if not self._stage.target.plain:
                members |= {"min_tokens": output_tokens, "ignore_eos": True}
        return members

    async def _ask(self, script: Script, index: int, body: bytes, common: Mapping[str, str]) -> Answer:
        headers, route, target = dict(common), script.route(index), self._stage.target
        if route:
            headers |= {"X-PPD-Force-Route": route, "X-Admin-Key": target.admin_key}
        self._counts["in_flight"] += 1
        try:
            answer = await self._stage.caller.ask(body, headers)
        finally:
            self._counts["in_flight"] -= 1
        answer.route = answer.route or route
        return answer

    def _judge(self, answer: Answer, turn: TracedTurn, prompt: Mapping[str, Any]) -> None:
        if answer.status == 200:
            answer.judge(None if self._stage.target.plain else turn.output_tokens)
            if "return_token_ids" in prompt and not answer.error and len(answer.token_ids) != answer.output_tokens:
                answer.error = "the server does not tell the ids of its tokens: use the chat endpoint"
        if answer.error:
            target = self._stage.target
            answer.error = short(answer.error, secrets=(target.api_key, target.admin_key), prompt=_shown(prompt))

    def _give_up(self, script: Script, failed: int, at_s: float) -> None:
        # Turns that can no longer be sent are recorded as failures too.
        for index in range(failed + 1, len(script.turns)):
            lost = Answer(sent_s=at_s, route=script.route(index), error=f"not sent: turn {failed + 1} failed")
            self._note(_record(script, index, at_s, lost))

    def _note(self, record: Record) -> None:
        self._counts["done"] += 1
        self._counts["failed"] += bool(record.error)
        self._stage.record(record)
        if self._stage.progress is not None:
            counts = self._counts
            self._stage.progress(
                Progress(self._stage.now(), self._requests, counts["in_flight"], counts["done"], counts["failed"])
            )

    def _headers(self, script: Script) -> dict[str, str]:
        name = self._stage.target.session_header
        return {name: f"{self._stage.name}-{script.number}"} if name else {}

    async def _sleep_until(self, at_s: float) -> None:
        left_s = at_s - self._stage.now()
        if left_s > 0:
            await self._stage.sleep(left_s)


def _record(script: Script, index: int, scheduled_s: float, answer: Answer) -> Record:
    return Record(
        conversation=script.number,
        turn=index + 1,
        measured=script.measured,
        scheduled_s=scheduled_s,
        sent_s=answer.sent_s,
        first_token_s=answer.first_token_s,
        last_token_s=None if answer.error else answer.last_token_s,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        output_tokens=answer.output_tokens,
        route=answer.route,
        prefill=answer.prefill,
        decode=answer.decode,
        status=answer.status,
        error=answer.error,
        images=script.turns[index].images,
    )


def _shown(prompt: Mapping[str, Any]) -> str:
    # As a server might quote it.
    ids = prompt.get("prompt")
    if ids is not None:
        numbers = [str(token) for token in ids]
        return ", ".join(numbers) + "\n" + ",".join(numbers)
    contents = (message["content"] for message in prompt["messages"])
    return "\n".join(each if isinstance(each, str) else each[0]["text"] for each in contents)
