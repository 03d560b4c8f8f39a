"""Ids and times of requests."""

from __future__ import annotations

import os
import random
import re
from datetime import UTC, datetime, timedelta

from ppd.proxy.telemetry.receipts import new_id, now_text


def test_ids_differ_also_after_a_fork() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, new_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100).decode() != new_id()


def test_ids_tell_nothing_of_those_that_follow() -> None:
    """By the outputs of a Mersenne Twister, which are enough to rebuild it: 624 words of 32 bits."""
    words = list[int]()
    for _ in range(156):
        number = int(new_id(), 16)
        words += [number >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)]
    twister = random.Random()
    twister.setstate((3, (*map(untempered, words), 624), None))
    assert [f"{twister.getrandbits(128):032x}" for _ in range(3)] != [new_id() for _ in range(3)]


def untempered(word: int) -> int:
    word ^= word >> 18
    word ^= word << 15 & 0xEFC60000
    low = word
    for _ in range(5):
        low = word ^ (low << 7 & 0x9D2C5680)
    high = low
    for _ in range(3):
        high = low ^ high >> 11
    return high & 0xFFFFFFFF


def test_the_time_is_as_iso_8601_has_it() -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    text = now_text()
    assert before <= datetime.fromisoformat(text) <= datetime.now(UTC)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", text)
