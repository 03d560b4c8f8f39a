from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ppd.proxy.connectors.leg import Handoff, NoHandoff, Pair
from ppd.proxy.connectors.moriio import MoRIIO, MoRIIORead, told_by_ping
from ppd.proxy.openai.request import Endpoint, Fields

FieldsOf = Callable[[dict[str, Any]], Fields]
MakePair = Callable[..., Pair]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stop": ["x"]}
KEY = "0a" * 15 + "05"
OF_P = {"side_channel_host": "p", "handshake_port": "1", "notify_port": "2", "dp_size": "4", "tp_size": "8"}
BLOCKS = {"transfer_id": f"tx-{KEY}", "remote_engine_id": "e", "remote_block_ids": [[1, 2]], "tp_size": 8}


def params_and_headers(leg: Any) -> tuple[dict[str, Any], dict[str, str]]:
    return msgspec.json.decode(leg.body)["kv_transfer_params"], leg.headers


@pytest.mark.parametrize(
    ("of_decode", "at"),
    [
        ({}, ("10.0.0.9", 6301, 61005)),
        ({"side_channel_host": "d", "handshake_port": "3", "notify_port": "4"}, ("d", 3, 4)),
    ],
)
def test_written_both_legs_name_one_transfer_one_rank_and_where_the_other_is(
    fields_of: FieldsOf, make_pair: MakePair, of_decode: dict[str, str], at: tuple[str, int, int]
) -> None:
    pair = make_pair(key=KEY, of_prefill=OF_P, of_decode=of_decode)
    p, p_headers = params_and_headers(MoRIIO().prefill_leg(Endpoint.CHAT, fields_of(CHAT), pair, "p"))
    d, d_headers = params_and_headers(MoRIIO().decode_leg(Endpoint.CHAT, fields_of(CHAT), pair, "d", None))
    rank = int(KEY[-8:], 16) % 4
    assert p_headers == {"X-Request-Id": "p", "X-data-parallel-rank": str(rank)}
    assert d_headers == {"X-Request-Id": "d"}
    assert p == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": f"tx-{KEY}",
        **dict(zip(("remote_host", "remote_handshake_port", "remote_notify_port"), at, strict=True)),
        "remote_dp_size": 1,
        "remote_tp_size": 1,
    }
    assert d == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": f"tx-{KEY}",
        "remote_host": "p",
        "remote_handshake_port": 1,
        "remote_notify_port": 2,
        "remote_dp_size": 4,
        "remote_tp_size": 8,
        "remote_dp_rank": rank,
    }


def test_read_d_is_also_told_what_p_answered(fields_of: FieldsOf, make_pair: MakePair) -> None:
    pair = make_pair(key=KEY, of_prefill=OF_P)
    answer = {"kv_transfer_params": BLOCKS | {"remote_host": "elsewhere"}, "usage": {"prompt_tokens": 90}}
    found = MoRIIORead().handoff(msgspec.json.encode(answer), pair)
    assert isinstance(found, Handoff)
    assert found.tokens == 90
    with_another = Pair(pair.prefill, make_pair(of_decode={"side_channel_host": "d2"}).decode)  # as one that frees it
    d, headers = params_and_headers(MoRIIORead().decode_leg(Endpoint.CHAT, fields_of(CHAT), with_another, "d", found))
    assert d.items() >= BLOCKS.items()
    assert (d["remote_host"], headers) == ("p", {"X-Request-Id": "d"}), "P's address is as the proxy knows it"
    plain = MoRIIORead().decode_leg(Endpoint.CHAT, fields_of(CHAT), pair, "d", None)
    assert (msgspec.json.decode(plain.body), plain.headers) == (CHAT, {"X-Request-Id": "d"})


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (None, "params_missing"),
        ({}, "params_missing"),
        ([], "params_incomplete"),
        (BLOCKS | {"remote_engine_id": ""}, "remote_engine_id_missing"),
        (BLOCKS | {"remote_block_ids": [[]]}, "remote_block_ids_empty"),
        (BLOCKS | {"remote_block_ids": ["x"]}, "params_incomplete"),
        (BLOCKS | {"transfer_id": "tx-another"}, "another_request"),
        ({name: value for name, value in BLOCKS.items() if name != "tp_size"}, "params_incomplete"),
    ],
)
def test_an_answer_that_d_could_not_use_is_refused_by_name(make_pair: MakePair, params: Any, reason: str) -> None:
    answer = msgspec.json.encode({"kv_transfer_params": params})
    assert MoRIIORead().handoff(answer, make_pair(key=KEY)) == NoHandoff(reason)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        (
            "host:10.0.0.5,handshake:6301,notify:61005",
            {"side_channel_host": "10.0.0.5", "handshake_port": "6301", "notify_port": "61005"},
        ),
        ("10.0.0.5:6301", None),
        ("host:,handshake:1,notify:2", None),
    ],
)
def test_the_address_in_a_ping(address: str, told: dict[str, str] | None) -> None:
    assert told_by_ping(address) == told
