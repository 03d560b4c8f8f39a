"""One request as a client makes it: a conversation in OpenAI's form, and the body that each API carries it in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ppd.proxy.openai.request import Endpoint

from .templates import Message

MODEL = "made-up"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a session, and the reply that its model will give to it."""

    messages: Sequence[Message]
    reply: Message  # `reasoning_content` is what it thinks first, whether or not the client sends it back
    tools: Sequence[Any] = ()
    endpoint: Endpoint = Endpoint.CHAT
    think_s: float = 5.0  # after the last answer of the session
    session_id: str | None = None  # the client's own name for it
    follows: bool = True  # it repeats some of what its session has sent before

    def body(self) -> bytes:
        made = _BODIES[self.endpoint](self)
        if self.session_id is not None:
            made["prompt_cache_key"] = self.session_id
        return msgspec.json.encode(made)


def said(role: str, text: str, **members: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **members}


def called(calls: Sequence[tuple[str, str, Mapping[str, Any]]], text: str = "", **members: Any) -> dict[str, Any]:
    """An assistant's message with calls: of each its id, its tool and the arguments."""
    listed = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for id, name, arguments in calls
    ]
    return {"role": "assistant", "content": text, "tool_calls": listed, **members}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    typed = {argument: {"type": kind} for argument, kind in properties.items()}
    parameters = {"type": "object", "properties": typed, "required": list(typed)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _chat(asked: Asked) -> dict[str, Any]:
    tools = {"tools": asked.tools} if asked.tools else {}
    return {"model": MODEL, "stream": True, "messages": asked.messages, **tools}


def _anthropic(asked: Asked) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": 4096, "messages": []}
    for message in asked.messages:
        role, turn = _blocks(message)
        if role == "system":
            body["system"] = turn
        elif body["messages"] and body["messages"][-1]["role"] == role == "user":
            body["messages"][-1]["content"] += turn
        else:
            body["messages"].append({"role": role, "content": turn})
    if asked.tools:
        body["tools"] = [
            {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
            for one in (each["function"] for each in asked.tools)
        ]
    return body


def _blocks(message: Message) -> tuple[str, list[dict[str, Any]]]:
    """The role and the blocks in Anthropic's form: results of tools are the user's."""
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return "user", [block]
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return message["role"], blocks


def _responses(asked: Asked) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "stream": True, "store": False, "input": []}
    for message in asked.messages:
        if message["role"] == "system":
            body["instructions"] = message["content"]
        else:
            body["input"] += _items(message)
    if asked.tools:
        body["tools"] = [{"type": "function", **one["function"]} for one in asked.tools]
    return body


def _items(message: Message) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    items: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": reasoning}
        items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [text]})
    if message["content"]:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        part = {"type": kind, "text": message["content"]}
        items.append({"type": "message", "role": message["role"], "content": [part]})
    for call in message.get("tool_calls") or ():
        items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


_BODIES = {Endpoint.CHAT: _chat, Endpoint.MESSAGES: _anthropic, Endpoint.RESPONSES: _responses}
