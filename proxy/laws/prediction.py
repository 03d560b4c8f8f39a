"""What one turn will take on given workers, by the laws of their engines and what is under way there.

The laws are those of `step_time`. A prompt waits for those that were there before it, since engines compute prompts in
order of arrival; it is computed in chunks, several short prompts in one step, and each step decodes one token of every
running sequence too. Where an engine caps what one prompt may have of a step (vLLM's `long_prefill_token_threshold`),
as many prompts as fit into a step are computed side by side, and a short one is done before a long one that came first.
A sequence decodes with those that are there now, in the time that prompts leave.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ..fleet.ledger import believed_decoding, prefill_left_s
from ..fleet.view import WorkerView
from .corrections import USUAL_SPREAD
from .profile_file import FittedRange
from .step_time import EngineProfile, attention_pairs, link_time_s, request_time_s, step_time_s, transfer_time_s

MOST_BUSY = 0.9  # share of time that prompts may take from decoding; beyond, it says nothing but too much


class Prediction(msgspec.Struct, frozen=True, gc=False):
    """Of one turn on one way. Each decision makes several: naming the fields would take a multiple of the time."""

    ttft_s: float
    tpot_s: float
    prefill_s: float  # of engine time, for the tokens that are computed: on P, or on the worker that answers
    beside_s: float = 0.0  # of that, what it delays those that decode there; its steps are theirs too
    ready_s: float = 0.0  # until the engine that computes the prompt may begin with it, if it has nothing else to do
    transfer_s: float = 0.0  # for the KV that is moved, links being idle
    link_s: float = 0.0  # of that, how long the handoff keeps the links of both from others
    fetch_link_s: float = 0.0  # the same for what is fetched before the prompt is computed
    ttft_factor: float = 0.0  # that is in `ttft_s`; 0: that of the engine that computes the prompt
    tpot_factor: float = 0.0


NO_PREDICTION = Prediction(0.0, 0.0, 0.0)


class EngineLaws(msgspec.Struct, frozen=True, kw_only=True):
    """What turns cost on one worker: its engine's profile, corrected by what was seen there."""

    costs: EngineProfile
    profile: str = ""  # its name
    reach: FittedRange | None = None  # see `Fit.reach`; None: the profile states none
    ttft_factor: float = 1.0
    tpot_factor: float = 1.0
    ttft_spread: float = USUAL_SPREAD  # see `Corrections`

    def is_guess(self, context_tokens: int, new_tokens: int) -> bool:
        """Whether a turn lies beyond the profile's reach. context_tokens: of its prompt and answer."""
        reach = self.reach
        return reach is not None and (context_tokens > reach.context_tokens or new_tokens > reach.new_tokens)


class Laws(Protocol):
    """Of all workers."""

    @property
    def version(self) -> str:
        """Changes when corrections do."""
        ...

    def of(self, view: WorkerView) -> EngineLaws | None:
        """None where the engine's profile is not known."""
        ...


class TurnSize(msgspec.Struct, frozen=True, gc=False):
    """In tokens, as far as known before the turn."""

    prompt: int
    output: int
    held: int = 0  # of the prompt, that an earlier turn of the session covers


class IdleTimes(msgspec.Struct, frozen=True, gc=False):
    """What a turn takes on any engine of these costs that has nothing else to do."""

    costs: EngineProfile
    ttft_s: float  # where all is held that the session has
    pulled_s: float  # host work for a prompt whose KV comes from another engine
    step_s: float  # of a step that decodes this turn alone

    @classmethod
    def of(cls, costs: EngineProfile, size: TurnSize) -> IdleTimes:
        prompt = size.prompt
        step_s = step_time_s(costs, 1, prompt + size.output // 2, 0, 0)
        return cls(costs, idle_ttft_s(costs, prompt, size.held), request_time_s(costs, prompt, 0), step_s)


class Outlook(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One worker as a turn would find it, and what does not depend on how the turn gets there. Equal only to itself."""

    view: WorkerView
    laws: EngineLaws
    now_s: float
    idle: IdleTimes
    tpot_s: float  # of the turn, with those that are there
    usual_tpot_s: float  # of those
    sequences: int  # that decode there, or will
    context_tokens: int  # theirs, in sum
    step_s: float  # of a step that only decodes
    wait_s: float  # until all prompts that are there now are computed, of which several may share a step
    prompts: int  # of those
    beside: int  # of those, that would be computed side by side with another one
    chunk_s: float  # that each of these takes of a step
    under_way_s: float  # that they take of the step that is under way
    busy: float  # share of its time that prompts have taken lately
    rate: float  # prompts a second lately
    patience_s: float  # how long each could have waited
    sends_s: float  # until its link could send more; below 0 where it can
    receives_s: float

    @classmethod
    def of(
        cls, view: WorkerView, laws: EngineLaws, size: TurnSize, now_s: float, idle: IdleTimes | None = None
    ) -> Outlook:
        """idle: of this size on an engine of these costs, if it is known already."""
        # Each decision asks for several: so conditions, as `min` and `max` take six times as long.
        costs = laws.costs
        if idle is None:
            idle = IdleTimes.of(costs, size)
        sequences, context = view.decoding, view.context_tokens
        if view.others.running:
            decoding = believed_decoding(view, now_s)
            sequences, context = decoding.count, decoding.context_tokens
        step_s, one_more_s = costs.step_s, idle.step_s
        if sequences:
            step_s = step_time_s(costs, sequences, context, 0, 0)
            one_more_s = step_time_s(costs, sequences + 1, context + size.prompt + size.output // 2, 0, 0)
        wait_s, prompts, beside, chunk_s, under_way_s = 0.0, 0, 0, 0.0, 0.0
        if view.prefills or view.queued_prefill_s or view.unseen_prefill_until_s > now_s:
            prompts = view.prefills if view.prefills > 1 else 1
            wait_s = _wait_s(view, costs, step_s, now_s)
            if costs.long_prefill_tokens:
                beside, chunk_s, under_way_s = _shared_step(view, costs, sequences, prompts, wait_s)
        recent = view.recent_prompts
        left = recent.left(now_s)
        busy = recent.busy * left
        busy = busy if busy < MOST_BUSY else MOST_BUSY
        # Prompts of other turns interrupt those that decode as they did lately.
        slowed = laws.tpot_factor / (1.0 - busy)
        return cls(
            view,
            laws,
            now_s,
            idle,
            slowed * one_more_s,
            slowed * step_s,
            sequences,
            context,
            step_s,
            wait_s,
            prompts,
            beside,
            chunk_s,
            under_way_s,
            busy,
            recent.rate * left,
            recent.patience_s,
            view.sends_free_s - now_s,
            view.receives_free_s - now_s,
        )


def _wait_s(view: WorkerView, costs: EngineProfile, step_s: float, now_s: float) -> float:
    wait_s = prefill_left_s(view, now_s)
    if not wait_s:
        return 0.0
    at_once, prompts = costs.max_batched_tokens, view.prefills if view.prefills > 1 else 1
    if costs.long_prefill_tokens:
        at_once = min(at_once, costs.long_prefill_tokens * prompts)
    tokens = view.queued_prefill_tokens
    steps = -(-tokens // at_once) if tokens > 0 else 1
    if prompts > 1 or costs.long_prefill_tokens:  # else it computes them in as many steps as alone
        wait_s -= (_steps_alone(costs, tokens, prompts) - steps) * costs.step_s  # prompts share steps
    return (wait_s if wait_s > 0.0 else 0.0) + steps * (step_s - costs.step_s)


def _shared_step(
    view: WorkerView, costs: EngineProfile, sequences: int, prompts: int, wait_s: float
) -> tuple[int, float, float]:
    """`beside`, `chunk_s` and `under_way_s` of an `Outlook` where the engine caps a prompt's part of a step."""
    beside = min(prompts, side_by_side(costs) - 1)
    if not beside:
        return 0, 0.0, 0.0
    token_s = wait_s / max(1, view.queued_prefill_tokens)
    chunk_s = min(wait_s / prompts, token_s * costs.long_prefill_tokens)
    is_alone = prompts == 1 and sequences <= 1  # it has all of the step
    return beside, chunk_s, min(wait_s, token_s * costs.max_batched_tokens) if is_alone else beside * chunk_s


def prefill_steps(costs: EngineProfile, new_tokens: int) -> int:
    """Of a prompt that is computed alone."""
    return -(-new_tokens // costs.max_batched_tokens)


def side_by_side(costs: EngineProfile) -> int:
    """Long prompts of which one step computes something; 1: each waits for those before it."""
    cap = costs.long_prefill_tokens
    return max(1, costs.max_batched_tokens // cap) if cap else 1


def _steps_alone(costs: EngineProfile, queued_tokens: int, prompts: int) -> int:
    """Of the prompts that queue, if each were computed alone and they were equally long; at least one."""
    steps = prompts * prefill_steps(costs, queued_tokens // prompts)
    return steps if steps > 1 else 1


def prefill_time_s(costs: EngineProfile, new_tokens: int, cached_tokens: int) -> float:
    """Engine time for a prompt that is computed alone."""
    return (
        costs.step_s * prefill_steps(costs, new_tokens)
        + costs.prefill_token_s * new_tokens
        + costs.attention_pair_s * attention_pairs(new_tokens, cached_tokens)
    )


def idle_ttft_s(costs: EngineProfile, prompt_tokens: int, cached_tokens: int) -> float:
    """On an engine that has nothing else to do."""
    new = prompt_tokens - cached_tokens if prompt_tokens > cached_tokens else 1
    return request_time_s(costs, prompt_tokens, new) + prefill_time_s(costs, new, prompt_tokens - new)


class OwnPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt that some engine computes, whatever else it does."""

    host_s: float
    prefill_s: float
    steps: int
    beside_s: float  # of `prefill_s`: without its steps
    steps_beside: int  # where there are other requests
    holds_s: float  # how long one that comes meanwhile waits for it, at most

    @classmethod
    def of(cls, costs: EngineProfile, prompt_tokens: int, new_tokens: int) -> OwnPrompt:
        prefill_s = prefill_time_s(costs, new_tokens, prompt_tokens - new_tokens)
        steps = prefill_steps(costs, new_tokens)
        host_s = request_time_s(costs, prompt_tokens, new_tokens)
        beside_s = prefill_s - steps * costs.step_s
        if not (cap := costs.long_prefill_tokens) or cap >= new_tokens:
            return cls(host_s, prefill_s, steps, beside_s, steps, prefill_s)
        holds_s = costs.step_s + beside_s * cap / new_tokens if side_by_side(costs) > 1 else prefill_s
        return cls(host_s, prefill_s, steps, beside_s, -(-new_tokens // cap), holds_s)


class Work(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A prompt that is computed on one worker. Equal only to itself."""

    at: Outlook
    ready_s: float
    prefill_s: float
    beside_s: float
    holds_s: float
    done_s: float
    transfer_s: float = 0.0  # of what is fetched before
    link_s: float = 0.0
    source: Outlook | None = None  # from which that is
    fetched_tokens: int = 0


def work_on(
    at: Outlook, size: TurnSize, held_tokens: int, source: Outlook | None = None, fetched_tokens: int = 0
) -> Work:
    """The KV of `fetched_tokens` more than it holds is first moved there from `source`."""
    new = max(1, size.prompt - held_tokens - fetched_tokens)
    return own_work_on(at, OwnPrompt.of(at.laws.costs, size.prompt, new), source, fetched_tokens)


def own_work_on(at: Outlook, own: OwnPrompt, source: Outlook | None = None, fetched_tokens: int = 0) -> Work:
    """The same, of a prompt whose own times are known. own: less what is held there and what is fetched."""
    ready_s, transfer_s, link_s = own.host_s, 0.0, 0.0
    if source is not None:
        link_s = link_time_s(source.laws.costs, fetched_tokens)
        transfer_s = transfer_time_s(source.laws.costs, fetched_tokens)
        ready_s = max(ready_s, source.sends_s, at.receives_s) + transfer_s
    wait_s, step_s, steps = at.wait_s, at.step_s, own.steps
    done_s = (wait_s if wait_s > ready_s else ready_s) + own.beside_s
    if at.sequences or wait_s:
        steps = own.steps_beside
        done_s += step_s / 2
        if at.beside and wait_s > ready_s:
            done_s -= _sooner_s(at, own, wait_s - ready_s)
    done_s += steps * step_s
    return Work(
        at, ready_s, own.prefill_s, own.beside_s, own.holds_s, done_s, transfer_s, link_s, source, fetched_tokens
    )


def _sooner_s(at: Outlook, own: OwnPrompt, left_s: float) -> float:
    """Than if it waited for all that are there, which take `left_s`: of those beside it, each has no more of its steps
    than it has itself, or than one step gives, and of the step under way half is still to come."""
    each_s = left_s / at.prompts
    shared_s = min(each_s, max(at.chunk_s, own.beside_s))
    return max(0.0, at.beside * (each_s - shared_s) - at.under_way_s / 2)


def on_one(at: Outlook, work: Work) -> Prediction:
    """LOCAL or REPLICA."""
    laws = at.laws
    return Prediction(
        laws.ttft_factor * work.done_s,
        at.tpot_s,
        work.prefill_s,
        work.beside_s,
        work.ready_s,
        work.transfer_s,
        0.0,
        work.link_s,
        laws.ttft_factor,
        laws.tpot_factor,
    )


def on_two(prefill: Outlook, work: Work, decode: Outlook, missing_tokens: int) -> Prediction:
    """SPLIT. missing_tokens: of the prompt, that D must get."""
    costs, ttft_factor = prefill.laws.costs, prefill.laws.ttft_factor
    link_s = link_time_s(costs, missing_tokens)
    transfer_s = costs.transfer_s + link_s if missing_tokens else 0.0
    asked_s = work.done_s + decode.idle.pulled_s
    links_free_s = prefill.sends_s if prefill.sends_s > decode.receives_s else decode.receives_s
    arrived_s = (asked_s if asked_s > links_free_s else links_free_s) + transfer_s
    first_s = decode.step_s * (1.5 if decode.sequences else 1.0)
    return Prediction(
        ttft_factor * (arrived_s + first_s),
        decode.tpot_s,
        work.prefill_s,
        work.beside_s,
        work.ready_s,
        transfer_s + work.transfer_s,
        link_s,
        work.link_s,
        ttft_factor,
        decode.laws.tpot_factor,
    )
