"""What several processes do on a worker counts as if one did it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

import pytest

from ppd.proxy.fleet.ledger import RECENT_TOKENS, LegWork
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Load, WorkerId
from tests.proxy.peers.test_lessons import succeeded
from tests.support.processes import R1, Pair, worker

pytestmark = pytest.mark.slow

R2 = WorkerId("r2:1")
TURN_TOKENS = RECENT_TOKENS // 40


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Two processes that know of two workers."""
    one = Pair()
    try:
        await one.join()
        for address in (R1, R2):
            worker(one.ones[0].state.registry, address)
        hear(one)
        yield one
    finally:
        await one.hush()
        one.close()


def hear(pair: Pair) -> None:
    for _ in range(2):
        for each in pair.ones:
            each.membership._channels.flush()
        for each in pair.ones:
            each.membership.catch_up()


def registries(pair: Pair) -> list[Registry]:
    return [each.state.registry for each in pair.ones]


def recent(registry: Registry) -> dict[str, int]:
    return {view.id: view.recent_tokens for view in registry.views()}


def brought(registry: Registry, address: WorkerId, tokens: int) -> None:
    registry.begin(address, LegWork(placed_tokens=tokens), 0.0)


@pytest.mark.parametrize("share", [0.5, 0.1, 0.0], ids=lambda share: f"{share:.0%} of turns at the second process")
@pytest.mark.parametrize("late", [1, 7], ids=lambda late: f"news after {late} turns")
async def test_what_turns_brought_lately_halves_as_in_one_process(pair: Pair, share: float, late: int) -> None:
    alone, random = Registry(), Random(7)
    for address in (R1, R2):
        worker(alone, address)
    for number in range(400):
        # First more of them go to one worker, then to the other: that one's tokens must not stay as they are.
        address = random.choice((R1, R1, R1, R2) if number < 200 else (R1, R2, R2, R2))
        for registry in (alone, registries(pair)[random.random() < share]):
            brought(registry, address, TURN_TOKENS)
        if number % late == 0:
            hear(pair)
    hear(pair)
    expected = recent(alone)
    for registry in registries(pair):
        assert recent(registry) == pytest.approx(expected, abs=2 * late * TURN_TOKENS)


async def test_an_early_share_of_a_process_that_has_no_turns_left_fades_too(pair: Pair) -> None:
    zero, one = registries(pair)
    brought(one, R1, RECENT_TOKENS)
    for _ in range(10):
        brought(zero, R2, RECENT_TOKENS)
        hear(pair)
    assert recent(one) == recent(zero)
    assert recent(one)[R1] < RECENT_TOKENS // 16


async def test_a_process_that_starts_late_counts_on_from_there(pair: Pair) -> None:
    zero = registries(pair)[0]
    for _ in range(9):
        brought(zero, R1, RECENT_TOKENS)
    hear(pair)
    await succeeded(pair)
    newcomer = registries(pair)[1]
    assert recent(newcomer) == recent(zero)
    brought(newcomer, R2, TURN_TOKENS)
    hear(pair)
    assert recent(zero) == recent(newcomer)
    assert recent(zero)[R2] == TURN_TOKENS


@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize("after", [Load(), Load(kv_usage=0.2)], ids=["the same load", "another load"])
async def test_what_was_placed_counts_until_the_engine_reports_its_load(pair: Pair, by: int, after: Load) -> None:
    zero = registries(pair)[0]
    zero.loaded(R1, Load(), 1.0)
    hear(pair)
    brought(registries(pair)[by], R1, 100)
    hear(pair)
    zero.hold_back(R1, held_back=True)  # news of another kind
    hear(pair)
    assert placed(pair) == [100, 100]
    zero.loaded(R1, after, 2.0)
    hear(pair)
    assert placed(pair) == [0, 0]


def placed(pair: Pair) -> list[int]:
    views = [registry.view(R1) for registry in registries(pair)]
    return [view.placed_tokens for view in views if view is not None]
