"""Messages of many parts, between real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import zmq

from ppd.proxy.runtime.message_parts import MessageParts

LATER = float("inf")


class Ends:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.sends, self.takes = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self.takes.bind("inproc://parts")
        self.sends.connect("inproc://parts")
        self.messages = MessageParts(self.takes, 2)

    def send(self, *messages: Sequence[bytes]) -> None:
        for parts in messages:
            self.sends.send_multipart(parts)

    def next(self, until_s: float = LATER) -> list[bytes] | None:
        found = self.messages.next(until_s)
        return None if found is None else [part.bytes for part in found]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with zmq.Context() as context:
        made = Ends(context)
        yield made
        made.sends.close(linger=0)
        made.takes.close(linger=0)


def test_a_message_comes_with_its_parts_and_one_more_than_it_may_have_at_most(ends: Ends) -> None:
    ends.send([b"a"], [b"a", b"b"], [b"a", b"b", b"c"], [b"%d" % number for number in range(1000)], [b"", b""])
    found = [ends.next() for _ in range(6)]
    assert found == [[b"a"], [b"a", b"b"], [b"a", b"b", b"c"], [b"0", b"1", b"2"], [b"", b""], None]


def test_a_message_that_is_too_long_is_read_in_slices(ends: Ends) -> None:
    ends.send([b""] * 100, [b"next"])
    slices = 0
    while (found := ends.next(time.perf_counter())) is None:  # each slice is over at once
        slices += 1
    assert (found, slices) == ([b""] * 3, 97)
    assert ends.next(time.perf_counter()) == [b"next"]


def test_a_message_that_is_not_too_long_is_read_whole_whatever_the_time(ends: Ends) -> None:
    ends.send([b"a", b"b"])
    assert ends.next(-LATER) == [b"a", b"b"]
