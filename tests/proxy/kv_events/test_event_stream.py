from __future__ import annotations

import msgspec
import pytest

from ppd.proxy.errors import FormatError
from ppd.proxy.kv_events.block_index import BlockIndex
from ppd.proxy.kv_events.event_batch import session_name
from ppd.proxy.kv_events.event_stream import EventStream, Order, Replay

S = 7


def batch(number: int, life: int = 0) -> bytes:
    """One more block of the session. life: of the publisher's process."""
    event = {
        "type": "BlockStored",
        "block_hashes": [1000 * life + number],
        "parent_block_hash": 1000 * life + number - 1 if number else None,
        "token_ids": [0],
        "block_size": 1,
        "session_id": session_name(S),
    }
    return msgspec.msgpack.encode([float(1000 * life + number), [event], 0])


def stream_at(sequence: int) -> EventStream:
    """A stream that has taken all batches before this number."""
    stream = EventStream()
    stream.is_behind = False
    for number in range(sequence):
        stream.take(number, batch(number))
    return stream


def replay(stream: EventStream, numbers: range, *, life: int = 0, ends: bool = True) -> Replay:
    start = stream.replay_from()
    for number in numbers:
        if number >= start and (state := stream.replayed(number, batch(number, life))) is not Replay.OPEN:
            return state
    return stream.replay_ended() if ends else Replay.OPEN


def test_batches_in_order_are_taken() -> None:
    stream = stream_at(5)
    assert (stream.order(5), stream.held(S), stream.counts) == (Order.NEXT, 5, {"stored": 5})


def test_nothing_is_known_of_a_stream_that_is_behind() -> None:
    stream = stream_at(5)
    stream.is_behind = True
    assert stream.held(S) is None


@pytest.mark.parametrize(
    ("taken", "sequence", "order"), [(0, 0, Order.NEXT), (0, 3, Order.GAP), (5, 7, Order.GAP), (5, 4, Order.RESTART)]
)
def test_a_number_says_whether_a_batch_comes_next(taken: int, sequence: int, order: Order) -> None:
    assert stream_at(taken).order(sequence) is order


def test_a_gap_is_closed_by_replay_and_what_it_brought_comes_again() -> None:
    stream = stream_at(5)
    assert stream.order(7) is Order.GAP
    assert replay(stream, range(9)) is Replay.CLOSED
    assert [stream.order(number) for number in (7, 8, 9)] == [Order.AGAIN, Order.AGAIN, Order.NEXT]
    assert stream.held(S) == 9
    assert stream.pass_over(8, batch(8))
    assert stream.order(7) is Order.RESTART


def test_the_first_contact_begins_with_all_that_is_kept() -> None:
    stream = stream_at(0)
    assert (stream.order(4), replay(stream, range(4)), stream.order(4)) == (Order.GAP, Replay.CLOSED, Order.NEXT)
    assert stream.held(S) == 4


def test_a_publisher_without_any_batch_yet_is_up_to_date() -> None:
    stream = stream_at(0)
    assert (replay(stream, range(0)), stream.order(0)) == (Replay.CLOSED, Order.NEXT)


def test_a_replay_that_begins_too_late_leaves_nothing_known_before_it() -> None:
    stream = stream_at(5)
    assert replay(stream, range(7, 9)) is Replay.CLOSED
    assert (stream.held(S), stream.order(9)) == (None, Order.NEXT)


def test_a_replay_with_a_hole_is_asked_for_again() -> None:
    stream = stream_at(5)
    stream.replay_from()
    assert [stream.replayed(number, batch(number)) for number in (4, 5, 8)] == [Replay.OPEN, Replay.OPEN, Replay.AGAIN]
    assert (stream.replay_from(), replay(stream, range(9)), stream.held(S)) == (5, Replay.CLOSED, 9)


@pytest.mark.parametrize("published", [3, 5, 9])
def test_a_replay_shows_that_the_publisher_has_started_over(published: int) -> None:
    """Even where its numbers would follow."""
    stream = stream_at(5)
    assert replay(stream, range(published), life=1) is Replay.AGAIN
    assert stream.held(S) == 0
    assert (stream.replay_from(), replay(stream, range(published), life=1)) == (0, Replay.CLOSED)
    assert (stream.held(S), stream.order(published)) == (published, Order.NEXT)


def test_a_replay_that_begins_just_after_the_last_batch_shows_nothing_of_who_published_that() -> None:
    """As of a publisher that has started over, and keeps no more than its newest batches."""
    stream = stream_at(5)
    assert replay(stream, range(5, 8), life=1) is Replay.CLOSED
    assert (len(stream.index), stream.order(8)) == (0, Order.NEXT)


def test_a_batch_that_is_younger_than_all_of_a_replay_was_not_in_it() -> None:
    """As where another publisher's replay answers."""
    stream = stream_at(0)
    assert (replay(stream, range(5)), stream.order(3)) == (Replay.CLOSED, Order.AGAIN)
    assert [stream.pass_over(3, batch(3, life)) for life in (1, 0)] == [False, True]
    assert stream.pass_over(4, b"\xc1")


def test_a_batch_of_before_the_last_one_is_not_taken() -> None:
    """As of a publisher that has ended, after one that began since."""
    stream = stream_at(0)
    stream.take(0, batch(0, life=1))
    with pytest.raises(FormatError):
        stream.take(1, batch(1))
    stream.lost()
    stream.resume(1)
    stream.take(1, batch(1))  # or the engine's clock was set back: then nothing counts but what comes from there on
    assert stream.held(S) is None


def test_a_restart_leaves_nothing_held() -> None:
    stream = stream_at(5)
    assert stream.order(0) is Order.RESTART
    stream.restarted()
    assert (stream.held(S), stream.order(0)) == (0, Order.NEXT)


def test_a_gap_that_stays_open_leaves_nothing_known() -> None:
    stream = stream_at(5)
    stream.lost()
    stream.resume(9)
    stream.take(9, batch(9))
    assert (stream.held(S), stream.order(10)) == (None, Order.NEXT)


def test_an_unreadable_batch_is_missing() -> None:
    stream = stream_at(5)
    with pytest.raises(FormatError):
        stream.take(5, b"\xc1")
    assert (stream.held(S), stream.order(5)) == (5, Order.NEXT)
    stream.skip(5)
    assert (stream.held(S), stream.order(6)) == (None, Order.NEXT)


def test_an_unreadable_batch_of_a_replay_leaves_nothing_known_before_it() -> None:
    stream = stream_at(5)
    stream.replay_from()
    stream.replayed(4, batch(4))
    with pytest.raises(FormatError):
        stream.replayed(5, b"\xc1")
    assert (stream.replayed(6, batch(6)), stream.replay_ended()) == (Replay.OPEN, Replay.CLOSED)
    assert (stream.held(S), stream.order(7)) == (None, Order.NEXT)


def test_an_index_that_holds_nothing_yet_is_kept() -> None:
    index = BlockIndex(sweep_slack=8)
    assert EventStream(index).index is index
