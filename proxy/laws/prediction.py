"""What one turn will take on given workers, by the laws of their engines and what is under way there."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ..fleet.view import WorkerView
from .profile_file import FittedRange
from .step_time import EngineProfile


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Of one turn on one way."""

    ttft_s: float
    tpot_s: float
    prefill_s: float  # of engine time, for the tokens that are computed: on P, or on the worker that answers
    transfer_s: float = 0.0  # for the KV that is moved, links being idle
    moved_tokens: int = 0
    ttft_factor: float = 0.0  # that is in `ttft_s`; 0: that of the engine that computes the prompt
    tpot_factor: float = 0.0


class EngineLaws(msgspec.Struct, frozen=True, kw_only=True):
    """What turns cost on one worker: its engine's profile, corrected by what was seen there."""

    costs: EngineProfile
    profile: str = ""  # its name
    fitted: FittedRange | None = None  # None: the profile states no range
    ttft_factor: float = 1.0
    tpot_factor: float = 1.0

    def is_guess(self, context_tokens: int, new_tokens: int) -> bool:
        """Whether a turn lies beyond what the profile was fitted to. context_tokens: of its prompt and answer."""
        fitted = self.fitted
        return fitted is not None and (context_tokens > fitted.context_tokens or new_tokens > fitted.new_tokens)


class Laws(Protocol):
    """Of all workers."""

    @property
    def version(self) -> str:
        """Changes when corrections do."""
        ...

    def of(self, view: WorkerView) -> EngineLaws | None:
        """None where the engine's profile is not known."""
        ...
