"""What a proxy and a sidecar say to each other in heads: which P to ask first, and what became of that.

A sidecar stands before a D or R and runs both legs of a SPLIT. The head of its answer comes with the engine's first
event, or with an error, so by then it knows how P's leg went. Another project's sidecar tells nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..failures import Cause, Leg, Phase
from ..openai.answer_shapes import MOST_TOKENS

PREFILLER = "x-prefiller-host-port"
"""Of the request: host and port of the P; llm-d's name."""
LEGS = b"x-ppd-legs"
"""Of the answer: `SplitLegs` in JSON."""
NOT_ALLOWED = "prefill_not_allowed"  # code of a 403, and in place of a cause: the sidecar may not ask this P
MOST_LEGS = 4

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class EndedLeg(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One that the sidecar has ended; seconds from when the turn came to it."""

    kind: Leg
    started_s: _Seconds = 0.0
    ended_s: _Seconds = 0.0
    status: Annotated[int, msgspec.Meta(ge=100, le=599)] | None = None
    phase: Phase | None = None  # in which it failed
    error: Annotated[str, msgspec.Meta(max_length=64)] = ""  # why: a `failures.Cause`, or `NOT_ALLOWED`

    @property
    def is_lost(self) -> bool:
        """Whether it has failed by no fault of the request."""
        return self.error not in ("", Cause.REQUEST)


class SplitLegs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The legs that had ended when the answer's head was sent."""

    legs: Annotated[list[EndedLeg], msgspec.Meta(max_length=MOST_LEGS)] = []
    is_handed_over: bool = False  # the engine answers with P's KV
    is_by_prefill: bool = False  # P's first token was the last one, and its answer is this one
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] | None = None  # of the prompt, on P

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


def legs_told(header: str) -> SplitLegs | None:
    """None where nothing is told that could be meant."""
    try:
        return _DECODER.decode(header) if header else None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


_DECODER = msgspec.json.Decoder(SplitLegs)
