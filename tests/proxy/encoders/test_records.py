"""What engines are believed to have encoded: as much as their caches hold, since they started."""

from __future__ import annotations

from ppd.proxy.encoders.records import LEAST_TOKENS, PIXELS_A_TOKEN, UNKNOWN_TOKENS, EmbeddingRecords, tokens_of
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.media.items import MediaItem, MediaKind


def item(name: str, pixels: int = 1000 * PIXELS_A_TOKEN) -> MediaItem:
    return MediaItem(MediaKind.IMAGE, name, 0, 0, 0, 1, pixels)


def view(incarnation: str = "1", address: str = "r:1") -> WorkerView:
    return WorkerView(worker=Worker(role=Role.REPLICA, address=address), name="R1", incarnation=incarnation)


def test_an_item_has_tokens_by_its_pixels() -> None:
    assert [tokens_of(item("a", pixels)) for pixels in (0, 1, 1000 * PIXELS_A_TOKEN)] == [
        UNKNOWN_TOKENS,
        LEAST_TOKENS,
        1000,
    ]


def test_the_least_recently_used_items_are_evicted() -> None:
    records, engine = EmbeddingRecords(2500), view()
    records.add(engine, [item("a"), item("b")])
    records.add(engine, [item("a"), item("c")])
    assert [records.holds(engine, item(name)) for name in "abc"] == [True, False, True]
    records.add(engine, [item("large", 3000 * PIXELS_A_TOKEN)])
    assert not any(records.holds(engine, item(name)) for name in ("a", "c", "large"))
    records.add(engine, [item("a"), item("b")])
    assert all(records.holds(engine, item(name)) for name in "ab")


def test_another_engine_or_incarnation_has_nothing() -> None:
    records = EmbeddingRecords(9999)
    records.add(view(), [item("a")])
    assert records.holds(view(), item("a"))
    assert not records.holds(view(address="r:2"), item("a")) and not records.holds(view("2"), item("a"))
    records.add(view("2"), [item("b")])
    assert not records.holds(view("2"), item("a"))
