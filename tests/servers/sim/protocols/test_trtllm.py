from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, Faults, Order

HI = [{"role": "user", "content": "Tell me about the sea and the ships on it, at some length."}]
OTHER = [{"role": "user", "content": "Tell me about the sky and the birds in it, at some length."}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
new_id = itertools.count(2**52).__next__


async def start(lab: Any, **settings: Any) -> tuple[Any, Any]:
    both = {"connector": "trtllm", "meeting_timeout_s": 5.0} | settings
    return await lab.start("P", **both), await lab.start("D", **both)


async def context(lab: Any, p: Any, messages: Any = HI, *, request_id: int = 0, **asked: Any) -> Any:
    params = {"request_type": "context_only", "disagg_request_id": request_id or new_id()}
    return await lab.chat(p, messages, disaggregated_params=params, **asked)


def generation(answer: Any, **change: Any) -> dict[str, Any]:
    """D's members from P's answer, as TensorRT-LLM's own orchestrator makes them."""
    body = answer.json
    params = body["choices"][0]["disaggregated_params"] | {"request_type": "generation_only"}
    params |= {"ctx_usage": body["usage"]} | change
    return {"disaggregated_params": params, "prompt_token_ids": body["prompt_token_ids"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_d_answers_from_ps_kv(lab: Any, stream: bool) -> None:
    p, d = await start(lab)
    from_p = await context(lab, p, max_tokens=40)
    assert (from_p.status, from_p.json["choices"][0]["finish_reason"], p.pinned) == (200, "length", 1)
    from_d = await lab.chat(d, HI, stream=stream, **generation(from_p))
    assert from_d.text == await lab.expected(HI)
    assert (d.counters.external_kv_tokens, d.counters.local_compute_tokens) == (d.counters.prompt_tokens, 0)
    assert lab.is_quiet(p) and lab.is_quiet(d)
    assert not p.counters.traps and not d.counters.traps


async def test_ds_prompt_is_the_token_ids(lab: Any) -> None:
    p, d = await start(lab)
    fields = generation(await context(lab, p))
    assert (await lab.chat(d, [], **fields)).text == await lab.expected(HI), "the messages may be left out"


async def test_completions_carry_the_parameters_too(lab: Any) -> None:
    p, d = await start(lab)
    params = {"request_type": "context_only", "disagg_request_id": new_id()}
    from_p = await lab.post(p, COMPLETIONS, {"prompt": "Once upon a time", "disaggregated_params": params})
    fields = generation(from_p)
    body = {"prompt": fields["prompt_token_ids"], "disaggregated_params": fields["disaggregated_params"]}
    answer = await lab.post(d, COMPLETIONS, body)
    alone = await lab.post(await lab.start("R"), COMPLETIONS, {"prompt": "Once upon a time"})
    assert answer.json["choices"][0]["text"] == alone.json["choices"][0]["text"]


async def test_a_first_token_that_ends_the_answer_hands_nothing_over(lab: Any) -> None:
    p, _ = await start(lab)
    token = (await lab.chat(await lab.start("R"), HI, max_tokens=1, return_token_ids=True)).json["choices"][0][
        "token_ids"
    ][0]
    (choice,) = (await context(lab, p, stop_token_ids=[token])).json["choices"]
    assert choice["finish_reason"] == "stop"
    assert "disaggregated_params" not in choice
    assert lab.is_quiet(p)


@pytest.mark.parametrize("kind", [None, "context_and_generation"])
async def test_a_plain_request_is_computed_where_it_comes(lab: Any, kind: str | None) -> None:
    _, d = await start(lab)
    fields = {} if kind is None else {"disaggregated_params": {"request_type": kind}}
    assert (await lab.chat(d, HI, **fields)).text == await lab.expected(HI)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"request_type": "context"}, "request_type"),
        ({"request_type": None}, "request_type"),
        ({"disagg_request_id": None}, "disagg_request_id"),
        ({"disagg_request_id": "7"}, "disagg_request_id"),
        ({"disagg_request_id": -1}, "disagg_request_id"),
        ({"schedule_style": 1}, "schedule_style"),
        ({"first_gen_tokens": [1]}, "first_gen_tokens"),
    ],
)
async def test_a_wrong_field_of_ps_leg_is_refused_by_name(lab: Any, change: dict[str, Any], named: str) -> None:
    p, _ = await start(lab)
    params = {"request_type": "context_only", "disagg_request_id": new_id()} | change
    answer = await lab.chat(p, HI, disaggregated_params=params)
    assert (answer.status, answer.json["param"]) == (400, f"disaggregated_params.{named}")
    assert named in answer.json["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first_gen_tokens", None),
        ("first_gen_tokens", []),
        ("first_gen_tokens", [7]),
        ("ctx_request_id", None),
        ("ctx_request_id", 7),
        ("disagg_request_id", 7),
        ("ctx_dp_rank", 1),
        ("encoded_opaque_state", None),
        ("encoded_opaque_state", "???"),
        ("encoded_opaque_state", "AAECAw=="),
        ("ctx_usage", 7),
        ("room", 7),
    ],
)
async def test_a_wrong_field_of_ds_leg_is_refused_by_name(lab: Any, name: str, value: Any) -> None:
    p, d = await start(lab)
    answer = await lab.chat(d, HI, **generation(await context(lab, p), **{name: value}))
    assert (answer.status, answer.json["param"]) == (400, f"disaggregated_params.{name}")
    assert lab.is_quiet(d)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "disaggregated_params"),
        ({"conversation_params": {"conversation_id": ""}}, "conversation_params.conversation_id"),
        ({"conversation_params": {"id": "c"}}, "conversation_params.id"),
    ],
)
async def test_what_a_context_request_cannot_be(lab: Any, fields: dict[str, Any], named: str) -> None:
    p, _ = await start(lab)
    answer = await context(lab, p, **fields)
    assert (answer.status, answer.json["param"]) == (400, named)


async def test_an_id_is_used_once(lab: Any) -> None:
    p, d = await start(lab)
    request_id = new_id()
    fields = generation(await context(lab, p, request_id=request_id))
    assert (await context(lab, p, request_id=request_id)).json["param"] == "disaggregated_params.disagg_request_id"
    assert [(await lab.chat(d, HI, **fields)).status for _ in range(2)] == [200, 500]
    assert p.counters.traps == {Trap.USED_KEY: 2}


async def test_two_turns_parameters_mixed_up_are_refused_or_show(lab: Any) -> None:
    p, d = await start(lab)
    one, other = [generation(await context(lab, p, messages)) for messages in (HI, OTHER)]
    swapped = one["disaggregated_params"] | {
        "encoded_opaque_state": other["disaggregated_params"]["encoded_opaque_state"]
    }
    answer = await lab.chat(d, HI, **one | {"disaggregated_params": swapped})
    assert (answer.status, answer.json["param"]) == (400, "disaggregated_params.disagg_request_id")
    wrong = await lab.chat(d, OTHER, **other | {"disaggregated_params": one["disaggregated_params"]})
    assert wrong.text != await lab.expected(OTHER)


@pytest.mark.parametrize(
    ("kind", "pinned"), [(FaultKind.EXPIRE, 0), (FaultKind.ABSENT, 1), (FaultKind.KILL_AT_TRANSFER, 0)]
)
async def test_a_prefill_that_is_gone(lab: Any, kind: FaultKind, pinned: int) -> None:
    p, d = await start(lab, meeting_timeout_s=0.05 if kind is FaultKind.ABSENT else 5.0)
    p.faults = Faults([Order(kind)])
    answer = await lab.chat(d, HI, **generation(await context(lab, p)))
    assert (answer.status, p.pinned, lab.is_quiet(d)) == (500, pinned, True)


async def test_a_leg_is_told_by_its_request_type(lab: Any) -> None:
    p, _ = await start(lab)
    p.faults = Faults([Order(FaultKind.HANDOFF, leg=FaultLeg.PREFILL), Order(FaultKind.ERROR, leg=FaultLeg.DECODE)])
    from_p = await context(lab, p)
    assert (from_p.status, "disaggregated_params" in from_p.json["choices"][0]) == (200, False)
    assert (await lab.chat(p, HI)).status == 200


async def test_the_http_api_is_tensorrt_llms(lab: Any) -> None:
    p, _ = await start(lab)
    assert (await lab.fetch(p, "/v1/models")).json["data"][0]["owned_by"] == "tensorrt_llm"
    assert (await lab.fetch(p, "/metrics")).json == []
    text = (await lab.fetch(p, "/prometheus/metrics")).body.decode()
    assert f'trtllm_kv_cache_max_blocks{{engine_type="trtllm",model_name="sim"}} {p.config.num_blocks}.0' in text
    assert "vllm:" not in text
    missing = await lab.fetch(p, "/kv_event_sources")
    assert (missing.status, missing.json["object"]) == (404, "error")


# Generation first


def early(p: Any, request_id: int, **change: Any) -> dict[str, Any]:
    """D's parameters."""
    host, port = p.side_address
    params = {"request_type": "generation_only", "schedule_style": 1, "ctx_info_endpoint": f"tcp://{host}:{port}"}
    return params | {"disagg_request_id": request_id, "ctx_request_id": request_id, "ctx_dp_rank": 0} | change


def early_context(request_id: int, **change: Any) -> dict[str, Any]:
    return {"request_type": "context_only", "schedule_style": 1, "disagg_request_id": request_id} | change


async def test_generation_first_p_waits_for_d_and_d_answers_from_its_kv(lab: Any) -> None:
    p, d = await start(lab, connector="trtllm_gen_first")
    key = new_id()
    asked = asyncio.create_task(lab.chat(p, HI, max_tokens=40, disaggregated_params=early_context(key)))
    await lab.until(lambda: p.meetings.waiting == 1)
    from_d = await lab.chat(d, HI, disaggregated_params=early(p, key))
    from_p = await asked
    assert (from_p.status, from_p.json["usage"]["completion_tokens"]) == (200, 1)
    assert from_d.text == await lab.expected(HI)
    assert (d.counters.external_kv_tokens, d.counters.local_compute_tokens) == (d.counters.prompt_tokens, 0)
    assert lab.is_quiet(p) and lab.is_quiet(d)


async def test_generation_first_d_asks_for_what_it_lacks(lab: Any) -> None:
    p, d = await start(lab, connector="trtllm_gen_first")

    async def split(messages: Any) -> Any:
        key = new_id()
        to_p, to_d = early_context(key), early(p, key)
        return (
            await asyncio.gather(
                lab.chat(p, messages, max_tokens=1, disaggregated_params=to_p),
                lab.chat(d, messages, disaggregated_params=to_d),
            )
        )[1]

    talk = [*HI, {"role": "assistant", "content": (await split(HI)).text}, *OTHER]
    held = d.pool.cached * d.pool.block_size
    assert (await split(talk)).text == await lab.expected(talk)
    assert d.counters.external_kv_tokens == d.counters.prompt_tokens - held


async def test_generation_first_a_p_that_ends_leaves_d_waiting(lab: Any) -> None:
    p, d = await start(lab, connector="trtllm_gen_first", meeting_timeout_s=0.2)
    p.faults = Faults([Order(FaultKind.ABORT)])
    key = new_id()
    from_p, from_d = await asyncio.gather(
        lab.chat(p, HI, disaggregated_params=early_context(key)), lab.chat(d, HI, disaggregated_params=early(p, key))
    )
    assert (from_p.json["choices"][0]["finish_reason"], from_d.status) == ("abort", 500)
    assert "in time" in from_d.json["message"]


@pytest.mark.parametrize(
    ("is_d", "name", "value"),
    [
        (False, "schedule_style", 0),
        (False, "schedule_style", None),
        (False, "disagg_request_id", None),
        (False, "ctx_info_endpoint", "tcp://h:1"),
        (True, "schedule_style", 0),
        (True, "ctx_request_id", 7),
        (True, "ctx_info_endpoint", None),
        (True, "ctx_info_endpoint", "10.0.0.5:1"),
        (True, "ctx_info_endpoint", "tcp://10.0.0.5"),
        (True, "ctx_info_endpoint", "tcp://10.0.0.5:65536"),
        (True, "ctx_info_endpoint", "tcp://10.0.0.5:" + "9" * 5000),
        (True, "ctx_dp_rank", 1),
        (True, "first_gen_tokens", [7]),
    ],
)
async def test_generation_first_a_wrong_field_is_refused_by_name(lab: Any, is_d: bool, name: str, value: Any) -> None:
    p, d = await start(lab, connector="trtllm_gen_first")
    key = new_id()
    params = early(p, key, **{name: value}) if is_d else early_context(key, **{name: value})
    answer = await lab.chat(d if is_d else p, HI, disaggregated_params=params)
    assert (answer.status, answer.json["param"]) == (400, f"disaggregated_params.{name}")


async def test_a_context_server_tells_its_endpoint(lab: Any) -> None:
    p, _ = await start(lab, connector="trtllm_gen_first")
    host, port = p.side_address
    told = {"ctx_info_endpoint": [f"tcp://{host}:{port}"], "ctx_dp_rank": 0}
    assert (await lab.fetch(p, "/server_info")).json == {"disaggregated_params": told}


@pytest.mark.parametrize(
    ("path", "asked", "named"),
    [
        ("/v1/chat/completions", {"return_token_ids": True}, "return_token_ids"),
        ("/v1/chat/completions", {"session_id": "s"}, "session_id"),
        ("/v1/chat/completions", {"priority": 5}, "priority"),
        ("/v1/completions", {"cache_salt": "s"}, "cache_salt"),
        ("/v1/chat/completions", {"cache_salt": "s", "priority": 0.5, "top_k": 3}, None),
        ("/v1/messages", {"max_tokens": 4}, None),
        *(
            (path, {"max_tokens": 4, name: value}, name)
            for path in ("/v1/messages", "/v1/responses")
            for name, value in (
                ("disaggregated_params", {"request_type": "context_only", "disagg_request_id": 2**62}),
                ("conversation_params", {"conversation_id": "c"}),
            )
        ),
    ],
)
async def test_a_member_that_it_does_not_know_is_refused(lab: Any, path: str, asked: Any, named: str | None) -> None:
    engine = await lab.start("R", connector="trtllm")
    member, prompt = {COMPLETIONS: ("prompt", "hi"), "/v1/responses": ("input", "hi")}.get(path, ("messages", HI))
    answer = await lab.post(engine, path, {member: prompt, **asked})
    assert answer.status == (400 if named else 200)
    assert named is None or named in answer.body.decode()
