"""Which items an encoder gets, on which one, and why the others are not sent."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy.config import EncoderUse
from ppd.proxy.encoders.choosing import (
    Choices,
    Consumer,
    EncoderRules,
    ItemDecision,
    ItemSeconds,
    NamedEncoders,
    as_named,
    choose,
    left_to_worker,
)
from ppd.proxy.fleet.view import Others, WorkerView
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.media.items import MediaItem, MediaKind
from ppd.proxy.policy.placement import SlowStart

AUTO, ALWAYS, NEVER = EncoderUse


def item(name: str, unit: int = 0, size_bytes: int = 0, pixels: int = 0) -> MediaItem:
    return MediaItem(MediaKind.IMAGE, name, unit, 0, 0, size_bytes, pixels)


def encoder(name: str, requests: int = 0, others: int = 0) -> WorkerView:
    worker = Worker(role=Role.ENCODE, address=f"{name}:1")
    return WorkerView(worker=worker, name=name, incarnation="", inflight=requests, others=Others(others))


A, B = item("a"), item("b")
IDLE = encoder("E1")


def chosen(
    items: list[MediaItem], *encoders: WorkerView, held: str = "", on: dict[str, str] | None = None, **settings: Any
) -> Choices:
    """held: names that the worker has; on: names that encoders have."""
    rules = EncoderRules(
        **{name: settings.pop(name) for name in ("use", "batch", "min_pixels", "min_bytes") & settings.keys()}
    )
    consumer = Consumer(holds=lambda one: one.name in held, **settings)
    return choose(items, encoders, consumer, rules, lambda view, one: one.name in (on or {}).get(view.name, ""))


def sent(choices: Choices) -> list[tuple[str, str]]:
    return [(view.name, "".join(one.name for one in items)) for view, items in choices.batches]


CASES: dict[str, tuple[MediaItem, tuple[WorkerView, ...], dict[str, Any], ItemDecision]] = {
    "anything": (A, (IDLE,), {}, ItemDecision.ENCODED),
    "no encoder": (A, (), {}, ItemDecision.ABSENT),
    "never": (A, (IDLE,), {"use": NEVER}, ItemDecision.NEVER),
    "never, and no encoder": (A, (), {"use": NEVER}, ItemDecision.NEVER),
    "the worker has it": (A, (IDLE,), {"held": "a"}, ItemDecision.HELD),
    "always, though the worker has it": (A, (IDLE,), {"held": "a", "use": ALWAYS}, ItemDecision.ENCODED),
    "its tokens are held": (item("a", 2), (IDLE,), {"held_units": 3}, ItemDecision.PREFIX),
    "only those before are held": (item("a", 2), (IDLE,), {"held_units": 2}, ItemDecision.ENCODED),
    "few pixels": (item("a", pixels=99), (IDLE,), {"min_pixels": 100}, ItemDecision.SMALL),
    "enough pixels": (item("a", pixels=100), (IDLE,), {"min_pixels": 100}, ItemDecision.ENCODED),
    "pixels that are not known": (A, (IDLE,), {"min_pixels": 100}, ItemDecision.ENCODED),
    "few bytes": (item("a", size_bytes=9), (IDLE,), {"min_bytes": 10}, ItemDecision.SMALL),
    "bytes that are not known": (A, (IDLE,), {"min_bytes": 10}, ItemDecision.ENCODED),
    "a short queue": (A, (encoder("E1", 1),), {}, ItemDecision.ENCODED),
    "a queue that nobody gains by": (A, (encoder("E1", 2),), {}, ItemDecision.BUSY),
    "a queue of other proxies": (A, (encoder("E1", 0, 2),), {"beside": 1}, ItemDecision.BUSY),
    "a queue that others would wait longer than": (A, (encoder("E1", 3),), {"beside": 3}, ItemDecision.ENCODED),
    "a queue that is too long for any others' sake": (A, (encoder("E1", 5),), {"beside": 9}, ItemDecision.BUSY),
    "a queue on the worker too": (A, (encoder("E1", 4),), {"encoding": 4}, ItemDecision.ENCODED),
    "many turns with media, and no queue on the worker": (
        A,
        (IDLE,),
        {"media_share": 0.5, "beside": 9},
        ItemDecision.BUSY,
    ),
    "many turns with media, and a queue": (A, (IDLE,), {"media_share": 0.5, "encoding": 1}, ItemDecision.ENCODED),
    "many, and as long a queue": (A, (encoder("E1", 1),), {"media_share": 0.5, "encoding": 1}, ItemDecision.BUSY),
    "always, whatever the queue": (A, (encoder("E1", 9),), {"use": ALWAYS}, ItemDecision.ENCODED),
    "a busy encoder that has it": (A, (encoder("E1", 9),), {"on": {"E1": "a"}}, ItemDecision.ENCODED),
}


@pytest.mark.parametrize("case", CASES)
def test_an_item_is_encoded_unless_that_costs_more(case: str) -> None:
    one, encoders, settings, decision = CASES[case]
    choices = chosen([one], *encoders, **settings)
    assert choices.decisions == {"a": decision}
    assert [name for _, name in sent(choices)] == (["a"] if decision is ItemDecision.ENCODED else [])


QUICK, SLOW = ItemSeconds(0.125, 0.25), ItemSeconds(0.75, 0.25)
TIMED: dict[str, tuple[ItemSeconds, int, dict[str, Any], bool]] = {  # requests at E, and whether it encodes
    "three at a quick E, of which two take as long as one in place": (QUICK, 3, {"beside": 1}, True),
    "four are too many for the sake of one": (QUICK, 4, {"beside": 1}, False),
    "a slow E with nothing to do": (SLOW, 0, {}, True),
    "one at a slow E takes as long as three in place": (SLOW, 1, {"beside": 2}, False),
    "but for the sake of more": (SLOW, 1, {"beside": 3}, True),
    "or where the worker encodes as many": (SLOW, 1, {"encoding": 2}, True),
    "many turns with media, and a quick E": (QUICK, 0, {"media_share": 0.5}, True),
    "its queue as long as in place": (QUICK, 1, {"media_share": 0.5}, False),
    "many turns with media, and a slow E": (SLOW, 0, {"media_share": 0.5}, False),
    "the worker is sooner done with two than a slow E with one": (SLOW, 1, {"media_share": 0.5, "encoding": 2}, False),
    "and later with four": (SLOW, 1, {"media_share": 0.5, "encoding": 4}, True),
    "in place they cost nothing": (ItemSeconds(0.1, 0.0), 1, {"beside": 9}, False),
    "only E's time is known: requests count": (ItemSeconds(9.0, None), 1, {}, True),
    "only the other is known": (ItemSeconds(None, 9.0), 2, {}, False),
}


@pytest.mark.parametrize("case", TIMED)
def test_seconds_are_compared_where_both_are_known(case: str) -> None:
    seconds, requests, settings, is_encoded = TIMED[case]
    found = chosen([A], encoder("E1", requests), seconds=seconds, **settings).decisions
    assert found == {"a": ItemDecision.ENCODED if is_encoded else ItemDecision.BUSY}


@pytest.mark.parametrize("requests", range(8))
@pytest.mark.parametrize("beside", [0, 1, 3, 9])
@pytest.mark.parametrize("encoding", [0, 1, 4])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_an_item_that_takes_as_long_here_as_there_is_as_one_of_unknown_time(
    requests: int, beside: int, encoding: int, share: float
) -> None:
    state: dict[str, Any] = {"beside": beside, "encoding": encoding, "media_share": share}
    by_seconds, by_count = (
        chosen([A, B], encoder("E1", requests), seconds=seconds, **state).decisions
        for seconds in (ItemSeconds(0.25, 0.25), ItemSeconds())
    )
    assert by_seconds == by_count


def test_the_worker_encodes_what_neither_it_has_nor_e_has_encoded() -> None:
    spared = {ItemDecision.ENCODED, ItemDecision.HELD, ItemDecision.PREFIX}
    for decision in ItemDecision:
        assert left_to_worker({"a": ItemDecision.HELD, "b": decision}) == (decision not in spared)


def test_items_spread_over_encoders_by_what_they_have_and_do() -> None:
    fleet = encoder("E1", 1), encoder("E2"), encoder("E3", 5)
    choices = chosen([A, B, item("c"), item("d")], *fleet, use=ALWAYS, on={"E3": "b"})
    assert sorted(sent(choices)) == [("E1", "c"), ("E2", "a"), ("E2", "d"), ("E3", "b")]


@pytest.mark.parametrize(
    ("age_s", "inflight", "expected"),
    [
        (0.0, 0, "E1"),  # the new one counts as ten times as loaded
        (0.0, 10, "E2"),
        (5.0, 0, "E1"),
        (10.0, 0, "E2"),
    ],
)
def test_an_encoder_that_has_just_joined_gets_less(age_s: float, inflight: int, expected: str) -> None:
    old, new = encoder("E1", max(1, inflight)), encoder("E2")
    fleet = [replace(old, since_s=-99.0), replace(new, since_s=0.0)]
    rules, consumer = EncoderRules(use=ALWAYS), Consumer(holds=lambda one: False)
    choices = choose([A], fleet, consumer, rules, lambda view, one: False, SlowStart(age_s, 10.0))
    assert [name for name, _ in sent(choices)] == [expected]


@pytest.mark.parametrize(("batch", "expected"), [(1, ["a", "b", "c"]), (2, ["ab", "c"]), (9, ["abc"])])
def test_a_request_to_an_encoder_holds_so_many_items(batch: int, expected: list[str]) -> None:
    choices = chosen([A, B, A, item("c")], IDLE, use=ALWAYS, batch=batch)
    assert [names for _, names in sent(choices)] == expected


def test_an_item_that_comes_again_is_judged_by_its_first_place() -> None:
    assert chosen([item("a", 0), item("a", 5)], IDLE, held_units=1).decisions == {"a": ItemDecision.PREFIX}


@pytest.mark.parametrize(
    ("names", "numbers", "batch", "expected"),
    [
        ("E1", None, 1, [("E1", "a"), ("E1", "b"), ("E1", "c")]),
        ("E1 E2", None, 1, [("E1", "a"), ("E1", "c"), ("E2", "b")]),
        ("E1 E2", None, 2, [("E1", "ac"), ("E2", "b")]),
        ("E2 E2 E1", None, 9, [("E2", "ab"), ("E1", "c")]),
        ("E1 E2", {1, 2}, 1, [("E1", "b"), ("E2", "c")]),
        ("E1 E2", {2, 300}, 1, [("E1", "c")]),
        ("E1", set(), 1, []),
    ],
)
def test_items_go_to_the_encoders_that_are_named_in_turn(
    names: str, numbers: set[int] | None, batch: int, expected: list[tuple[str, str]]
) -> None:
    named = NamedEncoders(tuple(map(encoder, names.split())), None if numbers is None else frozenset(numbers))
    choices = as_named([A, B, A, item("c")], named, batch)
    assert sent(choices) == expected
    went = "".join(names for _, names in expected)
    assert choices.decisions == {one: ItemDecision.ENCODED if one in went else ItemDecision.LEFT for one in "abc"}
    # And what a picker writes of these choices is read as the same.
    again = NamedEncoders(tuple(choices.encoders.values()) or (IDLE,), named.numbers)
    assert as_named([A, B, item("c")], again, batch).encoders == choices.encoders
