"""Each session's worker by its hash: as over all of them, and remembered."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256
from random import Random

import pytest

from ppd.proxy.fleet.rendezvous import KEPT, Rendezvous
from ppd.proxy.fleet.worker import WorkerId

COUNT = 40
IDS = [f"d{number}:1" for number in range(COUNT)]
SESSIONS = [f"{number:016x}" for number in range(30)]


class Hashed(str):
    """A worker's id that counts how often it is hashed."""

    times = 0

    def __format__(self, spec: str) -> str:
        Hashed.times += 1
        return str(self)


def hashed_by(rendezvous: Rendezvous, session_id: str, left_out: Collection[int] = ()) -> tuple[int | None, int]:
    """The position that is chosen, and how many workers were hashed for it."""
    before = Hashed.times
    return rendezvous.first(session_id, left_out), Hashed.times - before


def by_all(session_id: str, left_out: Collection[int] = ()) -> int:
    """The rule as plain code over all workers."""
    able = [at for at in range(COUNT) if at not in left_out]
    return min(able, key=lambda at: sha256(f"{IDS[at]} {session_id}".encode()).digest())


def a_rendezvous(kept: int = 100) -> Rendezvous:
    return Rendezvous([WorkerId(Hashed(each)) for each in IDS], kept)


@pytest.mark.parametrize("out", [0, 1, KEPT, COUNT // 2, COUNT - 1])
def test_a_session_has_the_first_of_all_that_are_not_left_out(out: int) -> None:
    one, random = a_rendezvous(), Random(out)
    for session in SESSIONS * 2:
        left_out = set(random.sample(range(COUNT), out))
        assert one.first(session, left_out) == by_all(session, left_out)
        assert one.first(session, ()) == by_all(session)


def test_workers_are_hashed_once_for_a_session() -> None:
    one, (session, other, *_) = a_rendezvous(), SESSIONS
    assert hashed_by(one, session) == (by_all(session), COUNT)
    assert hashed_by(one, session) == (by_all(session), 0)
    assert hashed_by(one, session, {by_all(session)}) == (by_all(session, {by_all(session)}), 0)
    assert hashed_by(one, other)[1] == COUNT


def test_where_most_are_left_out_the_others_are_hashed_again() -> None:
    one, session, left = a_rendezvous(), SESSIONS[0], {3, 5}
    one.first(session, ())
    left_out = set(range(COUNT)) - left
    found, hashed = hashed_by(one, session, left_out)
    assert found == by_all(session, left_out)
    assert hashed in (0, len(left)), "unless one of them is among the session's first"


def test_none_is_left() -> None:
    assert a_rendezvous().first(SESSIONS[0], set(range(COUNT))) is None


def test_sessions_beyond_a_limit_are_forgotten() -> None:
    one = a_rendezvous(kept=10)
    for session in SESSIONS:
        one.first(session, ())
        assert 1 <= len(one) <= 10
        assert hashed_by(one, session) == (by_all(session), 0)
