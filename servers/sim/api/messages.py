"""/v1/messages, Anthropic's API as vLLM serves it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.config import SimConfig
from ..core.errors import BadRequest, SimError
from ..core.sequence import Finish, Generation
from ..engine.deltas import Delta
from .prompts import messages_prompt
from .reply import DONE, Reply, named_event
from .requests import JsonBody, formed, read_generation
from .structured import messages_form
from .tool_calls import Piece, parsed_arguments

_ERROR_KINDS = {400: "invalid_request_error", 404: "not_found_error"}


class Messages:
    id_prefix = "msg_"

    def read(self, body: JsonBody, config: SimConfig) -> Generation:
        if body.raw("max_tokens") is None:
            raise BadRequest("max_tokens is required.", "max_tokens")
        prompts = (messages_prompt(body),)
        generation = read_generation(body, config, prompts, limits=("max_tokens",), stop="stop_sequences")
        return formed(generation, messages_form(body))

    def whole(self, reply: Reply) -> dict[str, Any]:
        return {
            **_head(reply),
            "content": [_block(reply)],
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
        if piece == Piece():
            return
        yield from _opened(reply)
        if piece.arguments:
            yield _block_delta({"type": "input_json_delta", "partial_json": piece.arguments})
        if piece.content:
            yield _block_delta({"type": "text_delta", "text": piece.content})

    def closing(self, reply: Reply) -> Iterable[bytes]:
        stop = {"stop_reason": _stop_reason(reply), "stop_sequence": _stop_sequence(reply)}
        yield from _opened(reply)
        yield named_event({"type": "content_block_stop", "index": 0})
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


def _block(reply: Reply) -> dict[str, Any]:
    choice = reply.choices[0]
    if (called := choice.called) is None:
        return {"type": "text", "text": choice.text}
    call_id = f"chatcmpl-tool-{reply.call_id(0)}"
    return {"type": "tool_use", "id": call_id, "name": called.name, "input": parsed_arguments(called.arguments)}


def _opened(reply: Reply) -> Iterable[bytes]:
    """The start of the block, whose kind the first piece of the answer shows."""
    if not reply.is_open:
        reply.is_open = True
        empty: dict[str, Any] = {"text": ""} if reply.choices[0].called is None else {"input": {}}
        yield named_event({"type": "content_block_start", "index": 0, "content_block": _block(reply) | empty})


def _block_delta(delta: dict[str, Any]) -> bytes:
    return named_event({"type": "content_block_delta", "index": 0, "delta": delta})


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": reply.completion_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
    }


def _stop_sequence(reply: Reply) -> str | None:
    reason = reply.choices[0].stop_reason
    return reason if isinstance(reason, str) else None


def _stop_reason(reply: Reply) -> str:
    if reply.choices[0].finish is Finish.LENGTH:
        return "max_tokens"
    if reply.finish_reason(0) == "tool_calls":
        return "tool_use"
    return "end_turn" if _stop_sequence(reply) is None else "stop_sequence"
