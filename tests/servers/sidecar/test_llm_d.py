"""Our sidecar beside llm-d's, as `tests/data/llm_d` has recorded that; each difference is named here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ppd.servers.sidecar.failed_legs import FailurePolicy, OnFailure
from tests.servers.sidecar.llm_d.exchange import Script, play
from tests.servers.sidecar.llm_d.scripts import SCRIPTS
from tests.servers.sidecar.sidecars import running_sidecar

FOLDER = Path(__file__).parents[2] / "data/llm_d"
EXCHANGES: dict[str, Any] = {
    file.stem.removeprefix("sidecar_"): json.loads(file.read_text()) for file in FOLDER.glob("sidecar_*.json")
}
CONNECTORS = {"nixlv2": "nixl", "shared-storage": "none", "sglang": "sglang", "offloading": "offload_p2p"}
P2P_PORT = "7777"

# Of headers. llm-d passes on all that the client and Envoy have sent, under the sidecar's own name, and adds an id to
# that of Envoy, of which engines read the first: both legs, and all attempts, have one id. Here only what engines need
# goes on, and each leg has an id of its own, which begins as Envoy's does. What is no turn keeps all of them here too.
OF_THIS_HOP = {"accept-encoding", "host", "user-agent", "x-forwarded-for"}
KEPT_BACK = {"x-forwarded-proto", "x-gateway-destination-endpoint"}
ADDED_HERE = {"x-ppd-hops"}
ADDED_TO_E = {"accept", "authorization", "traceparent"}  # an E may ask for the key too, and belongs to the trace

# Of P's body. It is asked for one token: llm-d says so in all ways, whether or not the client knows them, and that
# `min_tokens` is 1; here the client's own limit is set, and what it left out stays out. Its token is thrown away, so it
# need not be another one than the end; and D's answer is the one to keep.
ONLY_THE_CLIENTS = ("max_completion_tokens", "stream", "cache_hit_threshold")
P_IS_ALSO_TOLD: Mapping[str, Mapping[str, Any]] = {
    "messages": {},
    "responses": {"ignore_eos": True, "store": False},
    "chat_sglang": {"stream": False},  # it samples the first token, so it gets what D does
    "chat_store_threshold": {"ignore_eos": True},
}
NOT_FOR_E = ("temperature",)  # of the client's body it gets what its work needs

# Of turns that go another way. llm-d's answer to a failed E is 502; where a client says `cache_hit_threshold` it asks D
# first; and it says that it is well whatever its engine says.
ALSO_ASKED = {"chat_e_fails": {"P", "D"}, "chat_store_threshold": {"P"}, "health": {"D"}}

# Of answers: errors have OpenAI's shape, and no 4xx says that a client has done what P did.
ERRORS = {"chat_p_is_gone": 502, "chat_p_answers_no_json": 502, "chat_d_is_gone": 503, "chat_not_json": 400}
# `cached_tokens` is P's own count wherever P has computed the prompt, with every connector and in each API's words;
# llm-d gives it by one connector, and in the words of one API, also where D computed the prompt or counts nothing.
CACHED = {
    "chat_store": 32,
    "chat_store_threshold": 32,
    "chat_offloading": 32,
    "chat_sglang": 0,
    "chat_p_hands_nothing_over": 39,
    "chat_d_counts_nothing": None,
}


@asynccontextmanager
async def ours(script: Script, engine: str, addresses: Mapping[str, str]) -> AsyncIterator[str]:
    """Our sidecar, told what these flags tell llm-d's. P that fail are errors to llm-d."""
    flags = dict(flag.removeprefix("--").split("=") for flag in script.flags)
    connector, retries = CONNECTORS[flags["kv-connector"]], int(flags.get("prefill-max-retries", 0))
    policy = FailurePolicy(OnFailure.RETRY if retries else OnFailure.ERROR, retries)
    told = {addresses["<P>"]: {"p2p_port": P2P_PORT}} if connector == "offload_p2p" else {}

    async def pause(_: float) -> None:
        pass

    async with running_sidecar(engine, connector=connector, policy=policy, prefills=told, pause=pause) as made:
        yield made.address


def unnamed(body: Any) -> Any:
    """Without the names that media get here on every leg."""
    if isinstance(body, dict):
        return {name: unnamed(value) for name, value in body.items() if name != "uuid"}
    return [unnamed(each) for each in body] if isinstance(body, list) else body


def expected_body(name: str, engine: str, body: Any, exchange: Mapping[str, Any]) -> Any:
    """What our sidecar sends where llm-d's sent this body."""
    if not isinstance(body, dict):
        return body
    given = exchange["request"]["body"]
    if engine[0] == "E":
        return {key: value for key, value in body.items() if key not in NOT_FOR_E}
    kept = {key: value for key, value in body.items() if key not in ONLY_THE_CLIENTS or key in given}
    if "seed" in given:
        kept["seed"] = given["seed"]  # llm-d reads it as a number with a fraction, and another one goes on
    if engine == "P":
        kept.pop("min_tokens", None)
        kept |= P_IS_ALSO_TOLD.get(name, {"ignore_eos": True})
    elif "P" in exchange["engines"]:
        kept.pop("ec_transfer_params", None)  # they are for whoever computes the prompt
        if kept.get("kv_transfer_params", "") is None:
            del kept["kv_transfer_params"]
        if given.get("stream") and "stream_options" not in given:
            kept["stream_options"] = {"include_usage": True}  # for the sidecar; the client does not see it
    elif "kv_transfer_params" in given:
        del kept["kv_transfer_params"]  # no client may say where KV lies
    return kept


def assert_leg(name: str, engine: str, leg: Mapping[str, Any], exchange: Mapping[str, Any], number: int) -> None:
    recorded = exchange["engines"][engine]["asked"][number]
    assert (leg["method"], leg["path"]) == (recorded["method"], recorded["path"])
    assert unnamed(leg["body"]) == expected_body(name, engine, recorded["body"], exchange)
    is_turn = leg["method"] == "POST"
    apart = OF_THIS_HOP | ADDED_HERE | ((KEPT_BACK | {"x-request-id"}) if is_turn else set())
    apart |= ADDED_TO_E if engine[0] == "E" else set()
    headers, theirs = leg["headers"], recorded["headers"]
    assert {key: headers[key] for key in headers.keys() - apart} == {key: theirs[key] for key in theirs.keys() - apart}
    if is_turn:
        assert headers["x-request-id"].startswith("gateway-1-")
        assert not headers.keys() & KEPT_BACK


def expected_answer(name: str, exchange: Mapping[str, Any]) -> Any:
    told = exchange["answer"]["body"]
    if name == "health":
        return {}  # the engine's
    if name == "chat_e_fails":
        return EXCHANGES["chat"]["answer"]["body"]  # as if it had not been asked
    usage = told.get("usage") if isinstance(told, dict) else None
    if name == "responses":
        told["usage"] = {**without_details(usage), "input_tokens_details": {"cached_tokens": 32}}
    elif name == "messages":
        told["usage"] = {**without_details(usage), "input_tokens": 8, "cache_read_input_tokens": 32}
    elif name in CACHED:
        cached = CACHED[name]
        told["usage"]["prompt_tokens_details"] = None if cached is None else {"cached_tokens": cached}
    return told


def without_details(usage: Any) -> dict[str, Any]:
    """Without the chat's word for what another API has another one for."""
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


def test_the_recordings_are_of_these_scripts() -> None:
    played = {name: json.loads(json.dumps([script.request, script.flags])) for name, script in SCRIPTS.items()}
    assert {name: [found["request"], found["sidecar"]] for name, found in EXCHANGES.items()} == played


@pytest.mark.parametrize("name", sorted(EXCHANGES))
async def test_the_legs_are_those_of_llm_ds_sidecar(name: str) -> None:
    exchange = EXCHANGES[name]
    script = Script.of(exchange)
    played = await play(script, lambda engine, addresses: ours(script, engine, addresses))
    for engine, told in exchange["engines"].items():
        asked = played["engines"][engine]["asked"]
        assert len(asked) == len(told["asked"]) + (engine in ALSO_ASKED.get(name, ())), engine
        for number, leg in enumerate(asked[: len(told["asked"])]):
            assert_leg(name, engine, leg, exchange, number)
    answer = played["answer"]
    if name in ERRORS:
        assert (answer["status"], answer["body"]["error"]["code"]) == (ERRORS[name], ERRORS[name])
    else:
        assert answer["status"] == (200 if name in ALSO_ASKED else exchange["answer"]["status"])
        assert answer["body"] == expected_answer(name, exchange)
