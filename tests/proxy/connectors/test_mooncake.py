from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ppd.proxy.connectors import Connector, can_pair, missing_coordinates
from ppd.proxy.connectors.leg import Handoff, NoHandoff, Pair
from ppd.proxy.connectors.mooncake import Mooncake, engine_ids, query_url
from ppd.proxy.connectors.moriio import MoRIIO
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.openai.request import Endpoint, Fields

FieldsOf = Callable[[dict[str, Any]], Fields]
MakePair = Callable[..., Pair]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stop": ["x"]}
KEY = "xfer-0d9bb1a0-3ff0-4b6c-9f7e-2d7a00000001"
TWO_RANKS = {"engine_id": "e0", "engine_id.1": "e1"}


def legs(fields: Fields, pair: Pair) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """P's and D's transfer parameters, and P's headers."""
    p = Mooncake().prefill_leg(Endpoint.CHAT, fields, pair, "leg-p")
    d = Mooncake().decode_leg(Endpoint.CHAT, fields, pair, "leg-d", None)
    bodies = [msgspec.json.decode(leg.body) for leg in (p, d)]
    assert (bodies[0]["max_tokens"], bodies[0]["ignore_eos"], "stop" in bodies[0]) == (1, True, False)
    assert (d.headers, bodies[1]["max_tokens"]) == ({"X-Request-Id": "leg-d"}, 9)
    return bodies[0]["kv_transfer_params"], bodies[1]["kv_transfer_params"], p.headers


@pytest.mark.parametrize(
    ("told", "key", "rank", "engine", "where"),
    [
        ({"engine_id": "e0"}, KEY, "0", "e0", "http://10.0.0.5:8998"),
        (TWO_RANKS, KEY, "1", "e1", "http://10.0.0.5:8998"),
        (TWO_RANKS, KEY[:-1] + "2", "0", "e0", "http://10.0.0.5:8998"),
        ({"engine_id": "e0", "bootstrap_host": "[::1]", "bootstrap_port": "9"}, KEY, "0", "e0", "http://[::1]:9"),
    ],
)
def test_both_legs_name_one_transfer_and_one_rank(
    fields_of: FieldsOf, make_pair: MakePair, told: dict[str, str], key: str, rank: str, engine: str, where: str
) -> None:
    p, d, headers = legs(fields_of(CHAT), make_pair(connector="mooncake", key=key, of_prefill=told))
    assert p == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": key}
    assert headers == {"X-Request-Id": "leg-p", "X-data-parallel-rank": rank}
    assert d == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": where,
        "remote_engine_id": engine,
        "transfer_id": key,
    }


def test_a_key_is_another_one_each_time() -> None:
    keys = {Mooncake().new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"xfer-[0-9a-f-]{36}", key) for key in keys)


def test_until_ps_engine_has_told_its_id_it_serves_no_split(make_pair: MakePair) -> None:
    pair = make_pair(connector="mooncake")
    assert missing_coordinates(pair.prefill) == ("engine_id",)
    assert not can_pair(pair.prefill, pair.decode)
    assert can_pair(replace(pair.prefill, coordinates=TWO_RANKS), pair.decode)


@pytest.mark.parametrize(
    ("changes", "url"),
    [
        ({}, "http://10.0.0.5:8998/query"),
        ({"coordinates": {"bootstrap_port": "9"}}, "http://10.0.0.5:9/query"),
        ({"coordinates": {"engine_id": "pinned"}}, ""),
        ({"role": Role.DECODE}, ""),
        ({"connector": "nixl"}, ""),
    ],
)
def test_only_a_p_that_has_not_told_its_engine_is_asked(changes: dict[str, Any], url: str) -> None:
    worker = Worker(role=Role.PREFILL, address="10.0.0.5:8100", connector="mooncake")
    assert query_url(replace(worker, **changes)) == url


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b'{"0": {"engine_id": "e0", "worker_addr": {"0": {"0": "tcp://h:1"}}}}', {"engine_id": "e0"}),
        (b'{"1": {"engine_id": "e1"}, "0": {"engine_id": "e0"}}', TWO_RANKS),
        (b'{"0": {"engine_id": "e0"}, "2": {"engine_id": "e2"}}', {"engine_id": "e0"}),
        (b'{"1": {"engine_id": "e1"}}', {}),
        (b'{"0": {"engine_id": ""}}', {}),
        (b'{"0": {"engine_id": "a\\r\\nb"}}', {}),
        (b'{"0": {}}', {}),
        (b"[]", {}),
        (b"junk", {}),
        (b"", {}),
    ],
)
def test_what_a_bootstrap_server_says(answer: bytes, found: dict[str, str]) -> None:
    assert engine_ids(answer) == found


def test_an_answer_with_very_many_ranks_is_cut() -> None:
    answer = msgspec.json.encode({str(rank): {"engine_id": f"e{rank}"} for rank in range(1000)})
    assert len(engine_ids(answer)) == 16


ENDED: list[tuple[Any, bool]] = [
    ({"choices": [{"finish_reason": "length"}]}, True),
    ({"choices": [{"finish_reason": "stop"}]}, False),
    ({"choices": [{"finish_reason": None}]}, False),
    ({"choices": [], "stop_reason": None}, False),
    ({"stop_reason": "max_tokens"}, True),
    ({"stop_reason": "end_turn"}, False),
    ({"stop_reason": "stop_sequence"}, False),
    ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, True),
    ({"status": "completed", "incomplete_details": None}, False),
    ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, False),
    ({}, False),
]


@pytest.mark.parametrize("connector", [Mooncake(), MoRIIO()])
@pytest.mark.parametrize(("answer", "has_kv"), ENDED)
def test_p_hands_over_only_what_ends_for_its_length(
    make_pair: MakePair, connector: Connector, answer: Any, has_kv: bool
) -> None:
    found = connector.handoff(msgspec.json.encode({**answer, "usage": {"prompt_tokens": 90}}), make_pair())
    assert found == (Handoff({}, 90, None) if has_kv else NoHandoff("not_ended_by_length"))


@pytest.mark.parametrize("answer", [b"", b"null", b"[" * 5000, b'{"choices": 7}', b'{"choices": [null]}'])
def test_an_answer_that_is_none_hands_nothing_over(make_pair: MakePair, answer: bytes) -> None:
    assert Mooncake().handoff(answer, make_pair()) == NoHandoff("answer_undecodable")
