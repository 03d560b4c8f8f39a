"""Which items of a turn are encoded by an E, on which one, and why the others are not. Pure.

An item that is not sent to an E is encoded by the worker that computes the prompt, in whose steps all others wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import cycle

import msgspec

from ..config import EncoderUse
from ..fleet.view import WorkerView
from ..fleet.worker import Worker, WorkerId
from ..media.items import MediaItem
from ..policy.placement import SlowStart

_NOT_TAKING = ("sglang", "trtllm")  # engines whose requests cannot say what an encoder told, as vLLM's can

FEW_SHARE = 1 / 3
"""Of turns with media: if they are fewer, the median first token is one of a text, whoever waits for an encoder."""
PATIENCE = 4
"""Requests before a turn's own at E, for which it waits at most for the sake of others."""
NO_SLOW_START = SlowStart(0.0, 0.0)


class ItemDecision(StrEnum):
    """What becomes of one item. In `auto` the first that holds counts, in this order."""

    NEVER = "never"  # by the config
    UNNAMED = "unnamed"  # engines do not hear its name, so what E has encoded would not be found: Messages
    ABSENT = "absent"  # no E takes turns of this model now
    HELD = "held"  # the worker has the embedding
    PREFIX = "prefix"  # the worker has the KV of its tokens
    SMALL = "small"
    BUSY = "busy"  # to wait for E costs more than to encode in place
    ENCODED = "encoded"
    FAILED = "failed"  # E was asked, and has not encoded it
    LEFT = "left"  # by a gateway's picker, to the worker


SPARED = (ItemDecision.ENCODED, ItemDecision.HELD, ItemDecision.PREFIX)
"""The worker need not encode these."""


def left_to_worker(decisions: Mapping[str, ItemDecision]) -> int:
    """Items that the worker itself has to encode."""
    return sum(decision not in SPARED for decision in decisions.values())


class ItemSeconds(msgspec.Struct, frozen=True):
    """To encode one item. None: not known."""

    on_encoder: float | None = None
    in_place: float | None = None

    @property
    def compared(self) -> tuple[float, float]:
        """On E and in place. Unless both are known an item is taken to be as long here as there, so requests count."""
        if self.on_encoder is None or self.in_place is None:
            return 1.0, 1.0
        return self.on_encoder, self.in_place


class EncoderRules(msgspec.Struct, frozen=True):
    use: EncoderUse = EncoderUse.AUTO
    batch: int = 1  # items of one request to an E
    min_pixels: int = 0
    min_bytes: int = 0


class Consumer(msgspec.Struct, frozen=True):
    """The worker that computes the prompt, as far as its media go."""

    holds: Callable[[MediaItem], bool]
    held_units: int = 0  # of the prompt's messages, those from the first on whose KV it is believed to hold
    encoding: int = 0  # items that turns of this proxy have it encode now
    beside: int = 0  # sequences and prompts of this proxy that would stand still meanwhile
    media_share: float = 0.0  # of the turns lately, those with media
    seconds: ItemSeconds = ItemSeconds()


_Batch = tuple[WorkerView, list[MediaItem]]


class Choices(msgspec.Struct, frozen=True):
    """decisions: by name, of each item once, in order; batches: what each request to an E holds."""

    decisions: dict[str, ItemDecision]
    batches: list[_Batch]

    @property
    def encoders(self) -> dict[str, WorkerView]:
        """Of each item that an E is to encode, in order."""
        places = {item.name: view for view, items in self.batches for item in items}
        return {name: places[name] for name in self.decisions if name in places}


class NamedEncoders(msgspec.Struct, frozen=True):
    """What a gateway's picker has decided of a turn's items: the first goes to the first of these E, and so on.

    After the last E it goes on with the first.
    """

    encoders: tuple[WorkerView, ...]
    numbers: frozenset[int] | None = None  # of the items that are sent, from 0, counting each once; None: all


def takes_embeddings(worker: Worker) -> bool:
    """Whether a worker that is no E can use what an E has encoded."""
    return worker.engine not in _NOT_TAKING


def choose(
    items: Sequence[MediaItem],
    encoders: Sequence[WorkerView],
    consumer: Consumer,
    rules: EncoderRules,
    has: Callable[[WorkerView, MediaItem], bool],
    slow_start: SlowStart = NO_SLOW_START,
) -> Choices:
    """encoders: those that may be asked, of a turn whose media have names in engines.

    has: whether an E is believed to have an item's embedding.
    """
    unique = {item.name: item for item in items}
    first_unit = {item.name: item.unit for item in reversed(items)}  # later ones find it encoded
    decisions = {
        name: _decision(item, first_unit[name], bool(encoders), consumer, rules) for name, item in unique.items()
    }
    wanted = [item for name, item in unique.items() if decisions[name] is ItemDecision.ENCODED]
    asked = Counter[WorkerId]()
    by_encoder: dict[WorkerId, _Batch] = {}
    for item in wanted:
        view = _encoder([each for each in encoders if has(each, item)] or encoders, asked, slow_start)
        if rules.use is EncoderUse.AUTO and not has(view, item) and _costs_more(view, consumer, len(wanted)):
            decisions[item.name] = ItemDecision.BUSY
            continue
        asked[view.id] += 1
        by_encoder.setdefault(view.id, (view, []))[1].append(item)
    return Choices(decisions, _batches(by_encoder.values(), rules.batch))


def unnamed(items: Sequence[MediaItem], rules: EncoderRules) -> Choices:
    """Of a turn whose media have no names in engines."""
    decision = ItemDecision.NEVER if rules.use is EncoderUse.NEVER else ItemDecision.UNNAMED
    return Choices(dict.fromkeys((item.name for item in items), decision), [])


def as_named(items: Sequence[MediaItem], named: NamedEncoders, batch: int) -> Choices:
    """batch: items of one request to an E."""
    decisions = dict[str, ItemDecision]()
    by_encoder: dict[WorkerId, _Batch] = {}
    encoders = cycle(named.encoders)
    for number, (name, item) in enumerate({item.name: item for item in items}.items()):
        if named.numbers is not None and number not in named.numbers:
            decisions[name] = ItemDecision.LEFT
            continue
        decisions[name] = ItemDecision.ENCODED
        view = next(encoders)
        by_encoder.setdefault(view.id, (view, []))[1].append(item)
    return Choices(decisions, _batches(by_encoder.values(), batch))


def _decision(item: MediaItem, unit: int, is_there: bool, consumer: Consumer, rules: EncoderRules) -> ItemDecision:
    if rules.use is EncoderUse.NEVER:
        return ItemDecision.NEVER
    if not is_there:
        return ItemDecision.ABSENT
    if rules.use is EncoderUse.ALWAYS:
        return ItemDecision.ENCODED
    if consumer.holds(item):
        return ItemDecision.HELD
    if unit < consumer.held_units:
        return ItemDecision.PREFIX
    return ItemDecision.SMALL if _is_small(item, rules) else ItemDecision.ENCODED


def _is_small(item: MediaItem, rules: EncoderRules) -> bool:
    """By what is known of its size."""
    return 0 < item.pixels < rules.min_pixels or 0 < item.size_bytes < rules.min_bytes


def _encoder(encoders: Sequence[WorkerView], asked: Counter[WorkerId], slow_start: SlowStart) -> WorkerView:
    """The one with the fewest requests, this turn's included. asked: items that this turn sends to each."""
    return min(encoders, key=lambda view: ((1 + view.requests + asked[view.id]) / slow_start(view), view.name))


def _costs_more(encoder: WorkerView, consumer: Consumer, items: int) -> bool:
    """Whether to wait for E costs more than to encode in place: in seconds, else in items.

    At E the requests there come first, which count as an item each; in place the items that the worker encodes already.
    If E is the faster one, the turn's own are sooner there; if it is the slower one, that is what the turn pays for the
    sake of others.
    In place all beside stand still too. For their sake the turn waits for E as much longer as they would in sum,
    within PATIENCE. Where many turns have media, those beside would gain what their own first tokens lose: then a turn
    goes to E only if its own items are begun sooner there, or done sooner by an E that is the faster one.
    """
    on_encoder, in_place = consumer.seconds.compared
    later = encoder.requests * on_encoder - consumer.encoding * in_place - items * max(0.0, in_place - on_encoder)
    if consumer.media_share > FEW_SHARE:
        return later >= 0.0
    return later > min(PATIENCE, items * max(1, consumer.beside)) * in_place


def _batches(of_encoders: Iterable[_Batch], size: int) -> list[_Batch]:
    return [(view, items[at : at + size]) for view, items in of_encoders for at in range(0, len(items), size)]
