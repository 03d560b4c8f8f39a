"""/v1/responses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..core.config import SimConfig
from ..core.errors import SimError
from ..core.sequence import Finish, Generation
from ..engine.deltas import Delta
from .answer_parts import Piece
from .prompts import responses_prompt, thoughts
from .reply import Reply, data_event, named_event, openai_error
from .requests import JsonBody, formed, read_generation
from .response_store import ResponseStore, input_items
from .structured import responses_form

_ARGUMENTS = "response.function_call_arguments"
_REASONING = "response.reasoning_text"
_TEXT = "response.output_text"
_ID_PREFIXES = {"reasoning": "rs_", "function_call": "fc_", "message": "msg_"}


class Responses:
    id_prefix = "resp_"

    def __init__(self, store: ResponseStore | None = None) -> None:
        self._store = store or ResponseStore()

    def read(self, body: JsonBody, config: SimConfig) -> Generation:
        history = self._store.history(body)
        whole = body.with_members(input=[*history, *input_items(body)]) if history else body
        prompt = responses_prompt(whole, config)
        generation = read_generation(body, config, (prompt,), limits=("max_output_tokens",))
        return formed(generation, responses_form(body), thoughts(body, config))

    def queued(self, reply: Reply) -> dict[str, Any]:
        """What a client gets at once of a response that is made in the background."""
        return _head(reply, "queued") | {"output": [], "usage": None}

    def whole(self, reply: Reply) -> dict[str, Any]:
        is_cut = reply.choices[0].finish is Finish.LENGTH
        return {
            **_head(reply, "incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _items(reply),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": reply.cached_tokens},
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
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
        if piece.reasoning:
            yield from _opened(reply, "reasoning")
            yield _event(reply, {"type": f"{_REASONING}.delta", **_position(reply), "delta": piece.reasoning})
        if replace(piece, reasoning="") != Piece():
            yield from _opened(reply, _answer_kind(reply))
        if piece.arguments:
            yield _event(reply, {"type": f"{_ARGUMENTS}.delta", **_place(reply), "delta": piece.arguments})
        if piece.content:
            event = {"type": f"{_TEXT}.delta", **_position(reply), "delta": piece.content, "logprobs": []}
            yield _event(reply, event)

    def closing(self, reply: Reply) -> Iterable[bytes]:
        response = self.whole(reply) | {"kv_transfer_params": None}
        if not reply.part:
            yield from _opened(reply, _answer_kind(reply))
        yield from _closed(reply)
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


def _opened(reply: Reply, kind: str) -> Iterable[bytes]:
    """The start of an item, unless one of its kind is open."""
    if reply.part == kind:
        return
    if reply.part:
        yield from _closed(reply)
        reply.place += 1
    reply.part = kind
    empty: dict[str, Any] = {"arguments": ""} if kind == "function_call" else {"content": []}
    item = _item(reply, kind, "in_progress") | empty
    yield _event(reply, {"type": "response.output_item.added", "output_index": reply.place, "item": item})
    if kind != "function_call":
        yield _event(reply, {"type": "response.content_part.added", **_position(reply), "part": _part(kind, "")})


def _closed(reply: Reply) -> Iterable[bytes]:
    kind, choice = reply.part, reply.choices[0]
    if kind == "function_call" and (called := choice.called) is not None:
        call = {"name": called.name, "arguments": called.arguments}
        yield _event(reply, {"type": f"{_ARGUMENTS}.done", **_place(reply), **call})
    else:
        done: dict[str, Any] = (
            {"text": choice.reasoning} if kind == "reasoning" else {"text": choice.said, "logprobs": []}
        )
        name = _REASONING if kind == "reasoning" else _TEXT
        yield _event(reply, {"type": f"{name}.done", **_position(reply), **done})
        part = _part(kind, done["text"])
        yield _event(reply, {"type": "response.content_part.done", **_position(reply), "part": part})
    item = _item(reply, kind, "completed")
    yield _event(reply, {"type": "response.output_item.done", "output_index": reply.place, "item": item})


def _answer_kind(reply: Reply) -> str:
    return "message" if reply.choices[0].called is None else "function_call"


def _items(reply: Reply) -> list[dict[str, Any]]:
    choice = reply.choices[0]
    items = [_item(reply, "reasoning", "completed")] if choice.reasoning else []
    if choice.called is not None or choice.said or not items:
        items.append(_item(reply, _answer_kind(reply), "completed"))
    return items


def _item(reply: Reply, kind: str, status: str) -> dict[str, Any]:
    choice = reply.choices[0]
    head = {"id": _item_id(reply, kind), "type": kind}
    if kind == "reasoning":
        return head | {"summary": [], "content": [_part(kind, choice.reasoning)], "status": status}
    if kind == "message":
        return head | {"role": "assistant", "status": status, "content": [_part(kind, choice.said)]}
    called = choice.called
    call = {} if called is None else {"name": called.name, "arguments": called.arguments}
    return head | {"call_id": f"call_{reply.call_id(0)}", **call, "status": status}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _place(reply: Reply) -> dict[str, Any]:
    """Of the item that is open."""
    return {"item_id": _item_id(reply, reply.part), "output_index": reply.place}


def _position(reply: Reply) -> dict[str, Any]:
    return {**_place(reply), "content_index": 0}


def _item_id(reply: Reply, kind: str) -> str:
    return _ID_PREFIXES[kind] + reply.id.removeprefix("resp_")
