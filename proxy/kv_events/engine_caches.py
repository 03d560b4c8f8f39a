"""What each engine holds, by its own KV events: one place to ask for all workers."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from ..beliefs.held import Found, Residency
from ..fleet.view import WorkerView
from ..fleet.worker import Role, Worker, WorkerId
from .block_tokens import TOKEN_BYTES, PromptTokens, scope_of
from .event_batch import session_name
from .event_stream import EventStream

LATE_S = 0.25  # a worker whose events come later than this is believed by its book
LATE_FOR_S = 60.0

NEW_BLOCKS = 4  # where a turn has so many, some are surely stored
AWAITED_KEPT = 64  # of the newest turns; each is looked at once, so that lateness shows in few

_VERSION = re.compile(r"v?([0-9]{1,9})\.([0-9]{1,9})(?:\.|\Z)")
_NAMING = (0, 30)  # the first vLLM whose events carry the session that a request names


class _Awaited(msgspec.Struct, frozen=True, gc=False):
    """What a worker's events must tell by then."""

    by_s: float
    session: int
    tokens: int


class EngineCaches:
    def __init__(self, session_of: Callable[[int], int], *, reads_tokens: bool = False) -> None:
        """session_of(history): 60 bits, the same in each of this proxy's processes."""
        self._session_of = session_of
        self._reads_tokens = reads_tokens
        self._streams: dict[WorkerId, dict[int, EventStream]] = {}  # by data-parallel rank
        self._awaited: dict[WorkerId, deque[_Awaited]] = {}
        self._late_until_s: dict[WorkerId, float] = {}

    def __bool__(self) -> bool:
        """Whether any worker's events are heard."""
        return bool(self._streams)

    def observed(self, history: int, most: int, last: Residency | None, now_s: float) -> dict[WorkerId, int]:
        """`held` by each worker whose events tell it in time, `most` at most.

        last: what the history's newest turn left on the worker that answered it. Until that is told, what was told
        before says nothing: of blocks that were gone, the turn may have computed some anew.
        """
        if not self._streams:
            return {}
        session, found = self._session_of(history), dict[WorkerId, int]()
        for worker, streams in self._streams.items():
            held = _least_held(streams.values(), session)
            if held is None or self._is_late(worker, now_s):
                continue
            if last is None or worker != last.worker or _have_told_newest(streams.values(), session, last.tokens):
                found[worker] = min(held, most)
        return found

    def stored(self, worker: WorkerId, history: int, tokens: int, new: int, now_s: float) -> None:
        """The worker has just stored so many tokens of the history, `new` of them anew. Its events tell that soon."""
        streams = self._streams.get(worker)
        if streams is None:
            return
        if new >= NEW_BLOCKS * max((stream.index.block_tokens for stream in streams.values()), default=0):
            awaited = self._awaited.setdefault(worker, deque(maxlen=AWAITED_KEPT))
            awaited.append(_Awaited(now_s + LATE_S, self._session_of(history), tokens))

    def _is_late(self, worker: WorkerId, now_s: float) -> bool:
        """Whether its events lately told something late, so that what they tell of others may be as old."""
        awaited, streams = self._awaited.get(worker), self.streams(worker)
        while awaited and awaited[0].by_s <= now_s:
            due = awaited.popleft()
            if not _have_told(streams, due.session, due.tokens):
                self._late_until_s[worker] = now_s + LATE_FOR_S
        return self._late_until_s.get(worker, 0.0) > now_s

    def found(
        self,
        prompt: PromptTokens,
        model: str,
        views: Mapping[WorkerId, WorkerView],
        source: int | None,
        last: Residency | None,
        now_s: float,
    ) -> dict[WorkerId, Found]:
        """What each of these workers holds of a prompt, whosesoever turns brought it there; without those that do not
        say, or say it late. source, last: the history that it continues, and what its newest turn left; of that turn
        the events may still be under way.

        An engine computes at least one token of each prompt, so the last one is never held.
        """
        found, ids = dict[WorkerId, Found](), prompt.ids[:-TOKEN_BYTES]
        for worker, streams in self._streams.items():
            view = views.get(worker)
            if view is None or (adapter := self._adapter(view.worker, model)) is None or self._is_late(worker, now_s):
                continue
            scope = scope_of(adapter, prompt.salt)
            held = [stream.held_of(ids, scope) for stream in streams.values()]
            known = [tokens for tokens in held if tokens is not None]
            if known and len(known) == len(held):
                is_whole = all(stream.index.is_whole for stream in streams.values())
                is_told = source is None or self._has_told_all(view.worker, source, last)
                is_exact = is_whole and is_told
                found[worker] = Found(min(known), is_exact=is_exact)
        return found

    def _has_told_all(self, worker: Worker, source: int, last: Residency | None) -> bool:
        """Whether no event of this history can be under way, as far as events name it."""
        if not _names_sessions(worker.engine_version):
            return True
        if self.held(worker.id, source) is None:
            return False
        if last is None or last.worker != worker.id:
            return True
        return _have_told_newest(self.streams(worker.id), self._session_of(source), last.tokens)

    def _adapter(self, worker: Worker, model: str) -> str | None:
        """By which adapter the worker keeps this model's blocks, "" for none; None: it may be either."""
        models = {worker.aliases.get(name, name) for name in worker.models}
        if any(model in stream.index.adapters for stream in self.streams(worker.id)):
            return model
        return "" if len(models) <= 1 else None

    def held(self, worker: WorkerId, history: int) -> int | None:
        """Tokens of the history's newest prompt and reply that the worker holds, whole blocks; None: no evidence.

        Of several ranks the least, as any of them may get the next turn.
        """
        return _least_held(self.streams(worker), self._session_of(history))

    def session_id(self, worker: Worker, history: int) -> str | None:
        """What a leg names as its session, so that the worker's events carry it; None for one that tells nothing."""
        if worker.id not in self._streams or not _names_sessions(worker.engine_version):
            return None
        return session_name(self._session_of(history))

    # -- for those that read events

    def stream(self, worker: WorkerId, rank: int) -> EventStream:
        return self._streams.setdefault(worker, {}).setdefault(rank, EventStream(reads_tokens=self._reads_tokens))

    def streams(self, worker: WorkerId) -> Iterable[EventStream]:
        """Of all ranks that were heard."""
        return self._streams.get(worker, {}).values()

    def renew(self, worker: WorkerId) -> None:
        """Its engine has started over: nothing is known, and what is still read of the one before counts no more."""
        ranks = list(self._streams.get(worker, ()))
        self.drop(worker)
        for rank in ranks:
            self.stream(worker, rank)

    def drop(self, worker: WorkerId) -> None:
        self._streams.pop(worker, None)
        self._awaited.pop(worker, None)
        self._late_until_s.pop(worker, None)

    def gauges(self, views: Iterable[WorkerView]) -> Iterator[Metric]:
        """Workers whose events say what they hold, by role, and how many blocks those are."""
        heard = GaugeMetricFamily(
            "ppd_workers_on_kv_events", "Workers whose KV events are up to date", labels=("role",)
        )
        blocks = GaugeMetricFamily(
            "ppd_kv_event_blocks", "KV blocks that workers hold by their events", labels=("role",)
        )
        known = [(view.role, list(self.streams(view.id))) for view in views]
        for role in Role:
            streams = [streams for one, streams in known if one is role]
            heard.add_metric((role,), sum(bool(some) and not any(s.is_behind for s in some) for some in streams))
            blocks.add_metric((role,), sum(len(stream.index) for some in streams for stream in some))
        yield from (heard, blocks)


def _least_held(streams: Iterable[EventStream], session: int) -> int | None:
    least: int | None = None
    for stream in streams:
        held = stream.held(session)
        if held is None:
            return None
        least = held if least is None else min(least, held)
    return least


def _have_told(streams: Iterable[EventStream], session: int, tokens: int) -> bool:
    """Whether any rank has: one of them had the turn."""
    return any(stream.has_told(session, tokens) for stream in streams)


def _have_told_newest(streams: Iterable[EventStream], session: int, tokens: int) -> bool:
    return any(stream.has_told(session, tokens, of_newest=True) for stream in streams)


def _names_sessions(version: str) -> bool:
    """Also where the version is not known: an older engine passes the name over."""
    match = _VERSION.match(version)
    return match is None or (int(match[1]), int(match[2])) >= _NAMING
