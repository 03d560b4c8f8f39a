"""What an advice rests on that neither the profile nor the log can tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ppd.proxy.config import Mode
from ppd.proxy.laws.accuracy import STALE
from ppd.proxy.laws.profile_file import ProfileFile, Status
from ppd.proxy.policy import Rules

from ..replay.past_turns import PastLog, PastTurn
from ..replay.replay import replay
from ..simulation.believed import laws_of
from ..simulation.setup import Setup
from .traffic import MOST_SESSIONS, MOST_SILENCE_S, Traffic

FEW_SESSIONS = 300
MANY = 0.05  # of the turns or sessions: from so many on it is told
BURSTY = 1.5
JUDGED_TURNS = 5000  # the last of a log, that are compared with the profile


@dataclass(frozen=True, slots=True)
class Caveat:
    """`share`: of the turns; None where it is not about some of them."""

    what: str
    share: float | None = None

    def __str__(self) -> str:
        return self.what if self.share is None else f"{self.share:.0%} of the turns: {self.what}"


@dataclass(frozen=True, slots=True)
class ProfileFit:
    """Of the log's measured times to what the profile predicts: median of measured over predicted, less 1."""

    figure: str
    turns: int
    median: float
    absolute: float

    @property
    def is_stale(self) -> bool:
        return self.absolute > STALE


def fits(turns: Sequence[PastTurn], profile: ProfileFile) -> list[ProfileFit]:
    compared = replay(
        turns[-JUDGED_TURNS:],
        Rules(mode=Mode.ALWAYS_LOCAL),
        laws_of(Setup(profile=profile)),
        capacity_tokens=profile.kv_capacity_tokens,
    )
    return [
        ProfileFit(figure, len(errors), median(errors), median(map(abs, errors)))
        for figure, errors in (("TTFT", compared.ttft_errors), ("TPOT", compared.tpot_errors))
        if errors
    ]


def caveats(
    log: PastLog, traffic: Traffic, profile: ProfileFile, found: Sequence[ProfileFit], pause_s: float
) -> list[Caveat]:
    return [*_of_profile(traffic, profile, found), *_of_log(log, traffic, profile, pause_s)]


def _of_profile(traffic: Traffic, profile: ProfileFile, found: Sequence[ProfileFit]) -> Iterator[Caveat]:
    turns, count = traffic.turns, len(traffic.turns)
    seen = None if profile.fit is None else profile.fit.range
    if seen is not None:
        steps = None if profile.fit is None else profile.fit.steps
        but = f"; bare steps were checked up to {steps.context_tokens:,}" if steps is not None else ""
        if long := sum(turn.prompt_tokens + turn.output_tokens > seen.context_tokens for turn in turns):
            yield Caveat(
                f"contexts beyond the {seen.context_tokens:,} tokens up to which it was fitted{but}", long / count
            )
        if large := sum(turn.new_tokens > seen.new_tokens for turn in turns):
            yield Caveat(f"more new tokens than the {seen.new_tokens:,} that it was fitted to{but}", large / count)
    if profile.status is Status.MODELLED:
        yield Caveat(f"{profile.name} was computed from data sheets; nothing was measured")
    for one in found:
        if one.is_stale:
            yield Caveat(
                f"measured {one.figure} is {one.median:+.0%} beside the predicted one (median of {one.turns} turns): "
                "the profile is of other engines, or they had more to do than its laws can tell"
            )
    yield Caveat(
        f"the log does not say what GPU its engines ran on, nor how they are linked: {profile.model} on "
        f"{profile.gpu_count} x {profile.gpu} is assumed, and handoffs by NIXL over {profile.network}"
    )


def _of_log(log: PastLog, traffic: Traffic, profile: ProfileFile, pause_s: float) -> Iterator[Caveat]:
    turns, sessions = traffic.turns, traffic.sessions
    count, capacity = len(turns), profile.kv_capacity_tokens
    if len(sessions) < FEW_SESSIONS:
        yield Caveat(
            f"{len(sessions)} sessions are few: they are drawn again and again, and chance is in the intervals"
        )
    if len(sessions) > MOST_SESSIONS:
        yield Caveat(f"{MOST_SESSIONS:,} of its {len(sessions):,} sessions, drawn at random, are played")
    if not traffic.later_turns:
        yield Caveat("no session has a second turn: only first turns are judged")
    shares = (
        (sum(not turn.is_counted for turn in turns), "no counts by the engine: lengths are the proxy's estimates"),
        (
            sum(turn.prompt_tokens + turn.output_tokens > capacity for turn in turns),
            f"more than the {capacity:,} tokens of KV of one engine: their sessions end before them",
        ),
        (sum(turn.pause_s > pause_s for turn in turns), f"pauses beyond {pause_s:g} s, which are cut to that"),
    )
    yield from (Caveat(what, turns_of / count) for turns_of, what in shares if turns_of)
    if log.undecided:
        yield Caveat("were taken on by no worker, and are left out", log.undecided / (log.undecided + len(log.turns)))
    if other := sum(traffic.other_models.values()):
        yield Caveat(f"other models ({', '.join(traffic.other_models)}), left out (--model)", other / len(log.turns))
    yield from _of_edges(traffic)
    if traffic.silences:
        yield Caveat(
            f"no session began for {MOST_SILENCE_S / 86400:.0f} days ({traffic.silences} x), as by a clock that was "
            "wrong: such times are left out of the rate"
        )
    if traffic.burstiness > BURSTY:
        yield Caveat(
            f"sessions begin in bursts (spread of the gaps {traffic.burstiness:.1f} x their mean); they are played "
            "as they come by chance, so keep a reserve"
        )


def _of_edges(traffic: Traffic) -> Iterator[Caveat]:
    count = len(traffic.sessions)
    if traffic.began_before >= MANY * count:
        yield Caveat(f"beside the {count} sessions {traffic.began_before} began before the log, and are left out")
    edges = (
        (sum(one.may_go_on for one in traffic.sessions), "may go on after the log's end, and count as ended"),
        (traffic.branches, "begin with a part of another one, which counts as new text"),
    )
    yield from (Caveat(f"{few} of {count} sessions {what}") for few, what in edges if few >= MANY * count)
