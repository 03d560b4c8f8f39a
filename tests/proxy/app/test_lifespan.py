"""What the background tasks decide."""

from __future__ import annotations

from msgspec.structs import replace

from ppd.proxy.app.lifespan import WARMED_WORKERS, to_warm
from ppd.proxy.fleet.worker import Role
from tests.support.attempts import view


def test_spare_connections_are_bounded_in_a_large_fleet() -> None:
    fleet = [view(Role.DECODE, number) for number in range(WARMED_WORKERS)]
    down = replace(view(Role.DECODE, 9999), up=False)
    assert to_warm([*fleet, down]) == [one.worker for one in fleet]
    busy = [replace(one, inflight=1) for one in fleet[:3]]
    another = view(Role.DECODE, WARMED_WORKERS)
    assert to_warm([*busy, *fleet[3:], another]) == [one.worker for one in busy]
    assert len(to_warm([replace(one, inflight=1) for one in (*fleet, another)])) == WARMED_WORKERS
