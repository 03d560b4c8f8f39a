"""What a process had counted goes on in its successor, whenever the proxy's metrics are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from ppd.proxy.assembly import Proxy
from tests.support.processes import Pair

pytestmark = pytest.mark.slow


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    one = Pair()
    await one.join()
    yield one
    await one.hush()
    one.close()


def turned(process: Proxy, times: int = 1) -> None:
    for _ in range(times):
        process.state.metrics.turns.add("LOCAL", "forced", "completed")


async def shown(process: Proxy) -> float:
    """Turns of the whole proxy, as a scrape of this process shows them."""
    turns = [family for family in await process.membership.total() if family.name == "ppd_turns"]
    return sum(sample.value for family in turns for sample in family.samples)


def replaced(pair: Pair, index: int) -> Proxy:
    """Another process in place of one that was killed, and had read all; it has yet to join."""
    pair.ones[1 - index].membership._channels.flush()
    pair.ones[index].membership.catch_up()
    pair.ones[index].membership._channels.close()
    pair.ones[index] = pair.begin(index)
    return pair.ones[index]


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("is_asked_first", [False, True])
async def test_a_scrape_while_a_successor_joins_shows_what_was_counted_before(
    pair: Pair, dead: int, is_asked_first: bool
) -> None:
    """is_asked_first: what the dead process was asked is the first thing that its successor reads."""
    turned(pair.ones[dead], 3)
    other = pair.ones[1 - dead]
    assert await shown(other) == 3
    successor = replaced(pair, dead)
    asking = [shown(other), successor.membership.join()]
    found = await asyncio.gather(*(asking if is_asked_first else reversed(asking)))
    turned(successor)
    assert [found[0 if is_asked_first else 1], await shown(other), await shown(successor)] == [3, 4, 4]


async def test_what_is_inherited_counts_once_over_several_lives(pair: Pair) -> None:
    one = pair.ones[0]
    for life in range(1, 5):
        turned(pair.ones[1])
        assert await shown(one) == life
        successor = replaced(pair, 1)
        await asyncio.gather(successor.membership.join(), *(shown(one) for _ in range(5)))
        assert [await shown(one), await shown(successor), await shown(one)] == [life] * 3


async def test_one_that_ends_before_it_has_joined_leaves_its_predecessors_counts(pair: Pair) -> None:
    turned(pair.ones[1], 3)
    assert await shown(pair.ones[0]) == 3
    successor = replaced(pair, 1)
    successor.membership._channels.open()
    await successor.membership.close()
    pair.ones[0].membership.catch_up()
    successor = replaced(pair, 1)
    await successor.membership.join()
    assert [await shown(one) for one in pair.ones] == [3, 3]
