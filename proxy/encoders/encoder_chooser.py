"""Chooses the encoders of turns, by what the proxy knows of the fleet, and records what engines have since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from ..admission.arrival_rate import Arrivals, RateMeter
from ..config import ProxyConfig
from ..fleet.registry import Registry
from ..fleet.view import WorkerView
from ..fleet.worker import Role, WorkerId
from ..health.doubts import Doubts
from ..health.worker_health import WorkerHealth
from ..media.items import MediaItem
from ..openai.request import Endpoint, Request
from ..policy.placement import SlowStart
from ..runtime.replicated import Replicated
from .answers import EncodedItems
from .choosing import (
    Choices,
    Consumer,
    EncoderRules,
    ItemDecision,
    ItemSeconds,
    NamedEncoders,
    as_named,
    choose,
    left_to_worker,
    takes_embeddings,
    unnamed,
)
from .item_times import ItemTimes, tells
from .records import CACHE_TOKENS, ENCODER_CACHE_TOKENS, EmbeddingRecords, Embeddings

NAMING = (Endpoint.CHAT, Endpoint.RESPONSES)
"""Where engines know media by the `uuid` of their parts. vLLM turns Messages into chat parts without one."""


class EncoderTurn(msgspec.Struct, frozen=True):
    """What the encoders' legs need to know of a turn."""

    request: Request
    consumer: WorkerView  # the worker that computes the prompt
    held_units: int  # messages whose KV it is believed to hold
    headers: Mapping[str, str]
    leg_id: Callable[[str], str]
    started_s: float  # the turn's arrival
    doubts: Doubts
    is_first: bool = True  # no other attempt of the turn has come to its encoders
    named: NamedEncoders | None = None  # None: this process chooses
    predicted_s: float | None = None  # by the laws, from its decision to the first token that is seen of its answer


class EncodedTurn(msgspec.Struct):
    """A turn's media once the encoders are done with them; `computed` is called when its prompt is, well or not."""

    items: EncodedItems = EncodedItems()
    is_late: bool = False  # its first token waits until its worker has encoded some of them
    on_computed: Callable[[bool], None] | None = None

    def computed(self, *, well: bool) -> None:
        if self.on_computed is not None:
            on_computed, self.on_computed = self.on_computed, None
            on_computed(well)


class ItemsToEncode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many items a worker that is no E has to encode now for one process's turns."""

    worker: WorkerId
    items: int


class EncoderChooser:
    """The rules are in `choosing`."""

    def __init__(
        self,
        config: ProxyConfig,
        registry: Registry,
        health: WorkerHealth,
        arrivals: Arrivals,
        now: Callable[[], float],
    ) -> None:
        self._arrivals = arrivals
        self._with_media = RateMeter(config.qps_window_s, now())
        self._processes = config.processes  # among which turns are spread evenly
        self._rules = EncoderRules(
            config.encoder, config.encoder_batch, config.encoder_min_pixels, config.encoder_min_bytes
        )
        self._warm_up_s = config.warm_up_s
        self._registry = registry
        self._health = health
        self._now = now
        self._on_encoders = EmbeddingRecords(ENCODER_CACHE_TOKENS)
        self._on_others = EmbeddingRecords(CACHE_TOKENS)
        self._times = ItemTimes()
        self._encoding = Counter[WorkerId]()  # items that other workers than encoders have to encode now
        self._elsewhere: dict[int, Counter[WorkerId]] = {}  # the same for turns of other processes, by process
        self.replicated: Replicated[Embeddings | ItemsToEncode] | None = None

    def choose(self, turn: EncoderTurn) -> Choices | None:
        """None: the fleet has no encoder, or the worker that computes the prompt takes nothing of one."""
        media, consumer = turn.request.media, turn.consumer
        if not takes_embeddings(consumer.worker):
            return None
        is_naming = turn.request.endpoint in NAMING
        if turn.named is not None:
            return as_named(media, turn.named, self._rules.batch) if is_naming else unnamed(media, self._rules)
        encoders = [view for view in self._registry.views() if view.role is Role.ENCODE]
        if not encoders:
            return None
        now_s = self._now()
        if turn.is_first:  # as turns are counted
            self._with_media.count(now_s, self._processes)
        if not is_naming:
            return unnamed(media, self._rules)
        blocked = self._health.breakers.blocked(now_s)
        able = [view for view in encoders if view.takes_turns(turn.request.model) and view.id not in blocked]
        seen = Consumer(
            holds=lambda item: self._on_others.holds(consumer, item),
            held_units=turn.held_units,
            encoding=self._to_encode(consumer.id),
            beside=consumer.decoding + consumer.prefills,
            media_share=self._with_media.rate_rps(now_s) / max(1e-9, self._arrivals.turns.rate_rps(now_s)),
            seconds=self.seconds(turn.request.model),
        )
        slow_start = SlowStart(now_s, self._warm_up_s)
        return choose(media, able, seen, self._rules, self._on_encoders.holds, slow_start)

    def seconds(self, model: str) -> ItemSeconds:
        """As this process has seen it."""
        return self._times.of(model, self._now())

    def until_computed(
        self, turn: EncoderTurn, decisions: Mapping[str, ItemDecision], predicted_s: float | None = None
    ) -> Callable[[bool], None]:
        """Books what the worker itself has to encode. The result ends that; it is told whether all went well.

        predicted_s: until then, without media.
        """
        here = left_to_worker(decisions)
        consumer, media = turn.consumer, turn.request.media
        self._count(consumer.id, here)
        began_s, queued = self._now(), self._to_encode(consumer.id)

        def computed(well: bool) -> None:
            self._count(consumer.id, -here)
            if well:  # what lies in a prefix was not needed, and of what has no name there the name says nothing
                others = (ItemDecision.PREFIX, ItemDecision.UNNAMED)
                used = (item for item in media if decisions[item.name] not in others)
                self._tell(self._on_others.add(consumer, used))
            if well and here and predicted_s is not None and tells(decisions.values()):
                now_s = self._now()
                self._times.computed(turn.request.model, now_s - began_s - predicted_s, queued, now_s)

        return computed

    def until_encoded(self, turn: EncoderTurn, view: WorkerView, items: Sequence[MediaItem]) -> Callable[[], None]:
        """An E is about to be asked. The result is told that it has answered."""
        found, asked_s = self._registry.view(view.id), self._now()
        queued = len(items) + (0 if found is None else found.requests)
        is_new = not any(self._on_encoders.holds(view, item) for item in items)

        def encoded() -> None:
            if is_new:
                self._times.encoded(turn.request.model, self._now() - asked_s, queued, self._now())
            self.encoded(view, items)

        return encoded

    def encoded(self, view: WorkerView, items: Iterable[MediaItem]) -> None:
        self._tell(self._on_encoders.add(view, items))

    def _to_encode(self, worker: WorkerId) -> int:
        """Items, in all processes."""
        return self._encoding[worker] + sum(each[worker] for each in self._elsewhere.values())

    def _count(self, worker: WorkerId, items: int) -> None:
        if not items:
            return
        self._encoding[worker] += items
        self._tell(ItemsToEncode(worker, self._encoding[worker]))
        if not self._encoding[worker]:
            del self._encoding[worker]

    def _tell(self, news: Embeddings | ItemsToEncode) -> None:
        if self.replicated is not None:
            self.replicated.changed(news)

    # -- other processes

    def take(self, found: Embeddings) -> None:
        """What another process has had encoded, or sent."""
        view = self._registry.view(found.worker)
        if view is not None:
            (self._on_encoders if view.role is Role.ENCODE else self._on_others).take(found)

    def count_elsewhere(self, process: int, count: ItemsToEncode) -> None:
        counts = self._elsewhere.setdefault(process, Counter())
        counts[count.worker] = count.items
        if not count.items:
            del counts[count.worker]

    def forget(self, process: int) -> None:
        """Its turns are gone."""
        self._elsewhere.pop(process, None)

    def embeddings(self) -> Iterator[Embeddings]:
        """All that is known, for a process that has just started."""
        yield from self._on_encoders.all()
        yield from self._on_others.all()

    def to_encode(self) -> list[ItemsToEncode]:
        """For turns of this process."""
        return [ItemsToEncode(worker, items) for worker, items in self._encoding.items()]


def as_text(media: Sequence[MediaItem], decisions: Mapping[str, ItemDecision]) -> list[str]:
    """For a receipt."""
    kinds = {item.name: item.kind for item in media}
    return [f"{kinds[name]}: {decision}" for name, decision in decisions.items()]
