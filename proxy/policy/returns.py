"""What workers wait for: turns that are likely to come back, and what it costs them if their KV is evicted.

A session returns, if at all, after pauses like those that were seen (`laws.forecasts`), to the worker that answered it
last. What is written to a full cache evicts what was used longest ago (`beliefs`), and that costs the turns that would
have come back to it, unless another worker that answers turns holds it too, or it is soon computed again.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import msgspec

from ..beliefs.beliefs import Beliefs
from ..beliefs.cache_book import CacheBook
from ..fleet.worker import WorkerId
from ..laws.corrections import USUAL_SPREAD
from ..laws.forecasts import Forecasts, kind_of
from ..laws.pauses import HORIZON_S, Pauses
from ..laws.prediction import idle_ttft_s
from ..laws.step_time import EngineProfile
from ..laws.targets import SloTargets, miss
from ..sessions.table import SessionTable

SOONEST_S = 0.25  # and its doublings: by when it is found out how many are back
KEPT_S = 0.5  # for which what is found is used: a session more or less changes little
NEWEST = 64  # of a worker's sessions are asked for when they return: the longer they stay away, the less they do
OLDEST = 32  # are asked for what is lost with them
ANSWERS_KEPT = 4096


class _Away(msgspec.Struct, gc=False):
    """Sessions of one worker and model that may come back to it."""

    made_s: float
    book: int  # its number: that of another engine is another one
    sessions: list[tuple[Pauses, float, float]]  # seconds away, and the share that stays away for so long
    back: dict[int, float] = {}  # how many are back after so many doublings of `SOONEST_S`, as far as it is asked for

    def back_within(self, seconds: float) -> float:
        if seconds <= SOONEST_S:
            return self._back_after(0) * seconds / SOONEST_S
        doublings = int(math.log2(seconds / SOONEST_S))
        before, after = self._back_after(doublings), self._back_after(doublings + 1)
        return before + (after - before) * (seconds / (SOONEST_S * 2.0**doublings) - 1.0)

    def _back_after(self, doublings: int) -> float:
        back = self.back.get(doublings)
        if back is None:
            seconds, now_s = SOONEST_S * 2.0**doublings, self.made_s
            back = sum(1.0 - pauses.away(idle_s + seconds, now_s) / here for pauses, idle_s, here in self.sessions)
            self.back[doublings] = back
        return back


class Recomputed(msgspec.Struct, frozen=True, gc=False):
    """Chance that a turn misses its target where so many tokens of its history have to be computed again.

    Short histories are so soon computed that nobody notices: what is evicted with them costs next to nothing. What the
    engine will do then is not known, so its TTFT may be as far from an idle one's as any.
    """

    costs: EngineProfile
    targets: SloTargets

    def __call__(self, tokens: int) -> float:
        ttft_s, idle_s = (idle_ttft_s(self.costs, tokens, held) for held in (0, tokens))
        return miss(ttft_s, self.targets.ttft_limit_s(idle_s), USUAL_SPREAD)


class _Losses(msgspec.Struct, gc=False):
    """What is lost with a full cache's oldest prefixes, found out as far as it is asked for."""

    made_s: float
    book: int
    evicted: int  # tokens, before `ends`
    coming: list[tuple[int, int]]  # keys and tokens of those that are not asked for yet, the next one last
    ends: list[int] = []  # tokens up to the end of each prefix, in the order in which they are evicted
    lost: list[float] = []  # turns that are late without all up to there

    def lost_by(self, evicted: int) -> float:
        """evicted: tokens, all told."""
        tokens = evicted - self.evicted
        if tokens <= 0 or not self.ends:
            return 0.0
        at = bisect_right(self.ends, tokens)
        if at == len(self.ends):  # what lies beyond is taken to be alike
            return self.lost[-1] * tokens / self.ends[-1]
        begin, before = (self.ends[at - 1], self.lost[at - 1]) if at else (0, 0.0)
        return before + (self.lost[at] - before) * (tokens - begin) / (self.ends[at] - begin)


class Returns:
    """`prefills_answer` is that of the rules in force."""

    def __init__(
        self, sessions: SessionTable, beliefs: Beliefs, forecasts: Forecasts, *, prefills_answer: bool = False
    ) -> None:
        self._sessions = sessions
        self._beliefs = beliefs
        self._forecasts = forecasts
        self.prefills_answer = prefills_answer
        self._away: dict[tuple[WorkerId, str], _Away] = {}
        self._losses: dict[tuple[WorkerId, str, SloTargets], _Losses] = {}

    def within(self, seconds: float, worker: WorkerId, model: str, now_s: float) -> float:
        """Turns of its sessions that are likely to come back to the worker in the next `seconds`, each session once.

        Over a long prompt that is more, or less, than the rate of now would give: many pauses are about equally long.
        """
        book = self._beliefs.book(worker)
        if book is None:
            return 0.0
        known = self._away.get((worker, model))
        if known is None or known.book != book.number or not 0.0 <= now_s - known.made_s < KEPT_S:
            if len(self._away) >= ANSWERS_KEPT:
                self._away.clear()
            known = _Away(now_s, book.number, self._sessions_away(worker, book, model, now_s))
            self._away[worker, model] = known
        return known.back_within(seconds)

    def lost(self, worker: WorkerId, model: str, tokens: int, now_s: float, recomputed: Recomputed) -> float:
        """Turns that are likely to come back and be late as they find nothing, if so many tokens are written to the
        worker's cache. recomputed: there, by the targets that they are taken to have."""
        book = self._beliefs.book(worker)
        if book is None or (over := tokens - book.room()) <= 0:
            return 0.0
        key = (worker, model, recomputed.targets)
        known = self._losses.get(key)
        if known is None or known.book != book.number or not 0.0 <= now_s - known.made_s < KEPT_S:
            if len(self._losses) >= ANSWERS_KEPT:
                self._losses.clear()
            oldest = book.oldest(OLDEST)
            oldest.reverse()
            known = self._losses[key] = _Losses(now_s, book.number, book.evicted, oldest)
        evicted = book.evicted + int(over)
        if known.coming:
            self._look(known, book, model, evicted - known.evicted, recomputed)
        return known.lost_by(evicted) - known.lost_by(book.evicted)

    def _sessions_away(
        self, worker: WorkerId, book: CacheBook, model: str, now_s: float
    ) -> list[tuple[Pauses, float, float]]:
        of_model = self._forecasts.pauses(model)
        found: list[tuple[Pauses, float, float]] = []
        for session in map(self._sessions.of_history, book.newest(NEWEST)):
            if session is not None and session.decode == worker and (calls_tool := session.awaits) is not None:
                pauses, idle_s = of_model[kind_of(session.turn, calls_tool)], now_s - session.seen_s
                if idle_s < HORIZON_S and (here := pauses.away(idle_s, now_s)) > 0.0:
                    found.append((pauses, idle_s, here))
        return found

    def _look(self, known: _Losses, book: CacheBook, model: str, tokens: int, recomputed: Recomputed) -> None:
        """As far as so many tokens reach."""
        ends, losses, coming = known.ends, known.lost, known.coming
        end, lost = (ends[-1], losses[-1]) if ends else (0, 0.0)
        while coming and end < tokens:
            key, own = coming.pop()
            if own:
                end += own
                if chance := self._chance(key, book, model, known.made_s):
                    lost += chance * recomputed(own)
                ends.append(end)
                losses.append(lost)

    def _chance(self, key: int, book: CacheBook, model: str, now_s: float) -> float:
        """That a turn comes back which only this worker serves from its cache."""
        session = self._sessions.of_history(key)
        if session is None or (calls_tool := session.awaits) is None:
            return 0.0
        if self._beliefs.is_held_elsewhere(key, book, prefills_answer=self.prefills_answer):
            return 0.0
        idle_s = now_s - session.seen_s
        return self._forecasts.chance_of_return(model, session.turn, calls_tool=calls_tool, idle_s=idle_s, now_s=now_s)
