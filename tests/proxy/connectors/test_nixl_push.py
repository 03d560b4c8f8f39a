from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ppd.proxy.connectors import can_pair, missing_coordinates
from ppd.proxy.connectors.leg import Handoff, NoHandoff, Pair
from ppd.proxy.connectors.nixl_push import NixlPush
from ppd.proxy.openai.body_members import Edited, encoded
from ppd.proxy.openai.request import Endpoint, Fields

FieldsOf = Callable[[dict[str, Any]], Fields]
MakePair = Callable[..., Pair]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
KEY = "0d9bb1a0-3ff0-4b6c-9f7e-2d7a1f0c5a11"
ASK = {"do_remote_decode": True, "do_remote_prefill": False}


def d_params(fields: Fields, pair: Pair) -> dict[str, Any]:
    leg = NixlPush().decode_leg(Endpoint.CHAT, fields, pair, "leg-d", None)
    assert leg.headers == {"X-Request-Id": KEY}
    body = msgspec.json.decode(leg.body)
    params: dict[str, Any] = body.pop("kv_transfer_params")
    assert body == CHAT
    return params


@pytest.mark.parametrize(
    ("told", "address", "where"),
    [
        ({}, "10.0.0.5:8100", ("10.0.0.5", 5600, 1, 1)),
        ({"side_channel_port": "5601", "tp_size": "4", "pp_size": "2"}, "[::1]:8100", ("::1", 5601, 4, 2)),
        ({"side_channel_host": "10.9.9.9"}, "10.0.0.5:8100", ("10.9.9.9", 5600, 1, 1)),
    ],
)
def test_d_is_told_what_ps_answer_would_say(
    fields_of: FieldsOf, make_pair: MakePair, told: dict[str, str], address: str, where: tuple[str, int, int, int]
) -> None:
    pair = make_pair(address, connector="nixl_push", key=KEY, of_prefill={"engine_id": "prefill-001", **told})
    fields = fields_of({**CHAT, "kv_transfer_params": {"remote_host": "evil"}})
    assert d_params(fields, pair) == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "prefill-001",
        **dict(zip(("remote_host", "remote_port", "tp_size", "pp_size"), where, strict=True)),
        "remote_request_id": KEY,
    }


def test_p_is_asked_for_one_token_under_the_same_id(fields_of: FieldsOf, make_pair: MakePair) -> None:
    pair = make_pair(connector="nixl_push", key=KEY, of_prefill={"engine_id": "e"})
    leg = NixlPush().prefill_leg(Endpoint.CHAT, fields_of(CHAT), pair, "leg-p")
    body = msgspec.json.decode(leg.body)
    assert leg.headers == {"X-Request-Id": KEY}
    assert (body["max_tokens"], body["ignore_eos"]) == (1, True)
    assert {name: body["kv_transfer_params"][name] for name in ASK} == ASK


def test_a_key_is_an_id_that_no_other_request_has() -> None:
    keys = {uuid.UUID(NixlPush().new_key()) for _ in range(100)}
    assert len(keys) == 100


@pytest.mark.parametrize(("told", "missing"), [({}, ("engine_id",)), ({"engine_id": "e"}, ())])
def test_ps_engine_id_must_be_known(make_pair: MakePair, told: dict[str, str], missing: tuple[str, ...]) -> None:
    pair = make_pair(connector="nixl_push", of_prefill=told)
    assert missing_coordinates(pair.prefill) == missing
    assert missing_coordinates(pair.decode) == ()
    assert can_pair(pair.prefill, pair.decode) is (not missing)


PARAMS = {"remote_block_ids": [[1, 2]], "transfer_mode": "push"}


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (PARAMS, None),
        ({"remote_block_ids": [[1, 2]]}, None),
        (None, "params_missing"),
        ({}, "params_missing"),
        ({**PARAMS, "transfer_mode": "pull"}, "transfer_mode_not_push"),
        ({**PARAMS, "remote_block_ids": [[], []]}, "remote_block_ids_empty"),
        ({"transfer_mode": "push"}, "remote_block_ids_empty"),
        ([7], "answer_undecodable"),
    ],
)
def test_p_must_say_that_there_is_something_to_write(make_pair: MakePair, params: Any, reason: str | None) -> None:
    answer = msgspec.json.encode({"usage": {"prompt_tokens": 90}, "kv_transfer_params": params})
    assert NixlPush().handoff(answer, make_pair()) == (NoHandoff(reason) if reason else Handoff({}, 90, None))


RESPONSE = {"model": "m", "input": "hi", "request_id": "mine"}


@pytest.mark.parametrize("own", [None, "resp_a_tenants"])
def test_both_legs_of_a_response_have_one_name_in_the_body(
    fields_of: FieldsOf, make_pair: MakePair, own: str | None
) -> None:
    """vLLM's /v1/responses reads no header."""
    pair = make_pair(connector="nixl_push", key=KEY, of_prefill={"engine_id": "e"})
    fields = fields_of(RESPONSE)
    if own is not None:
        fields = Edited.of(fields, {}, {"request_id": encoded(own)})
    to_p = msgspec.json.decode(NixlPush().prefill_leg(Endpoint.RESPONSES, fields, pair, "p").body)
    to_d = msgspec.json.decode(NixlPush().decode_leg(Endpoint.RESPONSES, fields, pair, "d", None).body)
    assert to_p["request_id"] == to_d["request_id"] == (own or f"resp_{KEY}")
    assert to_d["kv_transfer_params"]["remote_request_id"] == to_d["request_id"]
