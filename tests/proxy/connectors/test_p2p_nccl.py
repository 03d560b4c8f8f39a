from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace as replace_worker
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ppd.proxy.connectors.leg import Handoff, Pair
from ppd.proxy.connectors.p2p_nccl import P2pNccl
from ppd.proxy.errors import NoWorkerError
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


def test_both_legs_carry_one_id_with_both_addresses(fields_of: FieldsOf, make_pair: MakePair) -> None:
    connector, pair, fields = P2pNccl(), make_pair(version=""), fields_of(CHAT)
    prefill = connector.prefill_leg(Endpoint.CHAT, fields, pair, HEX)
    decode = connector.decode_leg(Endpoint.CHAT, fields, pair, HEX, handoff(pair))
    again = connector.decode_leg(Endpoint.CHAT, fields, pair, prefill.headers["X-Request-Id"], handoff(pair))
    expected = f"___prefill_addr_10.0.0.5:21001___decode_addr_10.0.0.9:22001_{HEX}"
    assert prefill.headers == decode.headers == again.headers == {"X-Request-Id": expected}
    assert connector.shares_request_id


def test_any_leg_id_ends_in_32_hex_digits(fields_of: FieldsOf, make_pair: MakePair) -> None:
    pair = make_pair()
    leg = P2pNccl().prefill_leg(Endpoint.CHAT, fields_of(CHAT), pair, "req-1:9999-p0")
    other = P2pNccl().prefill_leg(Endpoint.CHAT, fields_of(CHAT), pair, "req-1:9999-p1")
    assert re.fullmatch(r"___prefill_addr_.*___decode_addr_10\.0\.0\.9:22001_[0-9a-f]{32}", leg.headers["X-Request-Id"])
    assert leg.headers != other.headers


def test_bodies_carry_nothing_of_the_transfer(fields_of: FieldsOf, make_pair: MakePair) -> None:
    connector, pair = P2pNccl(), make_pair(version="")
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


def test_a_worker_without_a_transfer_address_cannot_split(fields_of: FieldsOf, make_pair: MakePair) -> None:
    pair = make_pair()
    pair = replace(pair, decode=replace_worker(pair.decode, coordinates={}))
    with pytest.raises(NoWorkerError):
        P2pNccl().prefill_leg(Endpoint.CHAT, fields_of(CHAT), pair, HEX)
