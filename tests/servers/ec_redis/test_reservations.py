"""Room on the consumer's side: who is granted it, in which order, and how each reservation ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.servers.ec_redis.reservations import MOST_WAITING, Embedding, Ignored, Input, Key, Offer, Reservations, Room
from tests.servers.ec_redis.schedules import Schedule, play

TTL_S, WAIT_S = 10.0, 3.0
ROWS = Embedding((5, 5), "F16")  # 50 bytes: two fit
TURNED = Embedding((25, 1), "F16")
LARGE = Embedding((20, 5), "F16")
DATA = b"." * ROWS.size_bytes


class Book(Reservations):
    def __init__(self, capacity_bytes: int = 100, max_item_bytes: int = 100) -> None:
        self.room = Room(capacity_bytes)
        super().__init__(self.room, ttl_s=TTL_S, wait_s=WAIT_S, max_item_bytes=max_item_bytes)

    def said(self) -> list[tuple[str, str, bool]]:
        """Verdicts since the last call: leg, item, whether it was granted."""
        said = [(offer.leg, offer.item, is_granted) for offer, is_granted in self.verdicts]
        self.verdicts.clear()
        return said


def offer(item: str, leg: str = "leg", embedding: Embedding = ROWS) -> Offer:
    return Offer("E1", leg, item, embedding)


def need(item: str, *, told: bool = True, leg: str = "leg", embedding: Embedding = ROWS, needed: bool = True) -> Input:
    return Input(item, embedding, needed, True, offer(item, leg, embedding) if told else None)


@pytest.fixture
def book() -> Book:
    return Book()


def test_a_reservation_is_granted_filled_and_handed_over(book: Book) -> None:
    assert not book.is_ready("r", [need("a")], 0.0)
    assert (book.said(), book.room.used_bytes) == ([("leg", "a", True)], 50)
    assert not book.arrive(Key("an older leg", "a"), ROWS, DATA, 0.1)
    assert not book.has("a", "r")
    assert book.arrive(Key("leg", "a"), ROWS, DATA, 0.1)
    assert book.is_ready("r", [need("a")], 0.2)
    assert book.has("a", "r") and not book.has("a", "another request")
    assert not book.is_done("r")
    assert book.take("a", 0.2) == (ROWS, DATA)
    assert book.is_done("r") and book.take("a", 0.2) is None
    book.finish("r", [offer("a")], 0.3)
    assert (len(book), book.room.used_bytes, book.said()) == (0, 0, [])


@pytest.mark.parametrize("metadata_first", [True, False])
def test_metadata_and_request_come_in_either_order(book: Book, metadata_first: bool) -> None:
    if metadata_first:
        book.offer(offer("a"), 0.0)
        assert book.said() == [], "whether it is needed is not known yet"
    assert not book.is_ready("r", [need("a", told=False)], 0.0)
    if not metadata_first:
        book.offer(offer("a"), 0.1)
        assert not book.is_ready("r", [need("a", told=False)], 0.2)
    assert book.said() == [("leg", "a", True)]


def test_room_is_given_first_come_first_served(book: Book) -> None:
    assert not book.is_ready("first", [need("a")], 0.0)
    assert not book.is_ready("second", [need("b", embedding=Embedding((9, 5), "F16"))], 0.0)
    assert not book.is_ready("third", [need("c", embedding=Embedding((1, 5), "F16"))], 0.0)
    assert book.said() == [("leg", "a", True)], "the small one would fit, but came later"
    book.arrive(Key("leg", "a"), ROWS, DATA, 0.1)
    book.take("a", 0.1)
    assert book.said() == [("leg", "b", True), ("leg", "c", True)]


def test_two_requests_share_one_embedding(book: Book) -> None:
    assert not book.is_ready("r1", [need("a", leg="leg1")], 0.0)
    assert not book.is_ready("r2", [need("a", leg="leg2")], 0.0)
    assert not book.is_ready("r2", [need("a", leg="leg2")], 0.1)
    assert book.said() == [("leg1", "a", True), ("leg2", "a", False)], "each said once"
    book.finish("r1", [offer("a", "leg1")], 0.1)
    assert book.arrive(Key("leg1", "a"), ROWS, DATA, 0.2), "the other one still needs it"
    assert book.has("a", "r2")


END = Callable[[Book], object]
ENDS: dict[str, tuple[END, list[tuple[str, str, bool]]]] = {
    "not needed: the KV cache has it": (
        lambda book: book.is_ready("r", [need("a", needed=False)], 0.1),
        [("leg", "a", False)],
    ),
    "abort": (lambda book: book.finish("r", [offer("a")], 0.1), [("leg", "a", False)]),
    "withdrawn": (lambda book: book.withdraw(Key("leg", "a"), 0.1), []),
    "the request has waited long enough": (lambda book: book.is_ready("r", [need("a")], WAIT_S), [("leg", "a", False)]),
    "Redis does not answer": (lambda book: book.is_ready("r", [need("a")], 0.1, may_wait=False), [("leg", "a", False)]),
    "time": (lambda book: book.expire(TTL_S), [("leg", "a", False)]),
    "data of another shape": (lambda book: book.arrive(Key("leg", "a"), TURNED, DATA, 0.1), [("leg", "a", False)]),
    "too few data": (lambda book: book.arrive(Key("leg", "a"), ROWS, DATA[1:], 0.1), [("leg", "a", False)]),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_granted_reservation_ends_and_the_next_one_gets_its_room(book: Book, how: str) -> None:
    end, said = ENDS[how]
    assert not book.is_ready("r", [need("a")], 0.0)
    assert not book.is_ready("big", [need("z", embedding=Embedding((10, 5), "F16"))], 0.05)
    book.said()
    end(book)
    assert book.said() == [*said, ("leg", "z", True)]
    assert book.room.used_bytes == 100
    assert book.is_ready("r", [need("a")], WAIT_S), "it encodes for itself"
    assert not book.arrive(Key("leg", "a"), ROWS, DATA, WAIT_S), "what comes late is not kept"
    book.offer(offer("a"), WAIT_S)
    assert book.said()[-1:] == [("leg", "a", False)], "a repetition begins nothing"


@pytest.mark.parametrize(
    ("max_item_bytes", "one"),
    [
        (100, need("a", embedding=LARGE)),
        (49, need("a")),
        (100, need("a")._replace(embedding=Embedding((5, 5), "BF16"))),
    ],
    ids=["larger than the room", "larger than max_item_bytes", "not what the model takes"],
)
def test_what_can_not_be_taken_is_refused_at_once(max_item_bytes: int, one: Input) -> None:
    book = Book(max_item_bytes=max_item_bytes)
    assert book.is_ready("r", [one], 0.0), "it encodes for itself"
    assert (book.said(), book.room.used_bytes) == ([("leg", "a", False)], 0)


def test_a_request_of_which_no_producer_told_is_not_put_off(book: Book) -> None:
    assert book.is_ready("r", [Input("a", ROWS, True, False, None)], 0.0)
    assert book.is_done("r")


def test_a_request_waits_once_for_all_its_inputs_together(book: Book) -> None:
    inputs = [need("a"), need("b")]
    assert not book.is_ready("r", inputs, 0.0)
    book.arrive(Key("leg", "b"), ROWS, DATA, 1.0)
    assert not book.is_ready("r", inputs, WAIT_S - 0.1)
    assert book.is_ready("r", inputs, WAIT_S)
    assert (book.has("a", "r"), book.has("b", "r")) == (False, True), "what has come is used"


def test_an_abort_before_the_first_step_refuses_what_the_request_was_offered(book: Book) -> None:
    book.offer(offer("b"), 0.0)
    book.finish("r", [offer("a"), offer("b")], 0.1)
    assert sorted(book.said()) == [("leg", "a", False), ("leg", "b", False)]
    assert len(book) == 0


def test_what_has_arrived_outlasts_its_producer_and_time(book: Book) -> None:
    assert not book.is_ready("r", [need("a")], 0.0)
    book.arrive(Key("leg", "a"), ROWS, DATA, 0.1)
    book.withdraw(Key("leg", "a"), 0.2)
    book.expire(10 * TTL_S)
    assert book.is_ready("r", [need("a")], 10 * TTL_S) and book.has("a", "r")


def test_of_two_offers_that_nobody_asked_for_the_newer_counts(book: Book) -> None:
    book.offer(offer("a", "old"), 0.0)
    book.offer(offer("a", "new"), 0.1)
    assert book.said() == [("old", "a", False)]
    assert not book.is_ready("r", [need("a", told=False)], 0.2)
    assert book.said() == [("new", "a", True)]


def test_offers_without_requests_are_bounded(book: Book) -> None:
    for number in range(MOST_WAITING + 5):
        book.offer(offer(f"item{number}"), 0.0)
    assert len(book) == MOST_WAITING
    assert book.said() == [("leg", f"item{number}", False) for number in range(5)]


def test_ignored_keys_are_bounded_and_forgotten() -> None:
    ignored = Ignored(TTL_S)
    for number in range(MOST_WAITING + 5):
        ignored.add(number, 0.0)
    assert (len(ignored), 4 in ignored, 5 in ignored) == (MOST_WAITING, False, True)
    ignored.expire(TTL_S)
    assert len(ignored) == 0


@given(st.randoms(use_true_random=False))
def test_no_schedule_leaks_or_overfills_a_room(random: Random) -> None:
    Schedule(random, Counter()).play()


def test_schedules_play_all_that_can_happen() -> None:
    """The same as the program, which plays a hundred thousand of them."""
    seen = play(range(150))
    happened = {"Delivery", "Offer", "Verdict", "Withdrawal", "died", "granted", "kept", "not kept", "refused", "taken"}
    assert happened <= seen.keys()
