"""What a sidecar tells the picker of each turn that it has run: a msgpack map in one ZeroMQ frame, as heartbeats are.

A picker sees no answer, so this is how it learns what its decision came to. It holds counts, times and causes; never
text. The layout is in docs/protocols.md.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec.structs import replace

from ..errors import FormatError
from ..failures import Leg
from ..openai.answer_shapes import MOST_TOKENS

VERSION = 1
KIND = "turn_report"
LEGS_LIMIT = 8
LONGEST_S = 7 * 86_400.0
LONGEST_NAME = 256

_Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class FailedLeg(msgspec.Struct, frozen=True):
    """One upstream request of the turn that failed, in the words of docs/failures.md."""

    leg: _Name
    address: _Name  # the worker's, host:port
    phase: _Name
    cause: _Name


class TurnReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=KIND):
    """One turn. Seconds count from its arrival at the sidecar, as clocks of machines differ; None: not known."""

    version: int = VERSION
    request_id: _Name  # the gateway's X-Request-Id, which a client may have chosen
    turn_id: _Name = ""  # the picker's own id of the turn; empty: it gave none, or the sidecar is of an older version
    route: _Name  # SPLIT, or LOCAL or REPLICA where a D or R computed the prompt; empty: it got no further
    prefill: _Name = ""  # the P that was asked last, host:port
    outcome: _Name  # completed, rejected, failed, cancelled or broken
    status: Annotated[int, msgspec.Meta(ge=0, le=599)]
    failure: _Name = ""  # why the client got no whole answer
    failed_legs: Annotated[list[FailedLeg], msgspec.Meta(max_length=LEGS_LIMIT)] = []  # of a turn that was saved, too
    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    prefill_cached_tokens: _Tokens | None = None  # of the prompt, that P found in its cache
    decode_cached_tokens: _Tokens | None = None  # that the engine found; None after a handoff: it counts what it pulled
    first_token_s: float | None = None  # None also where the answer came as a whole
    last_token_s: float | None = None
    ended_s: float

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def as_replicas(report: TurnReport) -> TurnReport:
    """In the words for an R: a sidecar that is not told what it stands before calls what that computes alone local."""
    legs = [replace(one, leg=Leg.REPLICA) if one.leg == Leg.LOCAL else one for one in report.failed_legs]
    leg, _, why = report.failure.partition(" ")
    return replace(report, failed_legs=legs, failure=f"{Leg.REPLICA} {why}" if leg == Leg.LOCAL else report.failure)


_HEAD = msgspec.msgpack.encode("kind") + msgspec.msgpack.encode(KIND)
_DECODER = msgspec.msgpack.Decoder(TurnReport)


def is_report(payload: bytes) -> bool:
    """Whether it is to be one: its kind comes first, after what says how many fields there are."""
    return payload.startswith(_HEAD, 1) or payload.startswith(_HEAD, 3)


def decode(payload: bytes) -> TurnReport:
    """FormatError names what is wrong."""
    try:
        report = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise FormatError(f"turn report: {exc}") from exc
    if report.version != VERSION:
        raise FormatError(f"turn report: version must be {VERSION}")
    before_s = 0.0
    for name in ("first_token_s", "last_token_s", "ended_s"):
        seconds = getattr(report, name)
        if seconds is None:
            continue
        if not before_s <= seconds <= LONGEST_S:
            raise FormatError(f"turn report: {name} must be {before_s:g} to {LONGEST_S:g} seconds, got {seconds:g}")
        before_s = seconds
    return report
