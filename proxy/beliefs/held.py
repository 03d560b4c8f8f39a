"""What is believed of one worker and one prompt, as values."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec

from ..fleet.worker import WorkerId

Tokens = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]  # as far as other processes may tell of them
MARK_BITS = 30  # for the tokens of a mark, where they are kept with the history that passed it


class BeliefEvidence(StrEnum):
    OWN_TURNS = "own_turns"  # turns of this history ran there, and its cache has had room for them since
    SHARED_PREFIX = "shared_prefix"  # turns of other sessions that begin alike did
    KV_EVENTS = "kv_events"  # the engine says so itself


class Held(msgspec.Struct, frozen=True, gc=False):
    """How many tokens of a prompt a worker holds, from its start."""

    tokens: int
    evidence: BeliefEvidence
    is_shared: bool = False  # by the prompt's tokens alone: nothing tells of turns of this history there


class Found(msgspec.Struct, frozen=True, gc=False):
    """How many tokens of a prompt an engine says that it holds, whosesoever they are."""

    tokens: int
    is_exact: bool  # False: it may hold more


class Residency(msgspec.Struct, frozen=True, gc=False):
    """How many tokens of a session a worker held when a turn ended there."""

    worker: WorkerId
    incarnation: str  # of the worker at that time; if it has another one now, its cache is gone
    tokens: Tokens


class Mark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A point of a prompt up to which other sessions may be the same."""

    key: int  # of the chain; names everything before the point
    tokens: Tokens


class SentLeg(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="leg"):
    """A turn that was sent to a worker, until it uses the worker's cache or will not."""

    number: int  # among the legs of its process
    worker: WorkerId
    history: int
    tokens: Tokens  # of the prompt, an estimate
    marks: Sequence[Mark] = ()  # shortest first
    points: Sequence[Mark] = ()  # as of its `PromptEntry`
    opens: bool = False  # it opens its session, and what begins like that may come as soon as it is answered
    source: int | None = None  # the history that it branches from
    shared: Tokens = 0  # tokens that it begins with of that


class LegOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="leg-ended"):
    number: int
    has_used: bool  # the worker's cache; False: the turn failed, or was left, before it did


class CacheFound(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="cached"):
    """An answer says how much of a history's prefix its worker had cached."""

    history: int
    where: Residency  # as it was believed
    since: Tokens  # tokens that were used there since, when the turn was sent
    cached: Tokens


BookNews = SentLeg | LegOutcome | CacheFound
"""What a turn tells the books of all processes."""


class BookLessons(msgspec.Struct, frozen=True, array_like=True):
    """What answers have taught of a worker's cache, but for what it holds; see `CacheBook`."""

    worker: WorkerId
    incarnation: str
    believed: Tokens
    counts: Tokens
    missed: int


class PromptEntry(msgspec.Struct, frozen=True, gc=False):
    """A prompt as the books know it."""

    history: int  # under which its tokens are kept
    source: int | None = None  # the history that it continues: itself, or another one that it branches from
    marks: Sequence[Mark] = ()  # shortest first
    last: Residency | None = None  # after its session's last turn, of the worker that answered it
    points: Sequence[Mark] = ()  # inside of a head that its session has not had before, shortest first
    shared: int = 0  # tokens that it has in common with `source`
