"""One request's answer as it grows, and the protocol of the APIs that give it its shape."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ..core.config import SimConfig
from ..core.errors import SimError
from ..core.sequence import Finish, Generation, Ranking
from ..engine.deltas import Delta
from .answer_parts import AnswerParser, CallParser, Piece
from .requests import JsonBody


@dataclass(slots=True)
class Choice:
    """`text`: as it was generated, with the marks of reasoning and of a call; `said`: without both.

    parser: None if the answer can have neither.
    """

    text: str = ""
    said: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    parser: AnswerParser | None = None
    latest: Piece = field(default_factory=Piece)
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: str | int | None = None
    transfer_params: dict[str, Any] | None = None
    logprobs: list[Ranking] = field(default_factory=list)

    @property
    def called(self) -> CallParser | None:
        """The parser of a call, once its tool is known."""
        call = None if self.parser is None else self.parser.call
        return call if call is not None and call.name is not None else None

    @property
    def content(self) -> str | None:
        if self.called is not None or (self.reasoning_tokens and not self.said):
            return None
        return self.said


@dataclass(slots=True)
class Reply:
    """`choices`: in the order of the prompts."""

    id: str
    created: int  # Unix time, seconds
    generation: Generation
    choices: list[Choice] = field(default_factory=list)
    cached_tokens: int = 0
    events: int = 0  # streamed so far, for an API that numbers them
    part: str = ""  # the kind of the block or item that is open, in an API that streams such
    place: int = 0  # of that part

    def __post_init__(self) -> None:
        form, thoughts = self.generation.sampling.form, self.generation.sampling.thoughts
        calls = form is not None and bool(form.tools)
        self.choices = [
            Choice(parser=AnswerParser(thoughts, calls=calls) if calls or thoughts is not None else None)
            for _ in range(len(self.generation.prompts) * self.generation.choices)
        ]

    def add(self, delta: Delta) -> None:
        choice = self.choices[delta.choice]
        choice.text += delta.text
        is_last = delta.finish is not None
        piece = choice.parser.push(delta.text, is_last=is_last) if choice.parser else Piece(delta.text)
        choice.reasoning_tokens += bool(piece.reasoning)
        if not self.generation.include_reasoning:
            piece = replace(piece, reasoning="")
        choice.latest = piece
        choice.said += piece.content
        choice.reasoning += piece.reasoning
        if delta.logprobs is not None:
            choice.logprobs.append(delta.logprobs)
        if delta.token is not None:
            choice.token_ids.append(delta.token)
        choice.finish = delta.finish
        choice.stop_reason = delta.stop_reason
        choice.transfer_params = delta.transfer_params
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)

    def call_id(self, at: int) -> str:
        """Of the call of one choice."""
        return hashlib.blake2b(f"{self.id} {at}".encode(), digest_size=16).hexdigest()

    def finish_reason(self, at: int) -> str | None:
        """As in vLLM: `tool_calls` for a whole call, but `stop` if the client had named the tool."""
        choice, form = self.choices[at], self.generation.sampling.form
        if choice.finish is Finish.STOP and choice.called is not None and form is not None and not form.is_named:
            return "tool_calls"
        return choice.finish

    @property
    def transfer_params(self) -> dict[str, Any] | None:
        """Those of the first choice. The others' KV stays pinned until their leases end."""
        return self.choices[0].transfer_params

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.generation.prompts))

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def reasons(self) -> bool:
        """Whether the model does so at all."""
        return self.generation.reasoning_field is not None

    @property
    def shows_tokens(self) -> bool:
        """False where token ids and logprobs would show reasoning that the client does not want."""
        return self.generation.include_reasoning or not self.reasons

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({"completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}} if self.reasons else {}),
        }


class Dialect(Protocol):
    """One API's requests and answers. Events are encoded, ready to be written."""

    id_prefix: str

    def read(self, body: JsonBody, config: SimConfig) -> Generation: ...

    def whole(self, reply: Reply) -> dict[str, Any]: ...

    def opening(self, reply: Reply) -> Iterable[bytes]: ...

    def delta(self, reply: Reply, delta: Delta) -> Iterable[bytes]: ...

    def closing(self, reply: Reply) -> Iterable[bytes]: ...

    def failure(self, error: SimError) -> Iterable[bytes]:
        """The end of a stream after its 200 was sent."""
        ...

    def error(self, error: SimError) -> dict[str, Any]: ...


DONE = b"data: [DONE]\n\n"


def data_event(payload: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    return f"event: {payload['type']}\n".encode() + data_event(payload)


def openai_error(error: SimError) -> dict[str, Any]:
    return {
        "error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.status},
    }


def json_response(
    payload: dict[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    body = msgspec.json.encode(payload)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
