"""The conversations that clients hold, and how they behave. Pure: all follows from a seed and from the answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any

from ppd.proxy.openai.request import Endpoint

TENANTS = 4
_SYLLABLES = "ka lo mi ten dur vas pel ion gra ush bek tol ras nim cor".split()
_SYSTEMS = 3  # system prompts, shared by all conversations
_OPENERS = ("hi", "Good morning.", "Help me with a plan, please.")
_ENDPOINTS = (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES)
_WEIGHTS = (50, 14, 18, 18)
IMPOSSIBLE_TOKENS = 10**6


class Move(StrEnum):
    """How a turn goes on from what was said before."""

    OPEN = "open"
    CONTINUE = "continue"
    AGAIN = "again"  # the same request once more
    EDIT = "edit"  # the last message, with other words
    BRANCH = "branch"  # from an earlier answer
    IMPOSSIBLE = "impossible"  # asks for more tokens than any engine has


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientBehaviour:
    """How a client reads. At most one of the two `leave_after` is set."""

    leave_after_s: float | None = None  # since sending
    leave_after_events: int | None = None  # events that brought text
    pause_s: float = 0.0  # between two reads


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRequest:
    endpoint: Endpoint
    move: Move
    body: dict[str, Any] = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    behaviour: ClientBehaviour
    force: str  # the route forced with the admin key; empty: none

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


History = tuple[tuple[str, str], ...]  # (message, answer) of each turn


class SoakConversation:
    """Send what `next` returns and pass the answer to `answered`, until `next` returns None."""

    def __init__(self, seed: int, number: int, model: str = "sim") -> None:
        self._draw = draw = Random(f"{seed}/{number}")
        self.number = number
        self._model = model
        self._endpoint = draw.choices(_ENDPOINTS, _WEIGHTS)[0]
        self._left = draw.randint(2, 12)
        self._long_at = draw.randrange(
            40
        )  # one long prompt at most, so that a conversation fits into an engine's context
        self._system = _words(Random(draw.randrange(_SYSTEMS)), 150) if draw.random() < 0.5 else ""
        self._tenant = f"tenant-{draw.randrange(TENANTS)}"
        self._named = draw.random()  # decides which kind of session id it sends, if any
        self._is_agent = Random(f"agent/{seed}/{number}").random() < 0.4  # seen where the endpoint has calls
        self._history: History = ()
        self._before: History = ()
        self._message = ""

    def next(self) -> SoakRequest | None:
        if self._left == 0:
            return None
        self._left -= 1
        move = self._move()
        if move not in (Move.AGAIN, Move.IMPOSSIBLE):
            self._before = self._base(move)
            self._message = self._words(move)
        return SoakRequest(
            endpoint=self._endpoint,
            move=move,
            body=self._body(move),
            headers=self._headers(),
            behaviour=self._behaviour(),
            force=self._draw.choice(("LOCAL", "SPLIT", "REPLICA")) if self._draw.random() < 0.15 else "",
        )

    def answered(self, text: str | None) -> None:
        """`text`: of the last request; None where the conversation cannot go on from it."""
        if text:
            self._history = (*self._before, (self._message, text))

    def _move(self) -> Move:
        if not self._message:
            return Move.OPEN
        if not self._history:
            return Move.AGAIN
        moves = (Move.CONTINUE, Move.AGAIN, Move.EDIT, Move.BRANCH, Move.IMPOSSIBLE)
        return self._draw.choices(moves, (76, 8, 7, 7, 2))[0]

    def _base(self, move: Move) -> History:
        if move is Move.EDIT:
            return self._history[:-1]
        if move is Move.BRANCH:
            return self._history[: self._draw.randrange(len(self._history))]
        return self._history

    def _words(self, move: Move) -> str:
        if move is Move.OPEN and self._draw.random() < 0.2:
            return self._draw.choice(_OPENERS)
        count = self._draw.randint(700, 1200) if self._left == self._long_at else self._draw.randint(3, 60)
        return _words(self._draw, count)

    def _behaviour(self) -> ClientBehaviour:
        draw = self._draw.random()
        if draw < 0.05:
            return ClientBehaviour(leave_after_s=self._draw.uniform(0.0, 0.15))
        if draw < 0.10:
            return ClientBehaviour(leave_after_events=self._draw.randint(1, 20))
        return ClientBehaviour(pause_s=self._draw.uniform(0.005, 0.05) if draw < 0.16 else 0.0)

    def _headers(self) -> dict[str, str]:
        is_anthropic = self._endpoint is Endpoint.MESSAGES
        headers = {"x-api-key": self._tenant} if is_anthropic else {"Authorization": f"Bearer {self._tenant}"}
        return headers | ({"X-Session-ID": f"talk-{self.number}"} if self._named < 0.3 else {})

    def _body(self, move: Move) -> dict[str, Any]:
        draw = self._draw
        body: dict[str, Any] = {"model": self._model, "temperature": 0, "stream": draw.random() < 0.7}
        limit = IMPOSSIBLE_TOKENS if move is Move.IMPOSSIBLE else draw.choice((12, 32, 64, 120))
        body["max_output_tokens" if self._endpoint is Endpoint.RESPONSES else "max_tokens"] = limit
        if self._named > 0.8:
            body["prompt_cache_key" if self._endpoint is Endpoint.RESPONSES else "conversation_id"] = f"c{self.number}"
        if self._endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
            if body["stream"] and draw.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
            if draw.random() < 0.03:
                body["n"] = 2
        return body | self._prompt()

    def _prompt(self) -> dict[str, Any]:
        if self._endpoint is Endpoint.COMPLETIONS:
            before = "".join(f"User: {message}\nBot:{answer}\n" for message, answer in self._before)
            prompt = f"{self._system}\n{before}User: {self._message}\nBot:"
            return {"prompt": [prompt, prompt + " And"] if self._draw.random() < 0.03 else prompt}
        messages: list[Any] = []
        for at, (message, answer) in enumerate(self._before):
            messages.append({"role": "user", "content": message})
            said = {"role": "assistant", "content": answer}
            messages += _with_calls(self._endpoint, said, self._calls(at)) if self._is_agent else [said]
        messages.append({"role": "user", "content": self._message})
        match self._endpoint:
            case Endpoint.RESPONSES:
                return {"input": messages} | ({"instructions": self._system} if self._system else {})
            case Endpoint.MESSAGES:
                return {"messages": messages} | ({"system": self._system} if self._system else {})
            case _:
                system = [{"role": "system", "content": self._system}] if self._system else []
                return {"messages": system + messages}

    def _calls(self, turn: int) -> list[_Call]:
        """That an agent has made behind an answer: the same in each request that shows it."""
        draw = Random(f"calls/{self.number}/{turn}")
        return [_Call(f"call_{turn}_{at}", _words(draw, 4), _words(draw, 30)) for at in range(draw.randint(0, 2))]


@dataclass(frozen=True, slots=True)
class _Call:
    id: str
    query: str
    result: str


def _with_calls(endpoint: Endpoint, said: dict[str, str], calls: list[_Call]) -> list[Any]:
    """What an answer and the calls behind it are in a history, with their results."""
    arguments = [json.dumps({"query": call.query}) for call in calls]
    if endpoint is Endpoint.MESSAGES and calls:
        uses = [{"type": "tool_use", "id": one.id, "name": "look", "input": {"query": one.query}} for one in calls]
        results = [{"type": "tool_result", "tool_use_id": one.id, "content": one.result} for one in calls]
        both = [{"type": "text", "text": said["content"]}, *uses]
        return [{"role": "assistant", "content": both}, {"role": "user", "content": results}]
    if endpoint is Endpoint.RESPONSES:
        items = [
            {"type": "function_call", "call_id": call.id, "name": "look", "arguments": given}
            for call, given in zip(calls, arguments, strict=True)
        ]
        outputs = [{"type": "function_call_output", "call_id": call.id, "output": call.result} for call in calls]
        return [{"type": "message", **said}, *items, *outputs]
    functions = [{"name": "look", "arguments": given} for given in arguments]
    made = [{"id": call.id, "type": "function", "function": one} for call, one in zip(calls, functions, strict=True)]
    results = [{"role": "tool", "tool_call_id": call.id, "content": call.result} for call in calls]
    return [{**said, **({"tool_calls": made} if made else {})}, *results]


def _words(draw: Random, count: int) -> str:
    return " ".join("".join(draw.choices(_SYLLABLES, k=draw.randint(1, 3))) for _ in range(count))
