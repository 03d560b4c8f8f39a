from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ppd.proxy.connectors.leg import Handoff, Pair
from ppd.proxy.connectors.sglang import SGLang, cache_told, info_url
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.openai.request import Endpoint, Fields

FieldsOf = Callable[[dict[str, Any]], Fields]
MakePair = Callable[..., Pair]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "logprobs": True}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
ROOM = {"bootstrap_host": "10.0.0.5", "bootstrap_port": 8998, "bootstrap_room": 2**63 - 1}
KEY = str(2**63 - 1)


def legs(fields: Fields, pair: Pair) -> list[dict[str, Any]]:
    """The bodies of P's and of D's leg."""
    prefill = SGLang().prefill_leg(Endpoint.CHAT, fields, pair, "leg-p")
    decode = SGLang().decode_leg(Endpoint.CHAT, fields, pair, "leg-d", None)
    assert (prefill.headers, decode.headers) == ({"X-Request-Id": "leg-p"}, {"X-Request-Id": "leg-d"})
    return [msgspec.json.decode(leg.body) for leg in (prefill, decode)]


def test_both_legs_are_the_clients_body_with_one_room(fields_of: FieldsOf, make_pair: MakePair) -> None:
    p, d = legs(fields_of(STREAM), make_pair(connector="sglang", key=KEY))
    assert p == {**CHAT, **ROOM, "stream": False}, "P samples the first token, so what it depends on stays"
    assert d == {**STREAM, **ROOM}


@pytest.mark.parametrize(
    ("told", "address", "host", "port"),
    [
        ({}, "10.0.0.5:8100", "10.0.0.5", 8998),
        ({"bootstrap_port": "9001"}, "p.example:8100", "p.example", 9001),
        ({"bootstrap_host": "10.9.9.9"}, "10.0.0.5:8100", "10.9.9.9", 8998),
        ({}, "[2001:db8::1]:8100", "[2001:db8::1]", 8998),
    ],
)
def test_the_room_is_at_ps_bootstrap_service(
    fields_of: FieldsOf, make_pair: MakePair, told: dict[str, str], address: str, host: str, port: int
) -> None:
    for body in legs(fields_of(CHAT), make_pair(address, connector="sglang", key=KEY, of_prefill=told)):
        assert (body["bootstrap_host"], body["bootstrap_port"]) == (host, port)


def test_a_room_has_63_bits_and_is_another_one_each_time() -> None:
    rooms = {int(SGLang().new_key()) for _ in range(100)}
    assert len(rooms) == 100
    assert all(0 <= room < 2**63 for room in rooms)


def test_what_a_client_says_of_rooms_is_not_passed_on(fields_of: FieldsOf, make_pair: MakePair) -> None:
    private = {
        "bootstrap_host": "evil",
        "bootstrap_port": 1,
        "bootstrap_room": 7,
        "bootstrap_pair_key": "x",
        "disagg_prefill_dp_rank": 3,
        "rid": "another's",
        "transfer_id": "t",
        "disaggregated_params": {},
    }
    for body in legs(fields_of({**CHAT, **private}), make_pair(connector="sglang", key=KEY)):
        assert {name: body[name] for name in private.keys() & body.keys()} == ROOM


def test_ps_answer_tells_counts_only(make_pair: MakePair) -> None:
    answer = b'{"usage": {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 64}}}'
    assert SGLang().handoff(answer, make_pair()) == Handoff({}, 90, 64)
    assert SGLang().handoff(b"junk", make_pair()) == Handoff({}, 0, None)


D = Worker(role=Role.DECODE, address="10.0.0.9:30000", connector="sglang", engine="sglang")


@pytest.mark.parametrize(
    ("answer", "told", "keeps"),
    [
        (b'{"disaggregation_decode_enable_radix_cache": false, "version": "0.5.23"}', {"prefix_cache": "false"}, False),
        (b'{"disaggregation_decode_enable_radix_cache": true}', {"prefix_cache": "true"}, True),
        (b'{"disaggregation_decode_enable_radix_cache": null}', {}, True),
        (b'{"disaggregation_decode_enable_radix_cache": "no"}', {}, True),
        (b"{}", {}, True),
        (b"[" * 100_000, {}, True),
        (b"\xff", {}, True),
    ],
)
def test_a_d_tells_whether_it_keeps_prefixes(answer: bytes, told: dict[str, str], keeps: bool) -> None:
    assert cache_told(answer) == told
    assert replace(D, coordinates=cache_told(answer)).keeps_prefixes is keeps


def test_only_a_d_whose_entry_does_not_say_is_asked() -> None:
    assert info_url(D) == "http://10.0.0.9:30000/server_info"
    assert info_url(replace(D, coordinates={"prefix_cache": "true"})) == ""
    assert info_url(replace(D, role=Role.PREFILL)) == info_url(replace(D, connector="trtllm")) == ""
