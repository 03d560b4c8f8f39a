"""Conversations of every API, rendered to token ids by one chat template.

    <|im_start|>role\\ncontent<|im_end|>\\n ... <|im_start|>assistant\\n

Tools come first, in a system turn of their own; a tool call is JSON inside the assistant's turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from ..core.errors import BadRequest
from ..core.structured_text import CALL_ARGUMENTS, CALL_CLOSING, CALL_OPENING
from ..core.tokens import TURN_END, TURN_START, encode, media_tokens
from .requests import JsonBody

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MEDIA_PARTS = frozenset(
    {"image_url", "input_image", "image", "image_embeds", "input_audio", "audio_url", "video_url", "file", "document"}
)
_NEWLINE = ord("\n")


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """`content`: token ids."""

    role: str
    content: list[int]


def render(
    turns: Iterable[PromptMessage], *, tools: Any = None, kwargs: Any = None, opens: bool = True
) -> tuple[int, ...]:
    """`opens`: end with the head of the assistant's turn. `kwargs`: chat_template_kwargs, which change the prompt."""
    tokens: list[int] = []
    if kwargs:
        tokens += _turn("config", encode(_json(kwargs)))
    if tools:
        tokens += _turn("system", encode("# Tools\n" + "\n".join(_json(tool) for tool in tools)))
    for turn in turns:
        tokens += _turn(turn.role, turn.content)
    if opens:
        tokens += [TURN_START, *encode("assistant\n")]
    return tuple(tokens)


def chat_prompt(body: JsonBody) -> tuple[int, ...]:
    turns = [_chat_turn(message) for message in _objects(body.raw("messages"), "messages")]
    if not turns:
        raise BadRequest("messages must not be empty.", "messages")
    continues = body.flag("continue_final_message")
    opens = body.raw("add_generation_prompt") is not False and not continues
    tokens = render(turns, tools=_tools(body), kwargs=body.mapping("chat_template_kwargs"), opens=opens)
    return tokens[:-2] if continues else tokens  # continues: without the end of the last turn


def responses_prompt(body: JsonBody) -> tuple[int, ...]:
    given = body.raw("input")
    turns = [PromptMessage("system", encode(text))] if (text := body.text("instructions")) else []
    if isinstance(given, str):
        turns.append(PromptMessage("user", encode(given)))
    else:
        turns += [_responses_turn(item) for item in _objects(given, "input")]
    if not given:
        raise BadRequest("input must not be empty.", "input")
    return render(turns, tools=_tools(body))


def messages_prompt(body: JsonBody) -> tuple[int, ...]:
    turns = [_chat_turn(message) for message in _objects(body.raw("messages"), "messages")]
    if not turns:
        raise BadRequest("messages must not be empty.", "messages")
    if system := body.raw("system"):
        turns.insert(0, PromptMessage("system", _content(system)))
    return render(turns, tools=_tools(body))


def _turn(role: str, content: list[int]) -> list[int]:
    return [TURN_START, *encode(role), _NEWLINE, *content, TURN_END, _NEWLINE]


def _chat_turn(message: dict[str, Any]) -> PromptMessage:
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRequest("Every message needs a role.", "messages")
    content = _content(message.get("content"))
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        content += _tool_call(function if isinstance(function, dict) else {})
    return PromptMessage(role, content)


def _responses_turn(item: dict[str, Any]) -> PromptMessage:
    kind = item.get("type", "message")
    if kind == "function_call":
        return PromptMessage("assistant", _tool_call(item))
    if kind == "function_call_output":
        return PromptMessage("tool", _content(item.get("output")))
    if kind == "reasoning":
        return PromptMessage("assistant", [])
    return _chat_turn(item)


def _content(content: Any) -> list[int]:
    if content is None:
        return []
    if isinstance(content, str):
        return encode(content)
    if not isinstance(content, list):
        raise BadRequest("content must be a string or a list of parts.", "messages")
    return [token for part in content for token in _part(part)]


def _part(part: Any) -> list[int]:
    if isinstance(part, str):
        return encode(part)
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
        raise BadRequest("Every content part needs a type.", "messages")
    if kind in _TEXT_PARTS:
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise BadRequest(f"A content part of type {kind} needs its text.", "messages")
        return encode(text)
    if kind in _MEDIA_PARTS:
        return media_tokens(_json(part.get(kind) or part.get("source") or part.get("image_url")).encode())
    if kind == "tool_use":
        return _tool_call({"name": part.get("name"), "arguments": part.get("input")})
    if kind == "tool_result":
        return encode("<tool_response>\n") + _content(part.get("content")) + encode("\n</tool_response>")
    if kind == "thinking":
        return []  # templates drop the reasoning of earlier turns
    raise BadRequest(f"Unknown content part type: {kind}.", "messages")


def _tool_call(function: dict[str, Any]) -> list[int]:
    """As the engine writes a call, so that its own is a prefix-cache hit on the next turn."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return encode(f"{CALL_OPENING}{_json(function.get('name'))}{CALL_ARGUMENTS}{arguments}{CALL_CLOSING}")


def _tools(body: JsonBody) -> list[Any] | None:
    tools = body.raw("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRequest("tools must be a list.", "tools")
    return tools


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRequest(f"{name} must be a list of objects.", name)
    return value


def _json(value: Any) -> str:
    """With sorted keys, so that equal values have equal text."""
    return msgspec.json.encode(value, order="sorted").decode()
