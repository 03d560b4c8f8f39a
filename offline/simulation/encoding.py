"""The encoders' legs of a turn in the simulation: which items go to an E before the turn's other legs.

What `ppd.proxy.routing.legs.encoder_legs` does live, in virtual time and without failures; the choice itself is the
proxy's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ppd.proxy.admission.arrival_rate import RateMeter
from ppd.proxy.encoders.choosing import (
    Choices,
    Consumer,
    EncoderRules,
    ItemDecision,
    choose,
    left_to_worker,
)
from ppd.proxy.encoders.item_times import ItemTimes, tells
from ppd.proxy.encoders.records import CACHE_TOKENS, ENCODER_CACHE_TOKENS, EmbeddingRecords
from ppd.proxy.fleet.ledger import Use
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker, WorkerId
from ppd.proxy.media.items import MediaItem

from .attempt import MODEL
from .timeline import Timeline
from .workers.encoder import PlacedItem, SimulatedEncoder
from .workers.fleet import SimulatedWorker


class Encoding:
    def __init__(
        self,
        timeline: Timeline,
        registry: Registry,
        rules: EncoderRules,
        turns: RateMeter,
        window_s: float,
        encoders: Sequence[SimulatedEncoder],
    ) -> None:
        """turns: the proxy's rate of all turns, over the window."""
        self._timeline = timeline
        self._registry = registry
        self._rules = rules
        self._turns = turns
        self._with_media = RateMeter(window_s, timeline.now_s)
        self._encoders: Mapping[WorkerId, SimulatedEncoder] = {_address(one): one for one in encoders}
        self._on_encoders = EmbeddingRecords(ENCODER_CACHE_TOKENS)
        self._on_others = EmbeddingRecords(CACHE_TOKENS)
        self._times = ItemTimes()
        self._encoding = Counter[WorkerId]()  # items that other workers than encoders have to encode now
        for one in encoders:
            registry.apply(Announcement(_description(one), Load()), timeline.now_s)

    def encode(
        self,
        media: Sequence[PlacedItem],
        held_tokens: int,
        consumer: WorkerView,
        on: SimulatedWorker,
        predicted_s: float | None,
        go: Callable[[Callable[[bool], None], bool], None],
    ) -> None:
        """Calls `go` once all of a turn's encoders are done.

        It gets what is to be told when the prompt is computed, and whether the worker encodes some of the media.

        held_tokens: of the prompt, whose KV the worker that computes it is believed to hold; on: that worker;
        predicted_s: by the laws, until the first token.
        """
        items = [placed.item for placed in media]
        if not items or not self._encoders:
            go(lambda well: None, False)
            return
        now_s = self._timeline.now_s
        choices = self._choices(media, held_tokens, consumer)
        left, is_late = len(choices.batches), left_to_worker(choices.decisions) > 0
        computed = self._until_computed(items, consumer, choices.decisions, predicted_s)

        def encoded(view: WorkerView, batch: list[MediaItem], queued: int, used: Use | None) -> None:
            nonlocal left
            left -= 1
            if not any(self._on_encoders.holds(view, item) for item in batch):
                self._times.encoded(MODEL, self._timeline.now_s - now_s, queued, self._timeline.now_s)
            self._registry.release(view.id, used)
            self._on_encoders.add(view, batch)
            on.engine.embeddings.add(item.name for item in batch)
            if not left:
                go(computed, is_late)

        for view, batch in choices.batches:
            queued = self._encoders[view.id].running + len(batch)
            used = self._registry.reserve(view.id)
            self._encoders[view.id].encode([item.name for item in batch], partial(encoded, view, batch, queued, used))
        if not choices.batches:
            go(computed, is_late)

    def _choices(self, media: Sequence[PlacedItem], held_tokens: int, consumer: WorkerView) -> Choices:
        items, now_s = [placed.item for placed in media], self._timeline.now_s
        self._with_media.count(now_s)
        seen = Consumer(
            holds=lambda item: self._on_others.holds(consumer, item),
            held_units=min((one.item.unit for one in media if one.at >= held_tokens), default=1 + items[-1].unit),
            encoding=self._encoding[consumer.id],
            beside=consumer.decoding + consumer.prefills,
            media_share=self._with_media.rate_rps(now_s) / max(1e-9, self._turns.rate_rps(now_s)),
            seconds=self._times.of(MODEL, now_s),
        )
        encoders = [view for view in map(self._registry.view, self._encoders) if view is not None]
        return choose(items, encoders, seen, self._rules, self._on_encoders.holds)

    def _until_computed(
        self,
        items: Sequence[MediaItem],
        consumer: WorkerView,
        decisions: Mapping[str, ItemDecision],
        predicted_s: float | None,
    ) -> Callable[[bool], None]:
        here = left_to_worker(decisions)
        self._encoding[consumer.id] += here
        began_s, queued = self._timeline.now_s, self._encoding[consumer.id]
        is_over = False

        def computed(well: bool) -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            self._encoding[consumer.id] -= here
            if well:
                self._on_others.add(consumer, (one for one in items if decisions[one.name] is not ItemDecision.PREFIX))
            if well and here and predicted_s is not None and tells(decisions.values()):
                now_s = self._timeline.now_s
                self._times.computed(MODEL, now_s - began_s - predicted_s, queued, now_s)

        return computed


def _address(encoder: SimulatedEncoder) -> WorkerId:
    return WorkerId(f"{encoder.name.lower()}:8000")


def _description(encoder: SimulatedEncoder) -> Worker:
    return Worker(
        role=Role.ENCODE,
        address=_address(encoder),
        models=(MODEL,),
        engine_version="simulated",
        incarnation="0",
        source=Source.STATIC,
    )
