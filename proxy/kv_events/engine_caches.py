"""What each engine holds, by its own KV events: one place to ask for all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from ..beliefs.held import Found
from ..fleet.view import WorkerView
from ..fleet.worker import Role, Worker, WorkerId
from .block_tokens import TOKEN_BYTES, PromptTokens, scope_of
from .event_batch import session_name
from .event_stream import EventStream

_NAMING = (0, 30)  # the first vLLM whose events carry the session that a request names


class EngineCaches:
    def __init__(self, session_of: Callable[[int], int], *, reads_tokens: bool = False) -> None:
        """session_of(history): 60 bits, the same in each of this proxy's processes."""
        self._session_of = session_of
        self._reads_tokens = reads_tokens
        self._streams: dict[WorkerId, dict[int, EventStream]] = {}  # by data-parallel rank

    def __bool__(self) -> bool:
        """Whether any worker's events are heard."""
        return bool(self._streams)

    def observed(self, history: int, most: int) -> dict[WorkerId, int]:
        """`held` by each worker whose events tell it, `most` at most."""
        if not self._streams:
            return {}
        session = self._session_of(history)
        found = ((worker, _least_held(streams.values(), session)) for worker, streams in self._streams.items())
        return {worker: min(held, most) for worker, held in found if held is not None}

    def found(
        self, prompt: PromptTokens, model: str, views: Mapping[WorkerId, WorkerView], source: int | None = None
    ) -> dict[WorkerId, Found]:
        """What each of these workers holds of a prompt, whosesoever turns brought it there; without those that do not
        say. source: the history that it continues, of whose newest turn the events may still be under way.

        An engine computes at least one token of each prompt, so the last one is never held.
        """
        found, ids = dict[WorkerId, Found](), prompt.ids[:-TOKEN_BYTES]
        for worker, streams in self._streams.items():
            view = views.get(worker)
            if view is None or (adapter := self._adapter(view.worker, model)) is None:
                continue
            scope = scope_of(adapter, prompt.salt)
            held = [stream.held_of(ids, scope) for stream in streams.values()]
            known = [tokens for tokens in held if tokens is not None]
            if known and len(known) == len(held):
                is_whole = all(stream.index.is_whole for stream in streams.values())
                is_named = source is None or self.held(worker, source) is not None
                is_exact = is_whole and (is_named or not _names_sessions(view.worker.engine_version))
                found[worker] = Found(min(known), is_exact=is_exact)
        return found

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

    def drop(self, worker: WorkerId) -> None:
        self._streams.pop(worker, None)

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


def _names_sessions(version: str) -> bool:
    """Also where the version is not known: an older engine passes the name over."""
    number = version.removeprefix("v").split(".")
    return not (number[0].isdigit() and number[1:] and number[1].isdigit()) or (
        (int(number[0]), int(number[1])) >= _NAMING
    )
