"""The records of trials: when each token of each stream came. Statistics are computed from these later.

A file is gzipped JSON lines: a head (the endpoint's model, the setting), then one object a trial. Times are seconds
since the trial began.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import msgspec

from ppd.offline.experiment import files
from ppd.offline.experiment.files import decode_rows, encode_rows

VERSION: Final = 1
KIND: Final = "ppd-interference"

Count = Annotated[int, msgspec.Meta(ge=0)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]


class Experiment(StrEnum):
    """The quantity that is varied."""

    BATCH = "batch"  # decoding sequences: the paper's figures 2 and 6
    CONTEXT = "context"  # tokens before the prefill: its figure 7
    APPEND = "append"  # new tokens of a prefill


class TrialKind(StrEnum):
    ALONE = "alone"  # the decode batch by itself
    FULL = "full"  # beside prompts without cached tokens
    APPEND = "append"  # beside prompts whose context is cached


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    experiment: Experiment
    kind: TrialKind
    at: Tokens  # the point on the experiment's axis
    batch: Tokens  # decoding sequences
    decode_context_tokens: Count  # cached, of each
    prefills: Count  # that are sent at once
    new_tokens: Count  # that each prefill has to compute
    cached_tokens: Count  # before them
    repeat: Count


class Stream(msgspec.Struct, frozen=True, array_like=True):
    """One request. One that failed has an `error`, and whatever else is known of it."""

    is_decode: bool  # False: one of the prefills
    number: int
    prompt_tokens: int
    cached_tokens: int | None  # of the prompt, as the answer reported; None: not reported
    sent_s: float
    token_s: tuple[float, ...]  # when each token came; tokens of one event came together
    status: int  # HTTP; 0: no answer
    error: str = ""


class TrialResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    trial: Trial
    streams: tuple[Stream, ...]


class TrialHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = VERSION
    kind: str = KIND
    model: str
    note: str  # what the endpoint is, from --note
    output_tokens: Tokens  # of each decoding sequence
    shared_context: bool  # the decode batch and the appends have one context, as in the published program
    seed: int
    nonce: str  # with the seed, what new tokens are drawn from
    started: str  # ISO 8601, UTC


_TRIAL = msgspec.json.Decoder(TrialResult)


def encode(head: TrialHead, results: Sequence[TrialResult]) -> bytes:
    return encode_rows(head, results)


def decode(data: bytes) -> tuple[TrialHead, tuple[TrialResult, ...]]:
    return decode_rows(data, TrialHead, _TRIAL.decode, kind=KIND, version=VERSION)


def load(path: Path) -> tuple[TrialHead, tuple[TrialResult, ...]]:
    return files.load(path, decode)


def save(path: Path, head: TrialHead, results: Sequence[TrialResult]) -> None:
    files.write_whole(path, encode(head, results))
