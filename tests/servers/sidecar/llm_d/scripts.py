"""What is played to llm-d's sidecar: a client's request, and what each engine answers. All texts are made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .engines import DONE
from .exchange import BODY, QUESTION, Script

COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"
TO_P = {"x-prefiller-host-port": "<P>"}
HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4, 5]],
    "remote_engine_id": "e1",
    "remote_request_id": "p-1",
    "remote_host": "10.0.0.5",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 40,
}
WANTS_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def says(body: Any, status: int = 200) -> Mapping[str, Any]:
    return {"status": status, "body": body}


def usage(cached: int | None) -> dict[str, Any]:
    """cached: the prompt's tokens that a cache held; None: it is not told."""
    details = None if cached is None else {"cached_tokens": cached}
    return {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42, "prompt_tokens_details": details}


def chat(text: str, cached: int | None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    kind = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return {**kind, "choices": [choice], "usage": usage(cached), **more}


def completion(text: str, cached: int, **more: Any) -> dict[str, Any]:
    kind = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    choices = [{"index": 0, "text": text, "finish_reason": "stop"}]
    return {**kind, "choices": choices, "usage": usage(cached), **more}


def response(text: str, cached: int, **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    counts = {"input_tokens": 40, "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 0}}
    told = {**counts, "input_tokens_details": {"cached_tokens": cached}, "total_tokens": 42}
    kind = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": "m"}
    return {**kind, "output": [message], "usage": told, **more}


def message(text: str, cached: int, **more: Any) -> dict[str, Any]:
    told = {"input_tokens": 40 - cached, "output_tokens": 2, "cache_read_input_tokens": cached}
    kind = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn"}
    return {**kind, "content": [{"type": "text", "text": text}], "usage": told, **more}


def chunks(*, with_usage: bool) -> list[Any]:
    kind = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    deltas: tuple[dict[str, str], ...] = ({"role": "assistant", "content": ""}, {"content": "A prefix."}, {})
    ends = (None, None, "stop")
    said: list[Any] = [
        {**kind, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        for delta, end in zip(deltas, ends, strict=True)
    ]
    return [*said, *([{**kind, "choices": [], "usage": usage(39)}] if with_usage else []), DONE]


def image(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"http://images.example/{number}.png"}}


def encoded(number: int) -> Mapping[str, Any]:
    peer = {"peer_host": "10.0.0.8", "peer_port": 5700 + number, "size_bytes": 4096, "nixl_agent_metadata_b64": "bmF2"}
    kind = {"id": f"chatcmpl-e{number}", "object": "chat.completion", "created": 1, "model": "m", "choices": []}
    return says({**kind, "ec_transfer_params": {f"hash{number}": peer}})


def asks(*numbers: int) -> dict[str, Any]:
    parts = [{"type": "text", "text": "Which one?"}, *(image(each) for each in numbers)]
    return {**BODY, "messages": [{"role": "user", "content": parts}]}


def error(code: int, text: str) -> Mapping[str, Any]:
    return says({"error": {"message": text, "type": "an error", "param": None, "code": code}}, code)


P_ANSWERS = says(chat("A", 32, kv_transfer_params=HANDOFF))
D_ANSWERS = says(chat("A prefix.", 39))
BOTH = {"P": (P_ANSWERS,), "D": (D_ANSWERS,)}
NIXL_AND_EC = ("--kv-connector=nixlv2", "--ec-connector=ec-nixl")
STORE = ("--kv-connector=shared-storage",)
WITHOUT_USAGE = says(chunks(with_usage=False))
P_WITHOUT_KV = says(chat("A", 32))

SCRIPTS: Mapping[str, Script] = {
    "chat": Script(BOTH),
    "chat_limits": Script(BOTH, {**BODY, "max_completion_tokens": 256, "min_tokens": 2, "stream": False}),
    "chat_stream": Script({"P": (P_ANSWERS,), "D": (says(chunks(with_usage=True)),)}, {**BODY, **WANTS_USAGE}),
    "chat_stream_no_usage": Script({"P": (P_ANSWERS,), "D": (WITHOUT_USAGE,)}, {**BODY, "stream": True}),
    "chat_large_number": Script(BOTH, {**BODY, "seed": 2**53 + 1}),
    "completions": Script(
        {"P": (says(completion("A", 32, kv_transfer_params=HANDOFF)),), "D": (says(completion("A prefix.", 39)),)},
        {"model": "m", "prompt": "What is a prefix?", "max_tokens": 256, "min_tokens": 2, "stream": False},
        path=COMPLETIONS,
    ),
    "responses": Script(
        {"P": (says(response("A", 32, kv_transfer_params=HANDOFF)),), "D": (says(response("A prefix.", 39)),)},
        {"model": "m", "input": "What is a prefix?", "max_output_tokens": 256, "stream": False},
        path=RESPONSES,
    ),
    "messages": Script(
        {"P": (says(message("A", 32, kv_transfer_params=HANDOFF)),), "D": (says(message("A prefix.", 39)),)},
        {"model": "m", "messages": QUESTION, "max_tokens": 256},
        path=MESSAGES,
    ),
    "chat_p_counts_nothing": Script(
        {"P": (says(chat("A", None, kv_transfer_params=HANDOFF)),), "D": (says(chat("A prefix.", 39)),)}
    ),
    "chat_d_counts_nothing": Script({"P": (P_ANSWERS,), "D": (says(chat("A prefix.", None)),)}),
    "chat_no_p": Script({"D": (D_ANSWERS,)}, headers={}),
    "chat_several_p": Script({**BOTH, "P2": ()}, headers={"x-prefiller-host-port": "<P>, <P2>"}),
    "chat_images": Script(
        {**BOTH, "E": (encoded(1),), "E2": (encoded(2),)},
        asks(1, 2),
        {**TO_P, "x-encoder-hosts-ports": "<E>,<E2>"},
        flags=NIXL_AND_EC,
    ),
    "chat_image_twice": Script(
        {**BOTH, "E": (encoded(1),)}, asks(1, 1), {**TO_P, "x-encoder-hosts-ports": "<E>"}, flags=NIXL_AND_EC
    ),
    "chat_images_no_p": Script(
        {"D": (D_ANSWERS,), "E": (encoded(1),)}, asks(1), {"x-encoder-hosts-ports": "<E>"}, flags=NIXL_AND_EC
    ),
    "chat_images_stored": Script(
        {**BOTH, "E": (says(chat("", None)),)},
        asks(1),
        {**TO_P, "x-encoder-hosts-ports": "<E>"},
        flags=("--kv-connector=nixlv2", "--ec-connector=ec-example"),
    ),
    "chat_e_fails": Script(
        {**BOTH, "E": (error(500, "no memory"),)},
        asks(1),
        {**TO_P, "x-encoder-hosts-ports": "<E>"},
        flags=NIXL_AND_EC,
    ),
    "chat_p_hands_nothing_over": Script({"P": (P_WITHOUT_KV,), "D": (D_ANSWERS,)}),
    "chat_p_fails": Script({"P": (error(500, "out of memory"),), "D": (D_ANSWERS,)}),
    "chat_p_refuses": Script({"P": (error(400, "the prompt is too long"),), "D": ()}),
    "chat_p_is_busy": Script(
        {"P": (error(503, "busy"), P_ANSWERS), "D": (D_ANSWERS,)},
        flags=("--kv-connector=nixlv2", "--prefill-max-retries=1"),
    ),
    "chat_p_is_gone": Script({"P": None, "D": (D_ANSWERS,)}),
    "chat_p_answers_no_json": Script({"P": (says("what?"),), "D": (D_ANSWERS,)}),
    "chat_d_refuses": Script({"P": (P_ANSWERS,), "D": (error(400, "the prompt is too long"),)}),
    "chat_d_is_gone": Script({"P": (P_ANSWERS,), "D": None}),
    "chat_not_json": Script({"P": (), "D": ()}, "what?"),
    "chat_private_members": Script({"D": (D_ANSWERS,)}, {**BODY, "kv_transfer_params": HANDOFF}, headers={}),
    "chat_store": Script({"P": (P_WITHOUT_KV,), "D": (D_ANSWERS,)}, flags=STORE),
    "chat_store_threshold": Script(
        {"P": (P_WITHOUT_KV,), "D": (D_ANSWERS,)}, {**BODY, "cache_hit_threshold": 0.5}, flags=STORE
    ),
    "chat_sglang": Script({"P": (says(chat("A prefix.", 0)),), "D": (D_ANSWERS,)}, flags=("--kv-connector=sglang",)),
    "chat_offloading": Script(
        {"P": (P_WITHOUT_KV,), "D": (D_ANSWERS,)}, flags=("--kv-connector=offloading", "--p2p-connector-port=7777")
    ),
    "models": Script({"D": (says({"object": "list", "data": []}),)}, None, {}, "GET", "/v1/models"),
    "health": Script({"D": (says({}),)}, None, {}, "GET", "/health"),
}
