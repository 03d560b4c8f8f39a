"""Workers as a decision sees them: frozen views, and the fleet of those that take a model's turns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..errors import NotFound
from .places import UNKNOWN
from .worker import ANSWERING, Load, Role, Worker, WorkerId

NEVER_S = -math.inf
BARE_VIEWS_KEPT = 256


RECENT_S = 30.0  # after which a prompt counts by 1/e


class RecentPrompts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Prompts that a worker was given, each counting ever less. The rates are per second of the time lately."""

    at_s: float = 0.0  # the time of these figures
    busy: float = 0.0  # share of the time of those that decode there that they took
    rate: float = 0.0  # prompts
    urgency: float = 0.0  # prompts, each over the seconds that it could have waited

    def left(self, now_s: float) -> float:
        """The share that still counts."""
        return math.exp((self.at_s - now_s) / RECENT_S) if now_s > self.at_s else 1.0

    def plus(self, beside_s: float, patience_s: float, now_s: float) -> RecentPrompts:
        """patience_s: how long it could have waited."""
        left, patience_s = self.left(now_s), patience_s if patience_s > LEAST_PATIENCE_S else LEAST_PATIENCE_S
        return RecentPrompts(
            now_s if now_s > self.at_s else self.at_s,
            self.busy * left + beside_s / RECENT_S,
            self.rate * left + 1.0 / RECENT_S,
            self.urgency * left + 1.0 / (RECENT_S * patience_s),
        )

    def joined(self, other: RecentPrompts) -> RecentPrompts:
        if not other.rate:
            return self
        if not self.rate:
            return other
        older, newer = (self, other) if self.at_s < other.at_s else (other, self)
        left = older.left(newer.at_s)
        return RecentPrompts(
            newer.at_s,
            older.busy * left + newer.busy,
            older.rate * left + newer.rate,
            older.urgency * left + newer.urgency,
        )

    @property
    def patience_s(self) -> float:
        """How long one of them could have waited: the harmonic mean."""
        return self.rate / self.urgency if self.urgency else math.inf


NO_PROMPTS = RecentPrompts()
LEAST_PATIENCE_S = 0.01


class Others(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an engine had beside the turns of this proxy when it last reported: what other proxies sent there."""

    requests: int = 0
    running: int = 0  # of these, that decode
    context_tokens: int = 0  # of those that run, in sum


NO_OTHERS = Others()


class WorkerView(msgspec.Struct, frozen=True, gc=False):
    """One worker at one moment. A struct, as copies of it are made at every step of a turn."""

    worker: Worker
    name: str  # "D2": what clients and metrics see in place of the address
    incarnation: str
    load: Load = Load()
    others: Others = NO_OTHERS
    reports: int = 0  # of its load, so far
    inflight: int = 0  # legs of this proxy that run there now
    queued_prefill_tokens: int = 0  # prompt tokens that this proxy's legs still have to compute there
    places: int = UNKNOWN  # legs that it should have at once, as far as its load tells; a P has no such limit
    placed_tokens: int = 0  # of KV that this proxy's turns brought to a D or R since it last reported its load
    recent_tokens: int = 0  # of KV that this proxy's turns brought there, the older ones counting ever less
    decoding: int = 0  # sequences of this proxy that decode there or will; of a SPLIT from the decision on
    context_tokens: int = 0  # theirs, in sum, with half of the answer expected
    prefills: int = 0  # prompts of this proxy that queue or are computed there
    queued_prefill_s: float = 0.0  # that these take, by the laws
    prefills_since_s: float = 0.0  # when the first of them began, as far as known
    recent_prompts: RecentPrompts = NO_PROMPTS  # of this proxy, that were to be computed there
    unseen_prefill_until_s: float = 0.0  # by when others are computed, by the laws: their answers come as a whole
    reserved_tokens: int = 0  # of KV that turns under way need there in the end, beside what it held before
    sends_free_s: float = 0.0  # when its link has sent all KV that is to be moved; a past time: now
    receives_free_s: float = 0.0
    heard_s: float = 0.0
    reported_s: float = NEVER_S  # when its load was reported last
    up: bool = True  # False: a static worker whose probe fails
    unanswered: bool = False  # down by probes that came to nothing at an open port: perhaps it still answers turns
    draining: bool = False  # as the worker announced; a static one until its engine, its config or the operator says so
    held_back: bool = False  # by the operator
    configured: Worker | None = None  # as the config or the admin API named it, before anything was probed
    since_s: float = 0.0  # when it last joined or recovered: slow start counts from there

    @property
    def id(self) -> WorkerId:
        return self.worker.address  # type: ignore[return-value]  # as Worker.id, without its call

    @property
    def role(self) -> Role:
        return self.worker.role

    @property
    def state(self) -> str:
        return "down" if not self.up else "draining" if self.draining or self.held_back else "up"

    @property
    def requests(self) -> int:
        """Requests on the engine, as other proxies may use it too."""
        return self.inflight + self.others.requests

    def is_full(self, limit: float) -> bool:
        """Whether it has as many legs as it should have, or as `limit` allows."""
        return self.inflight >= limit or (self.places != UNKNOWN and self.inflight >= self.places)

    def takes_turns(self, model: str) -> bool:
        models = self.worker.models
        return self.up and not self.draining and not self.held_back and (not models or model in models)

    def takes_the_same(self, old: WorkerView) -> bool:
        """Whether the answers of `takes_turns` and `may_return` are those of an older view of this worker."""
        if (self.up, self.draining, self.held_back) != (old.up, old.draining, old.held_back):
            return False
        return self.worker is old.worker or (self.role, self.worker.models) == (old.role, old.worker.models)

    def begins_after(self, old: WorkerView) -> bool:
        """Whether another engine is there than in an older view, or the same is up again."""
        return self.incarnation != old.incarnation or self.role is not old.role or (self.up and not old.up)

    def is_told_of_as(self, old: WorkerView) -> bool:
        """Whether whoever hands KV to it or takes KV from it finds it as in an older view."""
        now, before = self.worker, old.worker
        return now is before or (now.connector, now.coordinates) == (before.connector, before.coordinates)

    def may_return(self, model: str) -> bool:
        """Whether it is down, and would answer turns of this model if it were up."""
        return self.role in ANSWERING and self.is_missed(model)

    def is_missed(self, model: str) -> bool:
        """Whether it is down, and would take part in turns of this model if it were up."""
        models = self.worker.models
        return not (self.up or self.draining or self.held_back) and (not models or model in models)


class BareViews:
    """Views without a worker's state, one for all that need to know for long who it is: a full one takes 700 bytes."""

    def __init__(self) -> None:
        self._known: dict[WorkerId, WorkerView] = {}

    def of(self, view: WorkerView) -> WorkerView:
        known = self._known.get(view.id)
        if (
            known is None
            or known.worker is not view.worker
            or known.configured is not view.configured
            or known.incarnation != view.incarnation
        ):
            if len(self._known) >= BARE_VIEWS_KEPT:  # most are of workers that are gone
                self._known.clear()
            known = WorkerView(view.worker, view.name, view.incarnation, configured=view.configured)
            self._known[view.id] = known
        return known


Takers = tuple[Sequence[WorkerId], Sequence[WorkerId], Sequence[WorkerId], Sequence[WorkerId]]
"""The P, D and R that take one model's turns, and those D and R that would if they were up."""


class Fleet(msgspec.Struct, frozen=True, gc=False):
    """All workers at one moment, by role those that take turns of one model, in the same order, and those down."""

    views: Mapping[WorkerId, WorkerView]
    prefills: Sequence[WorkerView]
    decodes: Sequence[WorkerView]
    replicas: Sequence[WorkerView]
    down: Sequence[WorkerView]  # D and R
    newest_s: float = math.inf  # none of them has joined or recovered since; inf: that is not known

    @classmethod
    def of(cls, views: Mapping[WorkerId, WorkerView], takers: Takers) -> Fleet:
        view_of = views.__getitem__
        prefills, decodes, replicas, down = (list(map(view_of, ids)) for ids in takers)
        return cls(views, prefills, decodes, replicas, down)


def taking_turns(views: Iterable[WorkerView], model: str) -> Takers:
    by_role, down = {role: list[WorkerId]() for role in Role}, list[WorkerId]()
    for view in views:
        if view.takes_turns(model):
            by_role[view.role].append(view.id)
        elif view.may_return(model):
            down.append(view.id)
    return by_role[Role.PREFILL], by_role[Role.DECODE], by_role[Role.REPLICA], down


def check_model(model: str, views: Iterable[WorkerView]) -> None:
    """NotFound where workers are known, whether up or not, but none of them serves the model."""
    served = [view.worker.models for view in views]
    if served and not any(not models or model in models for models in served):
        raise NotFound(f"model {model!r} is not served here", param="model", code="model_not_found")
