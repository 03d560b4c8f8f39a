"""Connectors whose engines find KV by its content: LMCache, and peers of vLLM's offloading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ppd.proxy.connectors import missing_coordinates
from ppd.proxy.connectors.leg import Handoff, Pair
from ppd.proxy.connectors.lmcache import LMCache
from ppd.proxy.connectors.offload_p2p import OffloadP2p
from ppd.proxy.discovery.heartbeat import check_coordinates
from ppd.proxy.errors import FormatError
from ppd.proxy.openai.request import Endpoint, Fields

FieldsOf = Callable[[dict[str, Any]], Fields]
MakePair = Callable[..., Pair]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
PORTS = {"receiver_init_port": "7300", "receiver_alloc_port": "7400"}
SPEC = {"req_id": "k", "receiver_host": "10.0.0.9", "receiver_init_port": [7300], "receiver_alloc_port": [7400]}


@pytest.mark.parametrize(
    ("of_decode", "params"),
    [
        ({}, None),
        ({"receiver_init_port": "7300"}, None),
        (PORTS, {"disagg_spec": SPEC}),
        (
            {"receiver_init_port": "7300+7301", "receiver_alloc_port": "7400+7401"},
            {
                "disagg_spec": {
                    **SPEC,
                    "receiver_init_port": [7300, 7301],
                    "receiver_alloc_port": [7400, 7401],
                }
            },
        ),
        ({**PORTS, "receiver_host": "d"}, {"disagg_spec": {**SPEC, "receiver_host": "d"}}),
    ],
)
def test_p_is_told_where_d_receives_if_that_is_known(
    fields_of: FieldsOf, make_pair: MakePair, of_decode: dict[str, str], params: Any
) -> None:
    pair = make_pair(key="k", of_decode=of_decode)
    p = msgspec.json.decode(LMCache().prefill_leg(Endpoint.CHAT, fields_of(CHAT), pair, "p").body)
    assert (p.get("kv_transfer_params"), p["max_tokens"]) == (params, 1)
    found = LMCache().handoff(b'{"kv_transfer_params": {"first_tok": 7}, "usage": {"prompt_tokens": 90}}', pair)
    assert found == Handoff({}, 90, None)
    d = LMCache().decode_leg(Endpoint.CHAT, fields_of(CHAT), pair, "d", found)
    assert msgspec.json.decode(d.body) == CHAT


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        ({}, ""),
        (PORTS, ""),
        ({"receiver_init_port": "1+2", "receiver_alloc_port": "3+4"}, ""),
        ({"receiver_init_port": "7300"}, "as many ports"),
        ({"receiver_alloc_port": "7300"}, "as many ports"),
        ({"receiver_init_port": "1+2", "receiver_alloc_port": "3"}, "as many ports"),
        ({**PORTS, "receiver_init_port": "7300+"}, "must be a port, or one of each rank"),
        ({**PORTS, "receiver_init_port": "7300+70000"}, "must be a port, or one of each rank"),
        ({**PORTS, "receiver_init_port": "7300,7301"}, "must be a port, or one of each rank"),
        ({**PORTS, "receiver_init_port": "+".join(["1"] * 65)}, "must be a port, or one of each rank"),
    ],
)
def test_a_d_that_tells_only_some_of_its_ports_is_named(told: dict[str, str], complaint: str) -> None:
    if not complaint:
        assert check_coordinates(told, "lmcache") == told
        return
    with pytest.raises(FormatError, match=complaint):
        check_coordinates(told, "lmcache")


@pytest.mark.parametrize("d_tells", [False, True])
def test_d_asks_p_for_its_blocks_and_p_asks_d_where_it_may(
    fields_of: FieldsOf, make_pair: MakePair, d_tells: bool
) -> None:
    of_decode = {"p2p_host": "d", "p2p_port": "5711"} if d_tells else {}
    pair = make_pair(key="k", of_prefill={"p2p_port": "5710"}, of_decode=of_decode)
    p, d = (
        msgspec.json.decode(leg.body)["kv_transfer_params"]
        for leg in (
            OffloadP2p().prefill_leg(Endpoint.CHAT, fields_of(CHAT), pair, "p"),
            OffloadP2p().decode_leg(Endpoint.CHAT, fields_of(CHAT), pair, "d", None),
        )
    )
    assert d == {"remote_prefiller": {"kv_request_id": "k", "remote_host": "10.0.0.5", "remote_port": 5710}}
    source = {"remote_kv_source": {"kv_request_id": "k-source", "remote_host": "d", "remote_port": 5711}}
    assert p == {"remote_decoder": {"kv_request_id": "k"}} | (source if d_tells else {})


def test_a_p_that_has_not_told_its_p2p_port_serves_no_split(make_pair: MakePair) -> None:
    assert missing_coordinates(make_pair(connector="offload_p2p").prefill) == ("p2p_port",)
