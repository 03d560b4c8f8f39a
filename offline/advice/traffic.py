"""The traffic of a receipt log: its sessions as a trace, and how often they begin.

A turn repeats as much of its session's history as its receipt says, and brings what is new. What a first turn's engine
had cached is taken as a beginning that sessions share, the same one for all of them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

from ppd.proxy.errors import ConfigError

from ..replay.past_turns import PastTurn
from ..traces.turns import RecordedPrompt, TracedConversation, TracedTurn

LEAST_SESSIONS = 10  # fewer tell nothing of a traffic
LEAST_SPAN_S = 1.0
MOST_SILENCE_S = 30 * 86400.0  # in which no session begins: longer ones are a wrong clock, or two logs in one
MOST_SESSIONS = 2000  # of a log, that are played; drawn where there are more
USUAL_PAUSES = 0.95  # a session that has been silent for longer than so many of all pauses is over
SHARED_STEP_TOKENS = 256  # shared beginnings of about the same length count as one
SAME_TOKENS = 16  # by so many estimates may miss the end of a history
_SESSION_BITS = 40  # of the ids of a session's tokens

Runs = list[tuple[int, int]]  # of successive ids: the first, and how many


@dataclass(frozen=True, slots=True)
class LogTurn:
    prompt_tokens: int
    repeated_tokens: int  # of the history with its last answer
    output_tokens: int
    pause_s: float  # after the answer before
    is_counted: bool  # by the engine; else estimated

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.repeated_tokens


@dataclass(frozen=True, slots=True)
class LogSession:
    began_s: float
    shared_tokens: int  # of the first prompt
    turns: tuple[LogTurn, ...]
    may_go_on: bool  # after the log's end

    def conversation(self, number: int) -> TracedConversation:
        """number: no two conversations of a trace have the same one."""
        ids = _Ids((number + 1) << _SESSION_BITS)
        whole, made = Runs(), list[TracedTurn]()
        for at, turn in enumerate(self.turns):
            kept = _cut(whole, turn.repeated_tokens) if at else ids.shared(self.shared_tokens)
            prompt = kept + ids.own(turn.prompt_tokens - _tokens(kept))
            made.append(
                TracedTurn(
                    output_tokens=turn.output_tokens,
                    think_s=turn.pause_s,
                    restarts=at > 0 and _tokens(kept) < _tokens(whole),  # else the answer before is taken as repeated
                    prompt=RecordedPrompt(turn.prompt_tokens, tuple(prompt), block_tokens=1),
                )
            )
            whole = prompt + ids.own(turn.output_tokens)
        return TracedConversation(str(number), None, tuple(made))


class _Ids:
    def __init__(self, first: int) -> None:
        self._next = first

    def own(self, tokens: int) -> Runs:
        self._next += tokens
        return [(self._next - tokens, tokens)] if tokens else []

    def shared(self, tokens: int) -> Runs:
        return [(0, tokens)] if tokens else []


def _cut(runs: Runs, tokens: int) -> Runs:
    found = Runs()
    for first, count in runs:
        if tokens <= 0:
            break
        found.append((first, min(count, tokens)))
        tokens -= count
    return found


def _tokens(runs: Runs) -> int:
    return sum(count for _, count in runs)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one model. `rate`: sessions that began, a second."""

    model: str
    sessions: tuple[LogSession, ...]  # as they began
    began_before: int  # sessions of which the log lacks the first turn; they are left out
    branches: int  # sessions whose first turn repeats another one's history, which counts as new
    other_models: Mapping[str, int]  # turns that are left out

    @cached_property
    def gaps_s(self) -> tuple[float, ...]:
        """From each session's beginning to the next one's, without long silences unless most gaps are such."""
        every = tuple(after.began_s - before.began_s for before, after in pairwise(self.sessions))
        usual = tuple(gap_s for gap_s in every if gap_s <= MOST_SILENCE_S)
        return usual if 2 * len(usual) >= len(every) else every

    @property
    def silences(self) -> int:
        """That are left out of `gaps_s`."""
        return len(self.sessions) - 1 - len(self.gaps_s)

    @property
    def span_s(self) -> float:
        """So many sessions need as much time as gaps between them, and one more."""
        return max(LEAST_SPAN_S, fmean(self.gaps_s) * len(self.sessions))

    @property
    def rate(self) -> float:
        return len(self.sessions) / self.span_s

    @cached_property
    def turns(self) -> tuple[LogTurn, ...]:
        return tuple(turn for session in self.sessions for turn in session.turns)

    @property
    def later_turns(self) -> int:
        return len(self.turns) - len(self.sessions)

    @property
    def burstiness(self) -> float:
        """Standard deviation of the gaps between sessions over their mean: 1 in a Poisson process."""
        return pstdev(self.gaps_s) / mean_s if (mean_s := fmean(self.gaps_s)) > 0 else 0.0

    def drawn(self, seed: int) -> list[TracedConversation]:
        """Seed 0: the sessions as they are; else drawn again from them, with repetition."""
        random = Random(f"traffic {seed}")
        known: Sequence[LogSession] = self.sessions
        if len(known) > MOST_SESSIONS:
            known = Random("traffic").sample(known, MOST_SESSIONS)
        if seed:
            known = random.choices(known, k=len(known))
        return [one.conversation(number) for number, one in enumerate(known)]


def traffic_of(turns: Iterable[PastTurn], model: str | None = None) -> Traffic:
    """model: None: the one with most turns. turns: in order of decisions. ConfigError where too little is left."""
    by_model = defaultdict[str, list[PastTurn]](list)
    for turn in turns:
        by_model[turn.model].append(turn)
    counts = Counter({name: len(of_model) for name, of_model in by_model.items()})
    if model is None:
        model = counts.most_common(1)[0][0] if counts else ""
    if model not in counts:
        raise ConfigError(f"model = {model!r}: must be {', '.join(sorted(counts)) or 'in the log'}", param="model")
    grouped = defaultdict[str | int, list[PastTurn]](list)  # those without a session are each alone
    for number, turn in enumerate(by_model[model]):
        grouped[turn.session or number].append(turn)
    whole = [ordered for one in grouped.values() if _begins(ordered := sorted(one, key=lambda turn: turn.arrived_s))]
    last_s = max(turn.answering.ended_s for turn in by_model[model])
    silence_s = _usual_silence_s(whole)
    sessions = sorted((_session(one, last_s - silence_s) for one in whole), key=lambda one: one.began_s)
    if len(sessions) < LEAST_SESSIONS:
        raise ConfigError(
            f"the log has {len(sessions)} sessions of model {model!r} from their first turn on: at least "
            f"{LEAST_SESSIONS} are needed, and some hundreds to trust what they tell",
            param="log",
        )
    return Traffic(
        model=model,
        sessions=tuple(sessions),
        began_before=len(grouped) - len(whole),
        branches=sum(one[0].kind == "branch" for one in whole),
        other_models={name: count for name, count in sorted(counts.items()) if name != model},
    )


def _begins(turns: Sequence[PastTurn]) -> bool:
    return turns[0].number == 1 or turns[0].kind in ("first", "lost", "branch")


def _usual_silence_s(sessions: Sequence[Sequence[PastTurn]]) -> float:
    pauses = sorted(_pause_s(before, after) for turns in sessions for before, after in pairwise(turns))
    return pauses[math.ceil(USUAL_PAUSES * len(pauses)) - 1] if pauses else 0.0


def _pause_s(before: PastTurn, after: PastTurn) -> float:
    return max(0.0, after.arrived_s - before.answering.ended_s)


def _session(turns: Sequence[PastTurn], over_s: float) -> LogSession:
    """over_s: a session that was active since may go on."""
    first, made, known = turns[0], list[LogTurn](), 0
    for before, turn in zip((None, *turns), turns, strict=False):
        prompt = max(1, turn.prompt_counted if turn.prompt_counted is not None else turn.prompt_tokens)
        output = max(1, turn.completion_counted if turn.completion_counted is not None else turn.output_tokens)
        repeated = 0 if before is None else min(turn.repeated_tokens, known)
        if known - repeated <= SAME_TOKENS:
            repeated = known if before is not None else 0
        made.append(
            LogTurn(
                prompt_tokens=prompt,
                repeated_tokens=min(repeated, prompt - 1),
                output_tokens=output,
                pause_s=0.0 if before is None else _pause_s(before, turn),
                is_counted=turn.prompt_counted is not None and turn.completion_counted is not None,
            )
        )
        known = prompt + output
    return LogSession(first.arrived_s, _shared_tokens(first), tuple(made), turns[-1].answering.ended_s > over_s)


def _shared_tokens(first: PastTurn) -> int:
    """Of a branch the cached tokens are another session's own."""
    if first.kind == "branch":
        return 0
    found = first.cached_tokens if first.cached_counted is None else first.cached_counted
    prompt = first.prompt_tokens if first.prompt_counted is None else first.prompt_counted
    return max(0, min(found, prompt - 1)) // SHARED_STEP_TOKENS * SHARED_STEP_TOKENS
