"""The producer's side: what is held, what is sent to whom, and how each embedding is let go."""

from __future__ import annotations

import pytest

from ppd.servers.ec_redis.holdings import Holdings
from ppd.servers.ec_redis.reservations import Embedding, Key, Room

TTL_S = 10.0
ROWS = Embedding((5, 5), "F16")  # 50 bytes: two fit
OTHER = Embedding((4, 5), "F16")
DATA = b"." * ROWS.size_bytes
KEY = Key("leg", "a")


class Book(Holdings):
    def __init__(self) -> None:
        self.room = Room(100)
        super().__init__(self.room, ttl_s=TTL_S)

    def did(self, step: str) -> None:
        match step:
            case "announce":
                assert self.announce("leg", {"a": ROWS}, 0.0) == [KEY]
            case "encode":
                self.encoded("a", ROWS, DATA)
            case "encode otherwise":
                self.encoded("a", OTHER, b"." * OTHER.size_bytes)
            case "encode too little":
                self.encoded("a", ROWS, DATA[1:])
            case "grant" | "refuse":
                self.verdict("PD1", KEY, is_granted=step == "grant")
            case "grant another":
                self.verdict("PD2", KEY, is_granted=True)
            case "refuse another":
                self.verdict("PD2", KEY, is_granted=False)
            case "sent":
                self.sent(KEY)
            case "time":
                self.expire(TTL_S)


@pytest.fixture
def book() -> Book:
    return Book()


@pytest.mark.parametrize(
    ("steps", "delivered", "withdrawn"),
    [
        ("announce, encode, grant, sent", ["PD1"], []),
        ("announce, grant, encode, sent", ["PD1"], []),
        ("announce, encode, grant, grant, refuse, encode, time, sent", ["PD1"], []),
        ("announce, encode, refuse, grant", [], ["PD1"]),
        ("announce, refuse, encode", [], []),
        ("announce, grant, refuse, encode", [], []),
        ("announce, grant, refuse another, encode, sent", ["PD1"], []),
        ("announce, grant, grant another, encode, grant another, sent", ["PD1"], ["PD2", "PD2"]),
        ("announce, encode, time, grant", [], ["PD1"]),
        ("announce, grant, time, encode", [], ["PD1"]),
        ("announce, grant, encode otherwise", [], ["PD1"]),
        ("announce, grant, encode too little", [], ["PD1"]),
        ("announce, encode otherwise, encode", [], []),
        ("grant, refuse, encode", [], ["PD1"]),
    ],
)
def test_whichever_comes_second_sends_and_all_is_let_go(
    book: Book, steps: str, delivered: list[str], withdrawn: list[str]
) -> None:
    for step in steps.split(", "):
        book.did(step)
    assert [(one.consumer, one.key, one.embedding, one.data) for one in book.deliveries] == [
        (consumer, KEY, ROWS, DATA) for consumer in delivered
    ]
    assert [one.consumer for one in book.withdrawals] == withdrawn
    assert (len(book), book.room.used_bytes) == (0, 0)


def test_only_what_there_is_room_for_is_offered(book: Book) -> None:
    sizes = {"a": ROWS, "b": Embedding((9, 9), "F32"), "c": ROWS, "d": OTHER}
    assert book.announce("leg", sizes, 0.0) == [Key("leg", "a"), Key("leg", "c")]
    assert not book.expects("b") and book.expects("c")
    book.expire(TTL_S)
    assert book.announce("leg2", sizes, TTL_S) == [Key("leg2", "a"), Key("leg2", "c")]


def test_two_requests_for_one_item_are_two_embeddings(book: Book) -> None:
    book.announce("leg1", {"a": ROWS}, 0.0)
    book.announce("leg2", {"a": ROWS}, 0.0)
    book.encoded("a", ROWS, DATA)
    book.verdict("PD1", Key("leg1", "a"), is_granted=True)
    book.sent(Key("leg1", "a"))
    book.verdict("PD2", Key("leg2", "a"), is_granted=True)
    assert [one.consumer for one in book.deliveries] == ["PD1", "PD2"]


def test_what_is_announced_again_is_one_embedding(book: Book) -> None:
    book.announce("leg", {"a": ROWS}, 0.0)
    assert book.announce("leg", {"a": ROWS}, 0.0) == []
    assert (len(book), book.room.used_bytes) == (1, 50)
