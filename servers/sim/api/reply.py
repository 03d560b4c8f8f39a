"""One request's answer as it grows, and the protocol of the APIs that give it its shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ..core.config import SimConfig
from ..core.errors import SimError
from ..core.sequence import Finish, Generation
from ..engine.deltas import Delta
from .requests import JsonBody


@dataclass(slots=True)
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    stop_reason: str | int | None = None
    transfer_params: dict[str, Any] | None = None


@dataclass(slots=True)
class Reply:
    """`choices`: in the order of the prompts."""

    id: str
    created: int  # Unix time, seconds
    generation: Generation
    choices: list[Choice] = field(default_factory=list)
    cached_tokens: int = 0
    events: int = 0  # streamed so far, for an API that numbers them

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in range(len(self.generation.prompts) * self.generation.choices)]

    def add(self, delta: Delta) -> None:
        choice = self.choices[delta.choice]
        choice.text += delta.text
        if delta.token is not None:
            choice.token_ids.append(delta.token)
        choice.finish = delta.finish
        choice.stop_reason = delta.stop_reason
        choice.transfer_params = delta.transfer_params
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)

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

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
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
