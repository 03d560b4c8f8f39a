from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.connectors import CONNECTORS
from ppd.proxy.connectors.leg import Handoff, NoHandoff, Pair
from ppd.proxy.connectors.nixl import Nixl, handle_params, kept_s, reads_back
from ppd.proxy.fleet.worker import Role, Worker, WorkerId
from ppd.proxy.kv_events.block_tokens import packed
from ppd.proxy.openai.request import Endpoint, Fields
from ppd.proxy.readback.handles import Handle
from ppd.proxy.readback.lineage import digest_of

FieldsOf = Callable[[dict[str, Any]], Fields]
MakePair = Callable[..., Pair]

PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[17, 18, 19]],
    "remote_engine_id": "6f2e",
    "remote_request_id": "chatcmpl-abc-1a2b3c4d",
    "remote_host": "10.0.0.5",
    "remote_port": 5600,
    "tp_size": 2,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 734,
    "remote_blocks_expiry_time": None,
    "remote_registration_generation": 0,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 512,
}
USAGE = {"prompt_tokens": 734, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 500}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def answer(params: object = PARAMS, **members: Any) -> bytes:
    body = {"id": "chatcmpl-1", "choices": [], "usage": USAGE, "kv_transfer_params": params}
    return msgspec.json.encode({**body, **members})


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in PARAMS.items() if key != name}


def body_of(body: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(body)
    return decoded


def test_the_prefill_leg_asks_p_to_keep_the_blocks(fields_of: FieldsOf, make_pair: MakePair) -> None:
    fields = fields_of({**CHAT, "stream": True, "kv_transfer_params": {"remote_host": "evil"}})
    leg = Nixl().prefill_leg(Endpoint.CHAT, fields, make_pair(), "leg-1")
    assert leg.path == "/v1/chat/completions"
    assert leg.headers == {"X-Request-Id": "leg-1"}
    assert body_of(leg.body) == {
        **CHAT,
        "stream": False,
        "max_tokens": 1,
        "ignore_eos": True,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_the_prefill_leg_is_cut_for_the_version_of_p(fields_of: FieldsOf, make_pair: MakePair) -> None:
    fields = fields_of({**CHAT, "tool_choice": "required"})
    old = Nixl().prefill_leg(Endpoint.CHAT, fields, make_pair(version="0.18.0"), "leg-1")
    new = Nixl().prefill_leg(Endpoint.CHAT, fields, make_pair(version="0.33.0"), "leg-1")
    assert "tool_choice" not in body_of(old.body)
    assert body_of(new.body)["tool_choice"] == "required"


def test_the_decode_leg_is_the_clients_body_with_ps_parameters_as_they_came(
    fields_of: FieldsOf, make_pair: MakePair
) -> None:
    connector, pair = Nixl(), make_pair()
    handoff = connector.handoff(answer(), pair)
    assert isinstance(handoff, Handoff)
    fields = fields_of({**CHAT, "max_tokens": 64, "kv_transfer_params": {"remote_host": "evil"}})
    leg = connector.decode_leg(Endpoint.CHAT, fields, pair, "leg-2", handoff)
    assert leg.headers == {"X-Request-Id": "leg-2"}
    assert body_of(leg.body) == {**CHAT, "max_tokens": 64, "kv_transfer_params": PARAMS}
    plain = connector.decode_leg(Endpoint.CHAT, fields, pair, "leg-2", None)
    assert body_of(plain.body) == {**CHAT, "max_tokens": 64}


def test_a_handoff_says_what_it_covers(make_pair: MakePair) -> None:
    handoff = Nixl().handoff(answer(), make_pair())
    assert isinstance(handoff, Handoff)
    assert (handoff.tokens, handoff.cached_tokens) == (734, 512)


@pytest.mark.parametrize(
    ("params", "tokens", "cached_tokens"),
    [
        (without("remote_num_tokens"), 0, 512),
        (without("remote_prefill_cached_tokens"), 734, 500),
        ({**PARAMS, "remote_prefill_cached_tokens": None, "remote_num_tokens": "734"}, 0, 500),
        ({**PARAMS, "remote_prefill_cached_tokens": 0}, 734, 0),
        ({**PARAMS, "remote_prefill_cached_tokens": 2**31}, 734, 500),
    ],
)
def test_older_engines_leave_counts_out(
    params: dict[str, Any], tokens: int, cached_tokens: int, make_pair: MakePair
) -> None:
    handoff = Nixl().handoff(answer(params), make_pair())
    assert isinstance(handoff, Handoff)
    assert (handoff.tokens, handoff.cached_tokens) == (tokens, cached_tokens)


@pytest.mark.parametrize("blocks", [[[1]], [[], [4, 5]], [7, 8]])
def test_blocks_come_in_groups_or_flat(blocks: object, make_pair: MakePair) -> None:
    assert isinstance(Nixl().handoff(answer({**PARAMS, "remote_block_ids": blocks}), make_pair()), Handoff)


def test_a_parameter_that_nobody_here_can_read_goes_on_as_it_came(make_pair: MakePair) -> None:
    handoff = Nixl().handoff(answer({**PARAMS, "new": "?"}).replace(b"?", b"\xff"), make_pair())
    assert isinstance(handoff, Handoff)
    assert (bytes(handoff.params["new"]), handoff.tokens) == (b'"\xff"', 734)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "answer_undecodable"),
        (b"<html>", "answer_undecodable"),
        (b"[1]", "answer_undecodable"),
        (b"\xff\xfe", "answer_undecodable"),
        (b"[" * 100_000, "answer_undecodable"),
        (b'{"kv_transfer_params": "x"}', "answer_undecodable"),
        (answer(choices=[{"index": 0}, {"index": 1}]), "choices_not_one"),
        (b"{}", "params_missing"),
        (answer(None), "params_missing"),
        (answer({}), "params_missing"),
        (answer(without("do_remote_prefill")), "not_a_remote_prefill"),
        (answer({**PARAMS, "do_remote_prefill": False}), "not_a_remote_prefill"),
        (answer({**PARAMS, "do_remote_prefill": 1}), "not_a_remote_prefill"),
        (answer({**PARAMS, "transfer_mode": "push"}), "transfer_mode_not_pull"),
        (answer(without("remote_block_ids")), "remote_block_ids_empty"),
        (answer({**PARAMS, "remote_block_ids": None}), "remote_block_ids_empty"),
        (answer({**PARAMS, "remote_block_ids": []}), "remote_block_ids_empty"),
        (answer({**PARAMS, "remote_block_ids": [[], []]}), "remote_block_ids_empty"),
        (answer({**PARAMS, "remote_block_ids": ["17"]}), "remote_block_ids_empty"),
        (answer(without("remote_engine_id")), "remote_engine_id_missing"),
        (answer({**PARAMS, "remote_engine_id": ""}), "remote_engine_id_missing"),
        (answer(without("remote_request_id")), "remote_request_id_missing"),
        (answer(without("remote_host")), "remote_host_missing"),
        (answer({**PARAMS, "remote_host": None}), "remote_host_missing"),
        (answer({**PARAMS, "remote_host": 5}), "remote_host_invalid"),
        (answer(without("remote_port")), "remote_port_missing"),
        (answer({**PARAMS, "remote_port": "5600"}), "remote_port_invalid"),
        (answer({**PARAMS, "remote_port": True}), "remote_port_invalid"),
        (answer(without("tp_size")), "tp_size_missing"),
        (answer({**PARAMS, "tp_size": 1.5}), "tp_size_invalid"),
        (answer({**PARAMS, "remote_host": "?"}).replace(b"?", b"\xff"), "remote_host_missing"),
    ],
)
def test_an_incomplete_answer_is_no_handoff_and_says_why(body: bytes, reason: str, make_pair: MakePair) -> None:
    assert Nixl().handoff(body, make_pair()) == NoHandoff(reason)


@pytest.mark.parametrize(
    ("address", "host", "expected"),
    [
        ("10.0.0.5:8100", "localhost", "10.0.0.5"),
        ("10.0.0.5:8100", "127.0.0.1", "10.0.0.5"),
        ("gpu-1.lan:8100", "0.0.0.0", "gpu-1.lan"),
        ("[fd00::5]:8100", "::1", "fd00::5"),
        ("10.0.0.5:8100", "10.1.0.5", "10.1.0.5"),
        ("127.0.0.1:8100", "localhost", "localhost"),
        ("localhost:8100", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.2:8100", "localhost", "localhost"),
    ],
)
def test_a_host_that_only_p_can_reach_is_replaced(
    address: str, host: str, expected: str, make_pair: MakePair, fields_of: FieldsOf
) -> None:
    connector, pair = Nixl(), make_pair(address)
    handoff = connector.handoff(answer({**PARAMS, "remote_host": host}), pair)
    assert isinstance(handoff, Handoff)
    body = body_of(connector.decode_leg(Endpoint.CHAT, fields_of(CHAT), pair, "l", handoff).body)
    assert body["kv_transfer_params"] == {**PARAMS, "remote_host": expected}


def test_unknown_parameters_go_through_byte_for_byte(make_pair: MakePair, fields_of: FieldsOf) -> None:
    connector, pair = Nixl(), make_pair()
    own = b'"new_in_2030": {"x": 1.50, "big": 123456789012345678901234567890}'
    handoff = connector.handoff(answer()[:-2] + b"," + own + b"}}", pair)
    assert isinstance(handoff, Handoff)
    body = connector.decode_leg(Endpoint.CHAT, fields_of(CHAT), pair, "l", handoff).body
    assert b'"new_in_2030":{"x": 1.50, "big": 123456789012345678901234567890}' in body


@given(st.binary() | st.binary().map(lambda junk: answer()[:-1] + junk))
def test_garbage_never_raises(body: bytes) -> None:
    worker = Worker(role=Role.PREFILL, address="10.0.0.5:8100")
    assert isinstance(Nixl().handoff(body, Pair(worker, worker)), Handoff | NoHandoff)


def test_connectors_are_found_by_name() -> None:
    assert all(connector.name == name for name, connector in CONNECTORS.items())


# -- readback

OF_DECODE = {"do_remote_prefill": False, "do_remote_decode": True, "remote_blocks_expiry_time": 81234.5}
HANDLE_PARAMS = {**PARAMS, **OF_DECODE, "remote_block_ids": [[*range(47)]], "remote_num_tokens": 740}


def from_p(tokens: int, size: int = 16) -> Handoff:
    params = {"remote_block_ids": [[*range(-(-tokens // size))]], "remote_num_tokens": tokens}
    return Handoff({name: msgspec.Raw(msgspec.json.encode(value)) for name, value in params.items()}, tokens, 0)


FROM_P = from_p(730)
KNOWN = [5, 6, 7]
HANDLE = Handle(
    msgspec.json.encode(HANDLE_PARAMS), 3, digest_of(packed(KNOWN)), "m", WorkerId("10.0.0.9:8200"), "i", 100.0
)


def test_a_leg_that_reads_back_has_a_salt_of_its_own_and_asks_for_tokens(
    fields_of: FieldsOf, make_pair: MakePair
) -> None:
    members = {**CHAT, "cache_salt": "tenant", "session_id": "s", "return_token_ids": False}
    pair = msgspec.structs.replace(make_pair(), handle=HANDLE)
    body = body_of(Nixl().prefill_leg(Endpoint.CHAT, fields_of(members), pair, "leg-1").body)
    assert (body["cache_salt"], body["return_token_ids"], "session_id" in body) == ("leg-1", True, False)
    assert body["kv_transfer_params"] == HANDLE_PARAMS
    assert body["max_tokens"] == 1
    decode = body_of(Nixl().decode_leg(Endpoint.CHAT, fields_of(members), pair, "leg-2", None).body)
    assert decode == members


@pytest.mark.parametrize(
    ("said", "is_proven"),
    [
        ({"prompt_token_ids": [*KNOWN, 8]}, True),
        ({"choices": [{"prompt_token_ids": [*KNOWN, 8, 9]}]}, True),
        ({"prompt_token_ids": KNOWN}, False),  # then blocks are paired one off
        ({"prompt_token_ids": [5, 6, 8, 9]}, False),
        ({"prompt_token_ids": [*KNOWN, -1]}, False),
        ({"prompt_token_ids": None}, False),
        ({"prompt_token_ids": "567"}, False),
        ({"choices": [{}]}, False),
        ({}, False),
    ],
)
def test_p_hands_over_only_what_its_own_tokens_prove(
    make_pair: MakePair, said: dict[str, Any], is_proven: bool
) -> None:
    pair = msgspec.structs.replace(make_pair(), handle=HANDLE)
    found = Nixl().handoff(answer(**said), pair)
    assert isinstance(found, Handoff) if is_proven else found == NoHandoff("not_a_prefix")
    assert isinstance(Nixl().handoff(answer(**said), make_pair()), Handoff), "without a handle nothing is to be proven"


def test_what_was_read_back_counts_as_cached(make_pair: MakePair) -> None:
    pair = msgspec.structs.replace(make_pair(), handle=HANDLE)
    for hits, expected in ((0, 500), (600, 600), (None, 500)):
        params = {**PARAMS, "remote_prefill_cached_tokens": hits}
        found = Nixl().handoff(answer(params, prompt_token_ids=[*KNOWN, 8]), pair)
        assert isinstance(found, Handoff)
        assert found.cached_tokens == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"do_remote_decode": False},
        {"do_remote_prefill": True},
        {"do_remote_prefill": None},
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_engine_id": None},
        {"remote_request_id": 7},
        {"remote_host": ""},
        {"remote_port": "5600"},
        {"tp_size": None},
        {"transfer_mode": "push"},
        {"remote_block_ids": [[*range(48)]]},  # one more, for tokens that were only guessed
        {"remote_block_ids": [[*range(46)]]},
        {"remote_block_ids": [*range(47)]},  # of a release that has no handles
        {"remote_block_ids": [[*range(47)], [*range(8)]]},  # of two kinds of cache
        {"remote_num_tokens": None},
        {"remote_num_tokens": 0},
        {"remote_num_tokens": "740"},
    ],
)
def test_a_handle_that_would_hang_p_or_pair_other_blocks_is_not_kept(changes: dict[str, Any]) -> None:
    d = Worker(role=Role.DECODE, address="10.0.0.9:8200")
    assert handle_params(msgspec.json.encode(HANDLE_PARAMS), d, FROM_P) is not None
    assert handle_params(msgspec.json.encode(HANDLE_PARAMS | changes), d, FROM_P) is None


@given(st.sampled_from((8, 16, 32, 64, 128)), st.integers(64, 4000), st.integers(1, 600), st.integers(-2, 2))
def test_no_block_too_many_or_few_goes_unnoticed(size: int, prompt: int, answer: int, off: int) -> None:
    """Of a prompt in one block several sizes are possible, so nothing of it is kept."""
    tokens = prompt + answer
    changes = {"remote_block_ids": [[*range(-(-tokens // size) + off)]], "remote_num_tokens": tokens}
    found = handle_params(
        msgspec.json.encode(HANDLE_PARAMS | changes), Worker(role=Role.DECODE, address="d:1"), from_p(prompt, size)
    )
    assert (found is not None) is (off == 0 and prompt > size)


def test_a_handle_names_d_as_the_proxy_reaches_it() -> None:
    told = msgspec.json.encode({**HANDLE_PARAMS, "remote_host": "localhost", "of_a_newer_release": [1]})
    found = handle_params(told, Worker(role=Role.DECODE, address="10.0.0.9:8200"), FROM_P)
    assert found is not None
    assert body_of(found) == {**HANDLE_PARAMS, "remote_host": "10.0.0.9", "of_a_newer_release": [1]}
    for wrong in (b"", b"[1]", b"{", b"\xff"):
        assert handle_params(wrong, Worker(role=Role.DECODE, address="10.0.0.9:8200"), FROM_P) is None


def test_workers_say_that_they_can_and_for_how_long_they_keep_kv() -> None:
    plain = Worker(role=Role.DECODE, address="d:1")
    told = Worker(
        role=Role.DECODE,
        address="d:1",
        coordinates={"bidirectional_kv_xfer": "true", "decoder_kv_blocks_ttl": "60"},
    )
    assert (reads_back(plain), reads_back(told)) == (False, True)
    assert (kept_s(plain), kept_s(told)) == (480, 60)
    assert not reads_back(Worker(role=Role.DECODE, address="d:1", connector="none", coordinates=told.coordinates))
