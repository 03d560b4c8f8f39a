"""The encoders that a head names: which are asked for what, and what the other legs then carry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ppd.proxy.errors import Forbidden, RequestError
from ppd.proxy.gateway.headers import ENCODER_ITEMS, ENCODERS
from ppd.proxy.media.items import MEDIA_LIMIT
from ppd.servers.sidecar.allow_list import AllowList
from ppd.servers.sidecar.encoders import Encoders
from ppd.servers.sim.core.fault_orders import FaultKind, Faults, Order
from tests.e2e.encoders.test_encoders import asks, images, picture
from tests.servers.sidecar.sidecars import LOCALHOST
from tests.servers.sidecar.site import CHAT, Site

pytestmark = pytest.mark.slow

PARAMS = "ec_transfer_params"
ALL = "E1 P1 D1"


def says(*seeds: int) -> dict[str, Any]:
    """A body with a picture for each seed."""
    return {"messages": [{"role": "user", "content": [part for seed in seeds for part in asks(picture(seed))]}]}


def to_e(site: Site, *names: str) -> dict[str, str]:
    return {ENCODERS: ", ".join(site.engines[name].address for name in names)}


def asked(site: Site, name: str) -> list[int]:
    """How many items each leg had that came there."""
    return [len(images(body)) for body in site.received(name)]


def heads(leg: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in leg.headers.items()}


# -- the head


@pytest.mark.parametrize(
    ("headers", "addresses", "numbers"),
    [
        ({}, None, None),
        ({ENCODERS: " , "}, None, None),
        ({ENCODER_ITEMS: "0"}, None, None),
        ({ENCODERS: "10.0.0.8:8400"}, ["10.0.0.8:8400"], None),
        ({ENCODERS: "10.0.0.8:1, E.example:2,10.0.0.8:1"}, ["10.0.0.8:1", "e.example:2", "10.0.0.8:1"], None),
        ({ENCODERS: "10.0.0.8:1", ENCODER_ITEMS: "0, 7"}, ["10.0.0.8:1"], {0, 7}),
        ({ENCODERS: "10.0.0.6:8200,10.0.0.8:1"}, ["10.0.0.8:1"], None),
        ({ENCODERS: "10.0.0.6:8200"}, None, None),  # its own engine
    ],
)
def test_a_head_names_encoders_and_their_items(
    headers: dict[str, str], addresses: list[str] | None, numbers: set[int] | None
) -> None:
    allowed = AllowList("10.0.0.0/24,e.example:2", "encoder")
    found = Encoders(allowed, tls=True, own=frozenset(("10.0.0.6:8200",))).named(headers)
    assert (None if found is None else [view.worker.address for view in found.encoders]) == addresses
    if found is not None:
        assert found.numbers == numbers
        assert all(view.worker.tls for view in found.encoders)


@pytest.mark.parametrize("named", ["10.9.0.1:1", "10.0.0.8:1,10.9.0.1:1", "nowhere", "10.0.0.8", "10.0.0.8:0"])
def test_each_of_them_must_be_allowed(named: str) -> None:
    encoders = Encoders(AllowList("10.0.0.0/24", "encoder"), tls=False, own=frozenset())
    with pytest.raises(Forbidden) as refused:
        encoders.named({ENCODERS: named})
    assert (refused.value.code, refused.value.param) == ("encoder_not_allowed", ENCODERS)
    with pytest.raises(Forbidden):
        Encoders(AllowList(kind="encoder"), tls=False, own=frozenset()).named({ENCODERS: "10.0.0.8:1"})


@pytest.mark.parametrize("items", ["-1", "a", "0,,x", "99999", "0-3", "\u0661"])
def test_items_are_numbers(items: str) -> None:
    with pytest.raises(RequestError, match="x-ppd-encoder-items: must be numbers"):
        Encoders(AllowList(LOCALHOST, "encoder"), tls=False, own=frozenset()).named(
            {ENCODERS: "127.0.0.1:1", ENCODER_ITEMS: items}
        )


def test_a_head_names_no_more_encoders_than_a_turn_has_items() -> None:
    encoders = Encoders(AllowList(LOCALHOST, "encoder"), tls=False, own=frozenset())
    assert encoders.named({ENCODERS: ",".join(["127.0.0.1:1"] * MEDIA_LIMIT)}) is not None
    with pytest.raises(RequestError, match="at most 512"):
        encoders.named({ENCODERS: ",".join(["127.0.0.1:1"] * (MEDIA_LIMIT + 1))})


# -- the legs


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
async def test_encoders_go_first_and_what_they_tell_goes_to_whoever_computes_the_prompt(
    is_split: bool, strip: bool
) -> None:
    async with Site.of(names=ALL, settings={"encoder_strip": strip}) as site:
        alone = await site.ask(**says(1, 2), max_tokens=8)
        before = len(site.received("D1"))
        headers = {**to_e(site, "E1"), **(site.to_p if is_split else {}), "X-Request-Id": "gateway-1"}
        answer = await site.ask(headers, **says(1, 2), max_tokens=8)
        assert (answer.status, answer.text) == (200, alone.text)
        assert asked(site, "E1") == [1, 1]
        ids = [heads(leg)["x-request-id"] for leg in site.engines["E1"].received]
        assert all(leg_id.startswith("gateway-1-") for leg_id in ids) and len(set(ids)) == 2
        computing, answering = site.received("P1" if is_split else "D1")[-1], site.received("D1")[before]
        assert set(computing[PARAMS]) == {part["uuid"] for leg in site.received("E1") for part in images(leg)}
        assert (PARAMS in answering) is not is_split
        kinds = {part["type"] for body in (computing, answering) for part in images(body)}
        assert kinds == {"image_embeds" if strip else "image_url"}
        assert not any(ENCODERS in heads(leg) for engine in site.engines.values() for leg in engine.received)
        await site.until(site.is_idle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("items", "named", "legs"),
    [
        (None, ("E1", "E2"), {"E1": [1, 1], "E2": [1]}),
        (None, ("E2", "E2", "E1"), {"E1": [1], "E2": [1, 1]}),
        ("1", ("E2", "E1"), {"E1": [], "E2": [1]}),
        ("0,2,9", ("E2", "E1"), {"E1": [1], "E2": [1]}),
        ("7", ("E1",), {"E1": [], "E2": []}),
    ],
)
async def test_the_items_that_are_named_go_to_the_encoders_in_turn(
    items: str | None, named: tuple[str, ...], legs: dict[str, list[int]]
) -> None:
    async with Site.of(names="E1 E2 D1") as site:
        headers = to_e(site, *named) | ({} if items is None else {ENCODER_ITEMS: items})
        assert (await site.ask(headers, **says(1, 2, 1, 3))).status == 200
        assert {name: asked(site, name) for name in legs} == legs
        (receipt,) = site.sidecar.state.receipts.newest(1)
        assert receipt.encoder is not None
        left = 3 - sum(map(len, legs.values()))
        assert sorted(receipt.encoder.items) == ["image: encoded"] * (3 - left) + ["image: left"] * left


async def test_several_items_may_go_in_one_request() -> None:
    async with Site.of(names="E1 D1", settings={"encoder_batch": 2}) as site:
        assert (await site.ask(to_e(site, "E1"), **says(1, 2, 3))).status == 200
        assert asked(site, "E1") == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("named", ["10.9.9.9:8400", "127.0.0.1:1, 10.9.9.9:8400"])
@pytest.mark.parametrize("body", [says(1), {}])
async def test_an_encoder_that_is_not_allowed_gets_403_and_nothing_is_sent(named: str, body: dict[str, Any]) -> None:
    async with Site.of(names=ALL) as site:
        answer = await site.ask({ENCODERS: named, **site.to_p}, **body)
        assert (answer.status, answer.body["error"]["code"]) == (403, "encoder_not_allowed")
        assert "10.9.9.9" not in answer.body["error"]["message"]
        assert [site.received(name) for name in site.engines] == [[], [], []]


async def test_a_text_asks_no_encoder_and_without_a_header_none_is_asked() -> None:
    async with Site.of(names=ALL) as site:
        assert (await site.ask(to_e(site, "E1"))).status == 200
        assert (await site.ask(**says(1))).status == 200
        assert site.received("E1") == []
        assert PARAMS not in site.received("D1")[-1]


async def test_a_clients_own_parameters_reach_nobody() -> None:
    async with Site.of(names=ALL) as site:
        hostile = {"stolen": {"peer_host": "10.9.9.9", "peer_port": 1}}
        assert (await site.ask(to_e(site, "E1"), **says(1), ec_transfer_params=hostile)).status == 200
        assert not any(b"stolen" in leg.body for engine in site.engines.values() for leg in engine.received)


FAULTS = {
    "an error": Faults(refuse=9, refuse_status=500),
    "a refusal": Faults(refuse=9, refuse_status=400),
    "no JSON": Faults(garbage=9),
    "a reset": Faults(orders=[Order(FaultKind.RESET, times=9)]),
    "its death": None,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failing_encoder_is_no_error(fault: str) -> None:
    async with Site.of(names=ALL) as site:
        headers, faults = {**to_e(site, "E1"), **site.to_p}, FAULTS[fault]
        if faults is None:
            await site.kill("E1")
        else:
            site.engines["E1"].faults = faults
        answer = await site.ask(headers, **says(1))
        assert (answer.status, answer.headers["X-PPD-Route"]) == (200, "SPLIT")
        assert [part["type"] for part in images(site.received("P1")[-1])] == ["image_url"]
        assert PARAMS not in site.received("P1")[-1]
        assert site.engines["P1"].counters.encoded_items == 1
        # Whom to avoid is the picker's business, and each head may name others: nothing is kept of them.
        assert not site.sidecar.state.health.breakers.circuits
        await site.until(site.is_idle)


async def test_a_slow_encoder_is_not_waited_for() -> None:
    async with Site.of(names=ALL, settings={"encoder_timeout_s": 0.2}) as site:
        site.engines["E1"].faults = Faults(orders=[Order(FaultKind.SLOW, delay_s=60.0)])
        assert (await site.ask(to_e(site, "E1"), **says(1))).status == 200
        (receipt,) = site.sidecar.state.receipts.newest(1)
        assert receipt.encoder is not None
        assert [leg.error for leg in receipt.encoder.legs] == ["request_sent: timeout"]
        assert receipt.encoder.items == ["image: failed"]


async def test_a_client_that_leaves_ends_the_encoders_legs() -> None:
    async with Site.of(names=ALL, engine={"encoder_item_s": 60.0, "time_scale": 1.0}) as site:
        asking = asyncio.create_task(
            site.session.post(site.base_url + CHAT, json={"model": "sim", **says(1)}, headers=to_e(site, "E1"))
        )
        await site.until(lambda: site.engines["E1"].encoder.running == 1)
        asking.cancel()
        await site.until(lambda: site.engines["E1"].encoder.running == 0)
        assert site.received("D1") == []
