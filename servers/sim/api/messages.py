"""/v1/messages, Anthropic's API as vLLM serves it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..core.config import SimConfig
from ..core.errors import BadRequest, SimError
from ..core.sequence import Finish, Generation
from ..engine.deltas import Delta
from .answer_parts import Piece, parsed_arguments
from .prompts import messages_prompt, thoughts
from .reply import DONE, Reply, named_event
from .requests import JsonBody, formed, read_generation
from .structured import messages_form

_ERROR_KINDS = {400: "invalid_request_error", 404: "not_found_error"}


class Messages:
    id_prefix = "msg_"

    def read(self, body: JsonBody, config: SimConfig) -> Generation:
        if body.raw("max_tokens") is None:
            raise BadRequest("max_tokens is required.", "max_tokens")
        prompts = (messages_prompt(body, config),)
        generation = read_generation(body, config, prompts, limits=("max_tokens",), stop="stop_sequences")
        return formed(generation, messages_form(body), thoughts(body, config))

    def whole(self, reply: Reply) -> dict[str, Any]:
        return {
            **_head(reply),
            "content": _blocks(reply),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": _stop_sequence(reply),
            "usage": _usage(reply),
            "kv_transfer_params": reply.transfer_params,
        }

    def opening(self, reply: Reply) -> Iterable[bytes]:
        usage = _usage(reply) | {"output_tokens": 0}
        message = _head(reply) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield named_event({"type": "message_start", "message": message})

    def delta(self, reply: Reply, delta: Delta) -> Iterable[bytes]:
        piece = reply.choices[0].latest
        if piece.reasoning:
            yield from _opened(reply, "thinking")
            yield _block_delta(reply, {"type": "thinking_delta", "thinking": piece.reasoning})
        if replace(piece, reasoning="") != Piece():
            yield from _opened(reply, "text" if reply.choices[0].called is None else "tool_use")
        if piece.arguments:
            yield _block_delta(reply, {"type": "input_json_delta", "partial_json": piece.arguments})
        if piece.content:
            yield _block_delta(reply, {"type": "text_delta", "text": piece.content})

    def closing(self, reply: Reply) -> Iterable[bytes]:
        stop = {"stop_reason": _stop_reason(reply), "stop_sequence": _stop_sequence(reply)}
        if not reply.part:
            yield from _opened(reply, "text")
        yield from _closed(reply)
        yield named_event({"type": "message_delta", "delta": stop, "usage": _usage(reply)})
        yield named_event({"type": "message_stop"})
        yield DONE

    def failure(self, error: SimError) -> Iterable[bytes]:
        return [named_event(self.error(error)), DONE]

    def error(self, error: SimError) -> dict[str, Any]:
        kind = _ERROR_KINDS.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": reply.id, "type": "message", "role": "assistant", "model": reply.generation.model}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    """An answer without any part is one empty text."""
    choice, blocks = reply.choices[0], []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": reply.call_id(0)})
    if choice.called is not None:
        blocks.append(_call(reply) | {"input": parsed_arguments(choice.called.arguments)})
    elif choice.said or not blocks:
        blocks.append({"type": "text", "text": choice.said})
    return blocks


def _call(reply: Reply) -> dict[str, Any]:
    called = reply.choices[0].called
    name = None if called is None else called.name
    return {"type": "tool_use", "id": f"chatcmpl-tool-{reply.call_id(0)}", "name": name, "input": {}}


def _opened(reply: Reply, kind: str) -> Iterable[bytes]:
    """The start of a block, unless one of its kind is open."""
    if reply.part == kind:
        return
    if reply.part:
        yield from _closed(reply)
        reply.place += 1
    reply.part = kind
    block = _call(reply) if kind == "tool_use" else {"type": kind, kind: ""}
    yield named_event({"type": "content_block_start", "index": reply.place, "content_block": block})


def _closed(reply: Reply) -> Iterable[bytes]:
    if reply.part == "thinking":
        yield _block_delta(reply, {"type": "signature_delta", "signature": reply.call_id(0)})
    yield named_event({"type": "content_block_stop", "index": reply.place})


def _block_delta(reply: Reply, delta: dict[str, Any]) -> bytes:
    return named_event({"type": "content_block_delta", "index": reply.place, "delta": delta})


def _usage(reply: Reply) -> dict[str, Any]:
    """As in Anthropic's API and vLLM, the two counts of input add up to the prompt."""
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "output_tokens": reply.completion_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
    }


def _stop_sequence(reply: Reply) -> str | None:
    reason = reply.choices[0].stop_reason
    return reason if isinstance(reason, str) else None


def _stop_reason(reply: Reply) -> str | None:
    """None where the engine gave up."""
    if reply.choices[0].finish is Finish.LENGTH:
        return "max_tokens"
    if reply.choices[0].finish is Finish.ABORT:
        return None
    if reply.finish_reason(0) == "tool_calls":
        return "tool_use"
    return "end_turn" if _stop_sequence(reply) is None else "stop_sequence"
