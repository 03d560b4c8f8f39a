from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ppd.proxy.connectors.leg import Handoff, Pair
from ppd.proxy.connectors.p2p_nccl import P2pNccl, shown_id
from ppd.proxy.openai.request import Endpoint, Fields

FieldsOf = Callable[[dict[str, Any]], Fields]
MakePair = Callable[..., Pair]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HEX = "0123456789abcdef0123456789abcdef"
ANSWER = b'{"usage": {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 64}}}'


def handoff(pair: Pair) -> Handoff:
    found = P2pNccl().handoff(ANSWER, pair)
    assert isinstance(found, Handoff)
    return found


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    told = ({"zmq_address": "10.0.0.5:21001"}, {"zmq_address": "10.0.0.9:22001"})
    return make_pair(version="", key=HEX, of_prefill=told[0], of_decode=told[1])


def test_both_legs_carry_one_id_with_both_addresses(fields_of: FieldsOf, pair: Pair) -> None:
    connector, fields = P2pNccl(), fields_of(CHAT)
    prefill = connector.prefill_leg(Endpoint.CHAT, fields, pair, "req-1:9999-p")
    decode = connector.decode_leg(Endpoint.CHAT, fields, pair, "req-1:9999-d", handoff(pair))
    expected = f"___prefill_addr_10.0.0.5:21001___decode_addr_10.0.0.9:22001_{HEX}"
    assert prefill.headers == decode.headers == {"X-Request-Id": expected}


def test_a_key_is_32_hex_digits_and_another_one_each_time() -> None:
    keys = {P2pNccl().new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) == 32 and set(key) <= set("0123456789abcdef") for key in keys)


def test_bodies_carry_nothing_of_the_transfer(fields_of: FieldsOf, pair: Pair) -> None:
    connector = P2pNccl()
    fields = fields_of({**CHAT, "tool_choice": "required", "kv_transfer_params": {"x": 1}, "max_tokens": 9})
    prefill = connector.prefill_leg(Endpoint.CHAT, fields, pair, HEX)
    decode = connector.decode_leg(Endpoint.CHAT, fields, pair, HEX, handoff(pair))
    assert msgspec.json.decode(prefill.body) == {**CHAT, "max_tokens": 1, "ignore_eos": True}
    assert msgspec.json.decode(decode.body) == {**CHAT, "tool_choice": "required", "max_tokens": 9}


def test_without_a_handoff_d_gets_an_id_without_addresses(fields_of: FieldsOf, make_pair: MakePair) -> None:
    leg = P2pNccl().decode_leg(Endpoint.CHAT, fields_of(CHAT), make_pair(), HEX, None)
    assert leg.headers == {"X-Request-Id": HEX}


def test_ps_usage_is_what_the_handoff_knows(make_pair: MakePair) -> None:
    found = handoff(make_pair())
    assert (found.params, found.tokens, found.cached_tokens) == ({}, 90, 64)
    assert P2pNccl().handoff(b"junk", make_pair()) == replace(found, tokens=0, cached_tokens=None)


def test_a_client_sees_no_address_in_an_answers_id(fields_of: FieldsOf, pair: Pair) -> None:
    leg = P2pNccl().prefill_leg(Endpoint.CHAT, fields_of(CHAT), pair, "req-1")
    assert [shown_id(leg.headers["X-Request-Id"]), shown_id("a_b-c")] == [HEX, "a_b-c"]
