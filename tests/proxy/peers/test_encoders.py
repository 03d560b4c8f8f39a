"""What one process has had encoded, and what workers encode for its turns, the others know."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ppd.proxy.encoders.choosing import ItemDecision
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.peers.events import EmbeddingsHeld
from ppd.proxy.routing.state import State
from tests.proxy.encoders.test_encoder_chooser import decisions, turn
from tests.proxy.peers.test_lessons import heard, pair_of, succeeded
from tests.support.processes import Pair

pytestmark = pytest.mark.slow

ENCODED, HELD, BUSY = ItemDecision.ENCODED, ItemDecision.HELD, ItemDecision.BUSY


def join_encoder(pair: Pair, address: str = "e:1") -> None:
    registry = pair.ones[0].state.registry
    encoder = Worker(role=Role.ENCODE, address=address, models=("m",))
    registry.add_static(encoder, 0.0)
    registry.probed(encoder.id, encoder, None, 0.0)
    heard(pair)


def text_turns(state: State) -> None:
    for _ in range(20):
        state.arrivals.count(state.now(), opens=True)


async def test_an_embedding_is_known_to_all_processes_and_their_successors() -> None:
    async with pair_of() as pair:
        join_encoder(pair)
        here, there = (one.state for one in pair.ones)
        text_turns(there)
        assert decisions(there, turn(there)) == [ENCODED]
        made = turn(here)
        here.encoders.until_computed(made, {made.request.media[0].name: BUSY})(True)
        heard(pair)
        assert decisions(there, turn(there)) == [HELD]
        after = await succeeded(pair)
        text_turns(after)
        assert decisions(after, turn(after)) == [HELD]


async def test_an_item_goes_to_the_e_on_which_another_process_had_it_encoded() -> None:
    async with pair_of() as pair:
        join_encoder(pair)
        join_encoder(pair, "e:2")
        here, there = (one.state for one in pair.ones)
        second = next(view for view in here.registry.views() if view.id == "e:2")
        here.encoders.encoded(second, turn(here).request.media)
        heard(pair)
        for state in (there, await succeeded(pair)):
            choices = state.encoders.choose(turn(state))
            assert choices is not None
            assert [view.id for view, _ in choices.batches] == ["e:2"], "though e:1 is as idle"


@pytest.mark.parametrize("dies", [False, True])
async def test_what_a_worker_encodes_for_another_process_counts_until_it_ends_or_that_dies(dies: bool) -> None:
    """Where most turns have images, one goes to an idle E only if the worker encodes too."""
    async with pair_of() as pair:
        join_encoder(pair)
        here, there = (one.state for one in pair.ones)
        assert decisions(here, turn(here)) == [BUSY]
        made = turn(there)
        computed = there.encoders.until_computed(made, {made.request.media[0].name: BUSY})
        heard(pair)
        assert decisions(here, turn(here)) == [ENCODED]
        if dies:
            await succeeded(pair)
        else:
            computed(False)
            heard(pair)
        assert decisions(here, turn(here)) == [BUSY]


async def test_a_process_that_joins_hears_what_workers_encode_now() -> None:
    async with pair_of() as pair:
        join_encoder(pair)
        here = pair.ones[0].state
        made = turn(here)
        here.encoders.until_computed(made, {made.request.media[0].name: BUSY})
        after = await succeeded(pair)
        assert decisions(after, turn(after)) == [ENCODED]


async def test_a_process_that_joins_is_told_one_engines_items_at_a_time() -> None:
    """All of hundreds of engines in one piece would stop the turns of both processes for a second."""
    async with pair_of() as pair:
        here = pair.ones[0].state
        for number in range(4):
            join_encoder(pair, f"e:{number + 1}")
        encoders = [view for view in here.registry.views() if view.role is Role.ENCODE]
        (item,) = turn(here).request.media
        for view in encoders:
            here.encoders.encoded(view, [replace(item, name=f"{view.name}/{number}") for number in range(1000)])
        told = [
            [event for event in batch if isinstance(event, EmbeddingsHeld)]
            for batch in pair.ones[0].membership._replication.snapshot()
        ]
        assert [len(events) for events in told if events] == [1] * len(encoders)
        after = await succeeded(pair)
        kept = {each.worker: each.items for each in here.encoders.embeddings()}
        assert {each.worker: each.items for each in after.encoders.embeddings()} == kept


async def test_what_is_told_of_an_engine_is_as_it_is_when_it_is_told() -> None:
    async with pair_of() as pair:
        join_encoder(pair)
        join_encoder(pair, "e:2")
        here = pair.ones[0].state
        (item,) = turn(here).request.media
        first, second = (view for view in here.registry.views() if view.role is Role.ENCODE)
        for view in (first, second):
            here.encoders.encoded(view, [item])
        told = here.encoders.embeddings()
        assert next(told).worker == first.id
        here.encoders.encoded(second, [replace(item, name="later")])
        assert [each.items for each in told] == [[(item.name, 1337), ("later", 1337)]]
