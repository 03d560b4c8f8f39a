"""What one turn will take on given workers, by the laws of their engines and what is under way there.

The laws are those of `step_time`. A prompt waits for those that were there before it, since engines compute prompts in
order of arrival; it is computed in chunks, and each chunk's step decodes one token of every running sequence too. A
sequence decodes with those that are there now, in the time that prompts leave.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ..fleet.ledger import believed_decoding, prefill_left_s
from ..fleet.view import WorkerView
from .profile_file import FittedRange
from .step_time import EngineProfile, request_time_s, step_time_s, transfer_time_s

MOST_BUSY = 0.9  # share of time that prompts may take from decoding; beyond, it says nothing but too much


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Of one turn on one way."""

    ttft_s: float
    tpot_s: float
    prefill_s: float  # of engine time, for the tokens that are computed: on P, or on the worker that answers
    ready_s: float = 0.0  # until the engine that computes the prompt may begin with it, if it has nothing else to do
    transfer_s: float = 0.0  # for the KV that is moved, links being idle
    fetch_s: float = 0.0  # of that, for what is fetched before the prompt is computed
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


class TurnSize(msgspec.Struct, frozen=True):
    """In tokens, as far as known before the turn."""

    prompt: int
    output: int


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as a turn would find it."""

    view: WorkerView
    laws: EngineLaws
    sequences: int  # that decode there, or will
    context_tokens: int  # theirs, in sum
    step_s: float  # of a step that only decodes
    wait_s: float  # until all prompts that are there now are computed
    busy: float  # share of its time that prompts have taken lately
    rate: float  # prompts a second lately
    patience_s: float  # how long each could have waited
    sends_s: float  # until its link could send more
    receives_s: float

    @classmethod
    def of(cls, view: WorkerView, laws: EngineLaws, now_s: float) -> Outlook:
        costs, decoding = laws.costs, believed_decoding(view, now_s)
        sequences, context = decoding.count, decoding.context_tokens
        step_s = step_time_s(costs, sequences, context, 0, 0)
        beside_s = step_s - costs.step_s
        wait_s = prefill_left_s(view, now_s)
        if wait_s:
            wait_s += max(1, view.queued_prefill_tokens // costs.max_batched_tokens) * beside_s
        recent = view.recent_prompts.at(now_s)
        return cls(
            view=view,
            rate=recent.rate,
            patience_s=recent.patience_s,
            laws=laws,
            sequences=sequences,
            context_tokens=context,
            step_s=step_s,
            wait_s=wait_s,
            busy=min(MOST_BUSY, recent.busy),
            sends_s=max(0.0, view.sends_free_s - now_s),
            receives_s=max(0.0, view.receives_free_s - now_s),
        )

    def tpot_s(self, size: TurnSize) -> float:
        """Of a sequence more, with those that are there; prompts of other turns interrupt it as they did lately."""
        context = self.context_tokens + size.prompt + size.output // 2
        step_s = step_time_s(self.laws.costs, self.sequences + 1, context, 0, 0)
        return self.laws.tpot_factor * step_s / (1.0 - self.busy)


def prefill_time_s(costs: EngineProfile, new_tokens: int, cached_tokens: int) -> float:
    """Engine time for a prompt that is computed alone."""
    steps = -(-new_tokens // costs.max_batched_tokens)
    pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) // 2
    return costs.step_s * steps + costs.prefill_token_s * new_tokens + costs.attention_pair_s * pairs


def idle_ttft_s(costs: EngineProfile, prompt_tokens: int, cached_tokens: int) -> float:
    """On an engine that has nothing else to do."""
    new = max(1, prompt_tokens - cached_tokens)
    return request_time_s(costs, prompt_tokens, new) + prefill_time_s(costs, new, prompt_tokens - new)


def on_one(
    at: Outlook, size: TurnSize, held_tokens: int, *, source: Outlook | None = None, fetched_tokens: int = 0
) -> Prediction:
    """LOCAL or REPLICA. The KV of `fetched_tokens` more of the prompt is first moved there from `source`."""
    work = _Work.of(at, size, held_tokens, source, fetched_tokens)
    return Prediction(
        ttft_s=at.laws.ttft_factor * work.done_s,
        ttft_factor=at.laws.ttft_factor,
        tpot_s=at.tpot_s(size),
        tpot_factor=at.laws.tpot_factor,
        ready_s=work.ready_s,
        prefill_s=work.prefill_s,
        transfer_s=work.transfer_s,
        fetch_s=work.transfer_s,
        moved_tokens=fetched_tokens,
    )


def on_two(
    prefill: Outlook,
    decode: Outlook,
    size: TurnSize,
    held_tokens: int,
    missing_tokens: int,
    *,
    source: Outlook | None = None,
    fetched_tokens: int = 0,
) -> Prediction:
    """SPLIT. held_tokens: by P; missing_tokens: of the prompt, that D must get."""
    work = _Work.of(prefill, size, held_tokens, source, fetched_tokens)
    transfer_s = transfer_time_s(prefill.laws.costs, missing_tokens)
    asked_s = work.done_s + request_time_s(decode.laws.costs, size.prompt, 0)
    arrived_s = max(asked_s, prefill.sends_s, decode.receives_s) + transfer_s
    first_s = decode.step_s * (1.5 if decode.sequences else 1.0)
    return Prediction(
        ttft_s=prefill.laws.ttft_factor * (arrived_s + first_s),
        ttft_factor=prefill.laws.ttft_factor,
        tpot_s=decode.tpot_s(size),
        tpot_factor=decode.laws.tpot_factor,
        ready_s=work.ready_s,
        prefill_s=work.prefill_s,
        transfer_s=transfer_s + work.transfer_s,
        fetch_s=work.transfer_s,
        moved_tokens=missing_tokens + fetched_tokens,
    )


class _Work(msgspec.Struct, frozen=True):
    """A prompt that is computed on one worker."""

    ready_s: float
    prefill_s: float
    transfer_s: float
    done_s: float

    @classmethod
    def of(cls, at: Outlook, size: TurnSize, held_tokens: int, source: Outlook | None, fetched_tokens: int) -> _Work:
        costs, new = at.laws.costs, max(1, size.prompt - held_tokens - fetched_tokens)
        ready_s, transfer_s = request_time_s(costs, size.prompt, new), 0.0
        if source is not None:
            transfer_s = transfer_time_s(source.laws.costs, fetched_tokens)
            ready_s = max(ready_s, source.sends_s, at.receives_s) + transfer_s
        prefill_s = prefill_time_s(costs, new, size.prompt - new)
        steps = -(-new // costs.max_batched_tokens)
        begins_s = max(ready_s, at.wait_s) + (at.step_s / 2 if at.sequences or at.wait_s else 0.0)
        return cls(ready_s, prefill_s, transfer_s, begins_s + prefill_s + steps * (at.step_s - costs.step_s))
