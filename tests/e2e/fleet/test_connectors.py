"""Every connector before the simulated engine of its protocol: conversations, its own parameters, and engines that die.

Each failure of a leg is provoked with every connector in `test_connector_failures.py` beside it, and clients leave in
`tests/e2e/failures/test_cancel_matrix.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from ppd.proxy.config import EncoderUse
from ppd.proxy.failures import Cause, Leg
from ppd.proxy.policy import Route
from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.fault_orders import FaultKind, Faults, Order
from tests.e2e.encoders.test_encoders import asks, images, picture
from tests.e2e.failures.fleet import Seen
from tests.e2e.failures.outcomes import held_by
from tests.e2e.fleet.connector_fleets import HASTY, NAMES, WORDS, ConnectorFleet, ConnectorFleets, shows_transfers

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOVING = [name for name in NAMES if name != "none"]
KEYED = ("nixl_push", "mooncake", "moriio", "moriio_read", "sglang", "trtllm", "trtllm_gen_first")
TOLD_BY_P = {  # a member of P's answer without which D must not be sent it, and what the proxy calls that
    "nixl": ("remote_block_ids", "remote_block_ids_empty"),
    "nixl_push": ("remote_block_ids", "remote_block_ids_empty"),
    "moriio_read": ("remote_engine_id", "params_incomplete"),
    "trtllm": ("encoded_opaque_state", "opaque_state_missing"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleets() -> AsyncIterator[ConnectorFleets]:
    async with AsyncExitStack() as stack:
        made = ConnectorFleets(stack, attempts=3)
        yield made
        made.forget(Trap.EXPIRED_HANDOFF)  # by a fault, or by the end of a case, while a D may still ask


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty() -> AsyncIterator[ConnectorFleets]:
    """For what ends by time-outs alone."""
    async with AsyncExitStack() as stack:
        made = ConnectorFleets(stack, attempts=3, **HASTY)
        yield made
        made.forget(Trap.EXPIRED_HANDOFF)


@pytest.mark.parametrize("connector", NAMES)
async def test_a_split_conversation_says_what_a_replica_says(fleets: ConnectorFleets, connector: str) -> None:
    fleet = await fleets.of(connector)
    field, talk = fleet.field, fleet.talk()
    for turn, stream in enumerate((False, True, False)):
        body = talk.body(stream=stream)
        seen = await field.ask(body)
        assert (seen.is_complete, seen.text) == (True, await field.right_text(body)), seen.body
        assert not shows_transfers(seen)
        talk.heard(seen.text, f"{turn} and more")
        receipt = field.newest()
        assert [leg.kind for leg in receipt.legs] == [Leg.PREFILL, Leg.DECODE]
        assert (receipt.handoff_missing, receipt.outcome) == (None, "completed")
    moved = sum(engine.counters.external_kv_tokens for engine in fleet.engines(Leg.DECODE))
    if connector != "lmcache":  # whose D finds as its own what P has sent it
        assert (moved > 0) is (connector != "none"), "D has taken P's KV"
    await field.until(field.idle)
    assert not any(engine.counters.traps for engine in field.engines.values())


@pytest.mark.parametrize("connector", [name for name in MOVING if name not in ("lmcache", "sglang")])
async def test_a_d_that_holds_the_history_is_sent_what_it_lacks(fleets: ConnectorFleets, connector: str) -> None:
    moved, held, prompt = await kv_of_a_second_turn(await fleets.of(connector))
    assert 0 < moved < prompt / 2 < held


async def test_so_is_an_sglang_d_that_tells_of_a_radix_cache() -> None:
    async with AsyncExitStack() as stack:
        fleet = await ConnectorFleet.start(stack, "sglang", engine={"decode_radix_cache": True})
        moved, held, prompt = await kv_of_a_second_turn(fleet)
        assert 0 < moved < prompt / 2 < held
        receipt = fleet.field.newest()
        assert fleet.field.view(receipt.decode).worker.coordinates["prefix_cache"] == "true", "a probe has asked"
        assert held_by(fleet.field, receipt.session, Leg.DECODE)[1] > 0


@pytest.mark.parametrize("connector", NAMES)
async def test_a_later_turn_stays_on_d_where_d_can_compute_a_prompt(fleets: ConnectorFleets, connector: str) -> None:
    fleet = await fleets.of(connector)
    told = await a_forced_local_turn(fleet)
    assert told == ((Route.LOCAL, "forced") if fleet.connector.decodes_alone else (Route.SPLIT, "needs_prefill"))


async def test_so_it_does_on_a_d_of_p2p_nccl_that_is_patched_and_says_so() -> None:
    async with AsyncExitStack() as stack:
        fleet = await ConnectorFleet.start(stack, "p2p_nccl", engine={"takes_plain": True})
        assert await a_forced_local_turn(fleet) == (Route.LOCAL, "forced")


async def a_forced_local_turn(fleet: ConnectorFleet) -> tuple[str, str]:
    """The route of a second turn for which LOCAL was asked, and the reason; its text is right."""
    field, talk = fleet.field, fleet.talk()
    talk.heard((await field.ask(talk.body())).text, "and more")
    body = talk.body()
    seen, receipt = await field.ask(body, forced=Route.LOCAL), field.newest()
    assert (seen.status, seen.text) == (200, await field.right_text(body)), seen.body
    await fleet.rest()
    assert not any(engine.counters.traps for engine in field.engines.values())
    return receipt.route, receipt.reason


async def kv_of_a_second_turn(fleet: ConnectorFleet) -> tuple[int, int, int]:
    """Tokens that were moved to the D of both turns, that it held, and of the prompt."""
    field, talk = fleet.field, fleet.talk()
    talk.heard((await field.ask(talk.body())).text, "and more")
    first = field.newest()
    await fleet.rest()
    d = field.engines[first.decode]
    moved, held = d.counters.external_kv_tokens, d.counters.local_cache_hit_tokens
    body = talk.body()
    seen, receipt = await field.ask(body), field.newest()
    assert (seen.text, receipt.decode) == (await field.right_text(body), first.decode)
    await fleet.rest()
    counters = d.counters
    return counters.external_kv_tokens - moved, counters.local_cache_hit_tokens - held, receipt.prompt_tokens or 0


@pytest.mark.parametrize("connector", NAMES)
async def test_turns_at_once_keep_their_keys_apart(fleets: ConnectorFleets, connector: str) -> None:
    fleet = await fleets.of(connector)
    bodies = [fleet.talk().body() for _ in range(6)]
    answers = await asyncio.gather(*map(fleet.field.ask, bodies))
    for body, seen in zip(bodies, answers, strict=True):
        assert seen.text == await fleet.field.right_text(body)
    await fleet.field.until(fleet.field.idle)
    assert not fleet.used_twice()


@dataclass(frozen=True, slots=True)
class Between:
    """What goes wrong between engines; `cause`: what is found of D, where only that can be."""

    leg: Leg
    kind: FaultKind
    cause: Cause | None = None
    only: tuple[str, ...] = KEYED

    def __str__(self) -> str:
        return f"{self.leg}-{self.kind}"


BETWEEN = [
    # The key is over when D comes. NIXL's P reads on from memory that is another's: its lease must not be over.
    Between(Leg.PREFILL, FaultKind.EXPIRE, only=(*KEYED, "offload_p2p", "p2p_nccl", "lmcache")),
    # P never comes to where the legs meet, or sends nothing.
    Between(Leg.PREFILL, FaultKind.ABSENT, only=(*KEYED, "offload_p2p", "p2p_nccl", "lmcache")),
    Between(Leg.DECODE, FaultKind.ABSENT, only=(*KEYED, "offload_p2p", "p2p_nccl")),
    Between(Leg.DECODE, FaultKind.LOAD, Cause.SERVER, ("nixl", *KEYED)),
    Between(Leg.DECODE, FaultKind.LOAD, only=("offload_p2p",)),
]
ALL_BETWEEN = [(name, between) for name in NAMES for between in BETWEEN if name in between.only]


@pytest.mark.parametrize(("connector", "between"), ALL_BETWEEN, ids=str)
async def test_engines_that_fail_each_other_are_replaced_under_a_new_key(
    hasty: ConnectorFleets, connector: str, between: Between
) -> None:
    fleet = await hasty.of(connector)
    # Where one waits in vain: a whole answer that is late is not asked for again.
    stream = between.kind is FaultKind.ABSENT or connector == "p2p_nccl"
    field, body = fleet.field, fleet.talk().body(stream=stream)
    taken = fleet.order(between.leg, Order(between.kind))
    seen = await field.ask(body)
    assert taken.orders[0].times == 0, "it was provoked"
    assert (seen.is_complete, seen.text) == (True, await field.right_text(body)), seen.body
    errors = [(leg.kind, leg.error) for leg in field.newest().legs if leg.error]
    if not fleet.connector.finds_by_content:
        assert errors if between.cause is None else (between.leg, between.cause) in errors
    elif between.kind is not FaultKind.ABSENT or connector == "lmcache":  # nothing waits
        assert not errors, "D computes what it does not find"
    await fleet.rest()
    assert not fleet.used_twice()
    again = await field.ask({**body, "stream": False})
    assert again.text == seen.text, "the next turn succeeds"


@pytest.mark.parametrize("connector", [name for name in MOVING if name != "lmcache"])
async def test_where_no_kv_moves_no_turn_hangs(hasty: ConnectorFleets, connector: str) -> None:
    """Both P's are wedged. Nobody answers where no D can compute a prompt, or waits within its step."""
    fleet = await hasty.of(connector)
    field, body = fleet.field, fleet.talk().body(stream=True)
    engines = [*fleet.engines(Leg.PREFILL), *fleet.engines(Leg.DECODE)]
    for engine in engines:
        engine.faults = Faults(wedge=["*"])
    seen = await field.ask(body)
    assert seen.status in ((200,) if fleet.connector.decodes_alone else (504,)), seen.body
    assert seen.status != 200 or seen.text == await field.right_text(body)
    for engine in engines:
        engine.faults = Faults()
    await fleet.rest()
    assert (await field.ask({**body, "stream": False})).text == await field.right_text(body)
    await fleet.rest()


@pytest.mark.parametrize("connector", [name for name in MOVING if name != "lmcache"])
async def test_a_d_whose_abort_leaks_loses_blocks_and_no_turn(fleets: ConnectorFleets, connector: str) -> None:
    """A client leaves while D waits for P; what D then keeps for good is for its own metrics to tell."""
    fleet = await fleets.of(connector)
    field, body = fleet.field, fleet.talk().body(stream=True)
    if connector == "nixl":  # whose legs do not meet
        for engine in fleet.engines(Leg.PREFILL):
            engine.faults = Faults(wedge=["*"])
    else:
        fleet.order(Leg.PREFILL, Order(FaultKind.ABSENT))
    leaking = fleet.order(Leg.DECODE, Order(FaultKind.LEAK))
    asking = asyncio.create_task(field.ask(body))
    await field.until(lambda: any(engine.scheduler.pulling for engine in fleet.engines(Leg.DECODE)))
    asking.cancel()
    await asyncio.wait({asking})
    await fleet.rest()
    assert leaking.orders[0].times == 0, "it was provoked"
    assert sum(engine.pool.used for engine in fleet.engines(Leg.DECODE)) > 0
    assert (await field.ask({**body, "stream": False})).text == await field.right_text(body)
    await fleet.rest()


@pytest.mark.parametrize("connector", NAMES)
async def test_the_requests_own_fault_is_told_once_and_ends_both_legs(fleets: ConnectorFleets, connector: str) -> None:
    fleet = await fleets.of(connector)
    field = fleet.field
    seen = await field.ask(fleet.talk().body(max_tokens=0))
    assert seen.status == 400
    assert len(field.newest().legs) <= 2, "nobody else is asked"
    await field.until(field.at_rest)
    await fleet.rest()


@pytest.mark.parametrize("forced", [None, Route.LOCAL])
@pytest.mark.parametrize("connector", ["sglang", "trtllm", "trtllm_gen_first"])
async def test_what_only_vllm_takes_is_refused_by_no_other_engine(
    fleets: ConnectorFleets, connector: str, forced: Route | None
) -> None:
    """TensorRT-LLM answers 400 to a member that it does not know; nor may it be told vLLM's order of urgency."""
    fleet = await fleets.of(connector)
    field, talk = fleet.field, fleet.talk()
    body = talk.body(priority=7, session_id="mine", prompt_cache_key="mine", cache_salt="mine")
    talk.heard((await field.ask(talk.body(cache_salt="mine"))).text, "and more")
    seen = await field.ask(body, forced=forced)
    assert (seen.is_complete, seen.text) == (True, await field.right_text(body)), seen.body
    for leg in field.newest().legs:
        got = json.loads(field.engines[leg.worker].received[-1].body)
        assert ("priority" in got, got["cache_salt"]) == (False, "mine")
    await fleet.rest()


@pytest.mark.parametrize("connector", TOLD_BY_P)
@pytest.mark.parametrize("is_whole", [True, False])
async def test_parameters_that_d_could_not_use_are_not_sent_on(
    fleets: ConnectorFleets, connector: str, is_whole: bool
) -> None:
    fleet = await fleets.of(connector)
    field, body = fleet.field, fleet.talk().body()
    member, reason = TOLD_BY_P[connector]
    fleet.order(Leg.PREFILL, Order(FaultKind.HANDOFF, member="" if is_whole else member))
    seen = await field.ask(body)
    receipt = field.newest()
    assert (seen.text, receipt.handoff_missing) == (
        await field.right_text(body),
        "params_missing" if is_whole else reason,
    )
    decode = field.engines[receipt.decode]
    assert not {"kv_transfer_params", "disaggregated_params"} & json.loads(decode.received[-1].body).keys()
    assert decode.counters.traps.total() == 0
    await fleet.rest()


async def test_a_p_that_has_lost_the_history_takes_it_from_the_turns_d(fleets: ConnectorFleets) -> None:
    """Only what both lack is computed, and only what D lacks moves: P is told D as its source."""
    fleet = await fleets.of("offload_p2p")
    field, talk = fleet.field, fleet.talk()
    talk.heard((await field.ask(talk.body())).text, "and more")
    first = field.newest()
    p, d = (field.engines[name] for name in (first.prefill, first.decode))
    await fleet.rest()
    assert p.pool.clear()
    computed, moved = p.counters.local_compute_tokens, d.counters.external_kv_tokens
    body = talk.body()
    seen, receipt = await field.ask(body), field.newest()
    assert (seen.text, receipt.prefill, receipt.decode) == (await field.right_text(body), first.prefill, first.decode)
    lacking = (receipt.prompt_tokens or 0) - (first.prompt_tokens or 0)
    block = d.pool.block_size
    assert p.counters.local_compute_tokens - computed <= lacking + block
    assert d.counters.external_kv_tokens - moved <= lacking + block
    assert not fleet.used_twice()
    await fleet.rest()


async def test_a_d_that_tells_of_no_radix_cache_is_believed_to_hold_nothing(fleets: ConnectorFleets) -> None:
    fleet = await fleets.of("sglang")
    field, talk = fleet.field, fleet.talk()
    for _ in range(2):
        body = talk.body()
        talk.heard((await field.ask(body)).text, "and more")
    receipt = field.newest()
    assert field.view(receipt.decode).worker.coordinates["prefix_cache"] == "false", "a probe has asked"
    assert held_by(field, receipt.session, Leg.DECODE) == (field.worker(receipt.decode), 0)
    assert held_by(field, receipt.session, Leg.PREFILL)[1] > 0
    await fleet.rest()


async def test_an_error_of_d_that_names_p_is_told_without_its_text(fleets: ConnectorFleets) -> None:
    fleet = await fleets.of("trtllm")
    where = ", ".join(engine.address for engine in fleet.engines(Leg.PREFILL))
    error = {"error": {"message": f"no context at {where}", "code": 400}}
    fleet.order(Leg.DECODE, Order(FaultKind.BODY, body=json.dumps(error)))
    seen = await fleet.field.ask(fleet.talk().body())
    assert (seen.status, shows_transfers(seen), b"no context" in seen.body) == (400, False, False)
    await fleet.rest()


# -- engines that die


@pytest.mark.parametrize("connector", NAMES)
async def test_engines_that_die_before_between_and_after(connector: str) -> None:
    async with AsyncExitStack() as stack:
        fleet = await ConnectorFleet.start(stack, connector, "P1 P2 P3 P4 D1 D2", attempts=3)
        field = fleet.field

        async def right(**changes: Any) -> Seen:
            body = fleet.talk().body(**changes)
            seen = await field.ask(body)
            assert (seen.is_complete, seen.text) == (True, await field.right_text(body)), seen.body
            return seen

        fleet.order(Leg.PREFILL, Order(FaultKind.KILL))
        await right()
        if connector != "none":
            fleet.order(Leg.PREFILL, Order(FaultKind.KILL_AT_TRANSFER))
            await right(stream=True)
            await field.until(lambda: sum(engine.is_dead for engine in fleet.engines(Leg.PREFILL)) == 2)
        fleet.order(Leg.DECODE, Order(FaultKind.KILL))
        await right()
        assert sum(engine.is_dead for engine in fleet.engines(Leg.DECODE)) == 1

        body, seen = fleet.talk().body(stream=True, max_tokens=400, ignore_eos=True), Seen()
        asking = asyncio.create_task(field.ask(body, seen))
        await field.until(lambda: bool(seen.text) if seen.is_stream else False)
        field.engines[field.newest().prefill].kill()
        await asking
        assert (seen.is_complete, seen.text) == (True, await field.right_text(body)), "D has the KV"

        body, seen = fleet.talk().body(stream=True, max_tokens=4000, ignore_eos=True), Seen()
        asking = asyncio.create_task(field.ask(body, seen))
        await field.until(lambda: bool(seen.text) if seen.is_stream else False)
        field.engines[field.newest().decode].kill()
        await asking
        assert not seen.is_complete
        assert b"error" in seen.body
        receipt = field.newest()
        assert (receipt.outcome, [leg.error for leg in receipt.legs[-2:]]) == ("broken", [None, Cause.RESET])
        await field.until(lambda: not field.proxy.state.admission.inside)


@pytest.mark.parametrize("connector", NAMES)
async def test_a_d_that_may_have_to_compute_the_prompt_gets_its_media(connector: str) -> None:
    """One that finds KV by content computes what it does not find; without the data it could not.

    Of engines other than vLLM no request may say what an encoder told, so none is asked.
    """
    async with AsyncExitStack() as stack:
        fleet = await ConnectorFleet.start(stack, connector, "P1 D1", encoder=EncoderUse.ALWAYS, encoder_strip=True)
        field = fleet.field
        await field.add("E1")
        said = [{"role": "user", "content": asks(picture(1), WORDS)}]
        turn = await field.chat(said)
        receipt = field.newest()
        assert turn.status == 200
        assert [(leg.kind, leg.error) for leg in receipt.legs] == [(Leg.PREFILL, None), (Leg.DECODE, None)]
        to_p, to_d = (json.loads(field.engines[name].received[-1].body) for name in ("P1", "D1"))
        is_vllm = fleet.engines(Leg.PREFILL)[0].protocol.engine == "vllm"
        assert [part["type"] for part in images(to_p)] == ["image_embeds" if is_vllm else "image_url"]
        is_stripped = is_vllm and connector not in ("none", "lmcache", "offload_p2p")
        assert [part["type"] for part in images(to_d)] == ["image_embeds" if is_stripped else "image_url"]
        assert ("ec_transfer_params" in to_p) is is_vllm and "ec_transfer_params" not in to_d
        await fleet.rest()
