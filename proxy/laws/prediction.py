"""What one turn will take on given workers, by the laws of their engines and what is under way there."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ..fleet.view import WorkerView
from .step_time import EngineProfile


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Of one turn on one way."""

    ttft_s: float
    tpot_s: float
    prefill_s: float  # of engine time, for the tokens that are computed: on P, or on the worker that answers
    transfer_s: float = 0.0  # for the KV that is moved, links being idle
    moved_tokens: int = 0


class EngineLaws(msgspec.Struct, frozen=True, kw_only=True):
    """What turns cost on one worker: its engine's profile, corrected by what was seen there."""

    costs: EngineProfile
    ttft_factor: float = 1.0
    tpot_factor: float = 1.0


class Laws(Protocol):
    """Of all workers."""

    @property
    def version(self) -> str:
        """Changes when corrections do."""
        ...

    def of(self, view: WorkerView) -> EngineLaws | None:
        """None where the engine's profile is not known."""
        ...
