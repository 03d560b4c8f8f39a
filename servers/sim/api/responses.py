"""/v1/responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.config import SimConfig
from ..core.errors import SimError
from ..core.sequence import Finish, Generation
from ..engine.deltas import Delta
from .prompts import responses_prompt
from .reply import Reply, data_event, named_event, openai_error
from .requests import JsonBody, formed, read_generation
from .response_store import ResponseStore, input_items
from .structured import responses_form
from .tool_calls import Piece

_ARGUMENTS_DELTA = "response.function_call_arguments.delta"
_ARGUMENTS_DONE = "response.function_call_arguments.done"


class Responses:
    id_prefix = "resp_"

    def __init__(self, store: ResponseStore | None = None) -> None:
        self._store = store or ResponseStore()

    def read(self, body: JsonBody, config: SimConfig) -> Generation:
        history = self._store.history(body)
        prompt = responses_prompt(body.with_members(input=[*history, *input_items(body)]) if history else body)
        generation = read_generation(body, config, (prompt,), limits=("max_output_tokens",))
        return formed(generation, responses_form(body))

    def queued(self, reply: Reply) -> dict[str, Any]:
        """What a client gets at once of a response that is made in the background."""
        return _head(reply, "queued") | {"output": [], "usage": None}

    def whole(self, reply: Reply) -> dict[str, Any]:
        is_cut = reply.choices[0].finish is Finish.LENGTH
        return {
            **_head(reply, "incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [_item(reply, "completed")],
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": reply.cached_tokens},
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
            "kv_transfer_params": reply.transfer_params,
        }

    def opening(self, reply: Reply) -> Iterable[bytes]:
        started = _head(reply, "in_progress") | {"output": [], "usage": None}
        yield _event(reply, {"type": "response.created", "response": started})
        yield _event(reply, {"type": "response.in_progress", "response": started})

    def delta(self, reply: Reply, delta: Delta) -> Iterable[bytes]:
        piece = reply.choices[0].latest
        if piece == Piece():
            return
        yield from _opened(reply)
        if piece.arguments:
            place = {"item_id": _item_id(reply), "output_index": 0}
            yield _event(reply, {"type": _ARGUMENTS_DELTA, **place, "delta": piece.arguments})
        if piece.content:
            event = {"type": "response.output_text.delta", **_position(reply), "delta": piece.content, "logprobs": []}
            yield _event(reply, event)

    def closing(self, reply: Reply) -> Iterable[bytes]:
        choice, response = reply.choices[0], self.whole(reply) | {"kv_transfer_params": None}
        yield from _opened(reply)
        if (called := choice.called) is not None:
            call = {"name": called.name, "arguments": called.arguments}
            place = {"item_id": _item_id(reply), "output_index": 0}
            yield _event(reply, {"type": _ARGUMENTS_DONE, **place, **call})
        else:
            done = {**_position(reply), "text": choice.text, "logprobs": []}
            yield _event(reply, {"type": "response.output_text.done", **done})
            yield _event(reply, {"type": "response.content_part.done", **_position(reply), "part": _part(choice.text)})
        item = response["output"][0]
        yield _event(reply, {"type": "response.output_item.done", "output_index": 0, "item": item})
        yield _event(reply, {"type": f"response.{response['status']}", "response": response})

    def failure(self, error: SimError) -> Iterable[bytes]:
        return [data_event(openai_error(error))]

    def error(self, error: SimError) -> dict[str, Any]:
        return openai_error(error)


def _head(reply: Reply, status: str) -> dict[str, Any]:
    return {
        "id": reply.id,
        "object": "response",
        "created_at": reply.created,
        "model": reply.generation.model,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": None,
        "parallel_tool_calls": True,
        "temperature": 0.0,
        "top_p": 1.0,
        "tool_choice": "auto",
        "tools": [],
    }


def _event(reply: Reply, payload: dict[str, Any]) -> bytes:
    number, reply.events = reply.events, reply.events + 1
    return named_event(payload | {"sequence_number": number})


def _opened(reply: Reply) -> Iterable[bytes]:
    """The start of the item, whose kind the first piece of the answer shows."""
    if reply.is_open:
        return
    reply.is_open = True
    is_call = reply.choices[0].called is not None
    empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
    item = _item(reply, "in_progress") | empty
    yield _event(reply, {"type": "response.output_item.added", "output_index": 0, "item": item})
    if not is_call:
        yield _event(reply, {"type": "response.content_part.added", **_position(reply), "part": _part("")})


def _item(reply: Reply, status: str) -> dict[str, Any]:
    if (called := reply.choices[0].called) is not None:
        return {
            "id": _item_id(reply),
            "type": "function_call",
            "call_id": f"call_{reply.call_id(0)}",
            "name": called.name,
            "arguments": called.arguments,
            "status": status,
        }
    return {
        "id": _item_id(reply),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(reply.choices[0].text)],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _position(reply: Reply) -> dict[str, Any]:
    return {"item_id": _item_id(reply), "output_index": 0, "content_index": 0}


def _item_id(reply: Reply) -> str:
    prefix = "msg_" if reply.choices[0].called is None else "fc_"
    return prefix + reply.id.removeprefix("resp_")
