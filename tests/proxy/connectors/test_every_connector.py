"""What holds for every connector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.connectors import CONNECTORS, Connector, can_pair, plain_leg, usual_engine
from ppd.proxy.connectors.leg import PRIVATE, Finished, Handoff, NoHandoff, Pair
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.leg_moves import LegOrder
from ppd.proxy.openai.request import Endpoint, Fields

FieldsOf = Callable[[dict[str, Any]], Fields]
MakePair = Callable[..., Pair]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROMPTS: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: CHAT,
    Endpoint.COMPLETIONS: {"prompt": "hi"},
    Endpoint.RESPONSES: {"input": "hi"},
    Endpoint.MESSAGES: {**CHAT, "max_tokens": 4},
}
TOLD = {
    "engine_id": "e",
    "zmq_address": "h:1",
    "ctx_info_endpoint": "tcp://h:1",
    "p2p_port": "1",
    "receiver_init_port": "1",
    "receiver_alloc_port": "1",
}
HOSTILE = "evil"
NAMED = (
    *("kv_transfer_params", "ec_transfer_params", "disaggregated_params", "transfer_id"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "disagg_prefill_dp_rank"),
    *("routed_dp_rank", "data_parallel_rank", "decode_tp_size", "conversation_params", "routing_key"),
    *("session_params", "prompt_token_ids", "prompt_token_ids_b64", "request_id", "rid"),
)


@pytest.fixture(params=CONNECTORS)
def connector(request: pytest.FixtureRequest) -> Connector:
    return CONNECTORS[request.param]


@pytest.mark.parametrize("name", NAMED)
def test_what_clients_say_of_transfers_reaches_no_engine(
    fields_of: FieldsOf, make_pair: MakePair, connector: Connector, name: str
) -> None:
    """On no endpoint, in none of its legs."""
    pair = make_pair(connector=connector.name, key=connector.new_key(), of_prefill=TOLD, of_decode=TOLD)
    hidden = {"kv_transfer_params": HOSTILE, "ec_transfer_params": HOSTILE}
    for endpoint, prompt in PROMPTS.items():
        fields = fields_of({"model": "m", **prompt, name: HOSTILE, "vllm_xargs": hidden})
        legs = [plain_leg(endpoint, fields, "l", usual_engine(connector.name))]
        if endpoint in connector.endpoints:
            legs.append(connector.prefill_leg(endpoint, fields, pair, "p"))
            legs.append(connector.decode_leg(endpoint, fields, pair, "d", None))
        assert [leg for leg in legs if HOSTILE.encode() in leg.body] == []
    assert name in PRIVATE


def test_each_leg_has_what_its_engine_takes(fields_of: FieldsOf, make_pair: MakePair, connector: Connector) -> None:
    pair = make_pair(connector=connector.name, key=connector.new_key(), of_prefill=TOLD, of_decode=TOLD)
    said = {"priority": 5, "session_id": "s", "prompt_cache_key": "k", "cache_salt": "x", "input_ids": [1]}
    untaken = {"sglang": {"priority", "input_ids"}, "trtllm": {"priority", "session_id", "prompt_cache_key"}}
    for endpoint, prompt in ((Endpoint.CHAT, CHAT), (Endpoint.COMPLETIONS, {"model": "m", "prompt": "hi"})):
        fields, lacking = fields_of({**prompt, **said}), untaken.get(usual_engine(connector.name), set())
        if "session_id" in lacking and endpoint is Endpoint.COMPLETIONS:
            lacking = lacking | {"cache_salt"}
        for leg in (
            connector.prefill_leg(endpoint, fields, pair, "p"),
            connector.decode_leg(endpoint, fields, pair, "d", None),
        ):
            assert said.keys() - msgspec.json.decode(leg.body).keys() == lacking


ALL = set(Endpoint)
CARRIED = {  # others: all of them
    "sglang": {Endpoint.CHAT, Endpoint.COMPLETIONS},
    "trtllm": {Endpoint.CHAT, Endpoint.COMPLETIONS},
    "trtllm_gen_first": {Endpoint.CHAT, Endpoint.COMPLETIONS},
    "p2p_nccl": ALL - {Endpoint.RESPONSES},
}


def test_each_splits_the_turns_that_its_legs_can_carry(connector: Connector) -> None:
    assert connector.endpoints == CARRIED.get(connector.name, ALL)


def test_a_key_is_another_one_each_time(connector: Connector) -> None:
    keys = [connector.new_key() for _ in range(50)]
    assert len(set(keys)) == (50 if any(keys) else 1)


def test_what_must_be_known_beforehand_is_for_legs_that_do_not_wait(connector: Connector) -> None:
    needed = [name for name, known in connector.coordinates.items() if known.needed_of]
    assert not (needed and connector.needs_handoff), "P's answer tells it"
    assert connector.order is LegOrder.P_THEN_D or not connector.needs_handoff


GARBAGE = [
    *(b"null", b"[]", b"{}", b'{"choices": [null]}', b'{"kv_transfer_params": 7}'),
    b'{"kv_transfer_params": {"transfer_id": "\xff"}}',
]


@given(st.binary() | st.sampled_from(GARBAGE))
def test_garbage_never_raises(body: bytes) -> None:
    worker = Worker(role=Role.PREFILL, address="10.0.0.5:8100")
    for connector in CONNECTORS.values():
        found = connector.handoff(body, Pair(worker, worker, "7"))
        assert isinstance(found, Handoff | NoHandoff)
        assert not isinstance(found, Finished)


COUNTING = [name for name, one in CONNECTORS.items() if not one.needs_handoff and name != "nixl_push"]


@pytest.mark.parametrize("name", COUNTING)
def test_numbers_that_json_lacks_hide_no_counts(name: str, make_pair: MakePair) -> None:
    answer = b'{"choices": [{"finish_reason": "length", "logprobs": NaN}], "usage": {"prompt_tokens": 90}}'
    assert CONNECTORS[name].handoff(answer, make_pair(connector=name)) == Handoff({}, 90, None)


@pytest.mark.parametrize("name", [name for name, one in CONNECTORS.items() if one.needs_handoff])
def test_an_answer_without_parameters_is_not_sent_on(name: str, make_pair: MakePair) -> None:
    connector = CONNECTORS[name]
    pair = make_pair(connector=connector.name, key=connector.new_key())
    for answer in ({}, {"kv_transfer_params": None}, {"choices": [{"finish_reason": "length"}]}):
        assert isinstance(connector.handoff(msgspec.json.encode(answer), pair), NoHandoff)


@pytest.mark.parametrize("name", ["nixl", "nixl_push", "mooncake", "moriio", "moriio_read", "trtllm"])
def test_an_answer_with_two_choices_is_not_sent_on(name: str, make_pair: MakePair) -> None:
    """Where D goes on with what P answered, or P's end of the transfer shows in it."""
    connector = CONNECTORS[name]
    pair = make_pair(connector=connector.name, key=connector.new_key())
    answer = {
        "choices": [{"index": index, "finish_reason": "length"} for index in (0, 1)],
        "kv_transfer_params": {"a": 1},
    }
    assert connector.handoff(msgspec.json.encode(answer), pair) == NoHandoff("choices_not_one")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"engine_version": ""}, True),
        ({"engine_version": "0.31.0"}, False),
        ({"connector": "none"}, False),
        ({"engine": "sim"}, False),
        ({"models": ("other",)}, False),
        ({"models": ("other", "m")}, True),
        ({"models": ()}, True),
    ],
)
def test_which_p_and_d_can_pair(changes: dict[str, Any], expected: bool) -> None:
    d = Worker(role=Role.DECODE, address="d:1", models=("m",), engine_version="0.33.0")
    assert can_pair(replace(d, role=Role.PREFILL, **changes), d) is expected
    assert can_pair(replace(d, role=Role.PREFILL), replace(d, **changes)) is expected
