"""What is believed of one worker and one prompt, as values."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from ..fleet.worker import WorkerId


class BeliefEvidence(StrEnum):
    OWN_TURNS = "own_turns"  # turns of this history ran there, and its cache has had room for them since
    SHARED_PREFIX = "shared_prefix"  # turns of other sessions that begin alike did
    KV_EVENTS = "kv_events"  # the engine says so itself


class Held(msgspec.Struct, frozen=True):
    """How many tokens of a prompt a worker holds, from its start."""

    tokens: int
    evidence: BeliefEvidence


class Residency(msgspec.Struct, frozen=True):
    """How many tokens of a session a worker held when a turn ended there."""

    worker: WorkerId
    incarnation: str  # of the worker at that time; if it has another one now, its cache is gone
    tokens: int


class Mark(msgspec.Struct, frozen=True, gc=False):
    """A point of a prompt up to which other sessions may be the same."""

    key: int  # of the chain; names everything before the point
    tokens: int


class PromptEntry(msgspec.Struct, frozen=True):
    """A prompt as the books know it."""

    history: int  # under which its tokens are kept
    source: int | None = None  # the history that it continues: itself, or another one that it branches from
    marks: Sequence[Mark] = ()  # shortest first
    last: Residency | None = None  # after its session's last turn, of the worker that answered it
    points: Sequence[Mark] = ()  # inside of a head that its session has not had before, shortest first
