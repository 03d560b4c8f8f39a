"""Items of Responses, each as the message that it stands for."""

from __future__ import annotations

from msgspec import Raw

from ..body_members import pruned
from .shapes import (
    ABSENT,
    ANY,
    CANONICAL,
    REASONING,
    Members,
    PromptCall,
    PromptFunction,
    PromptMessage,
    content_of,
    read,
    string,
)

_CALLS = frozenset(("function_call", "custom_tool_call"))
_SERVERS_OWN = frozenset(("id", "status"))

THOUGHT = PromptMessage(role="reasoning")
"""Stands for an item that is reasoning, and adds nothing to a chain."""


class CallItem(PromptMessage):
    """A call of a tool. Those that follow one another are of one round, as the calls of one message are."""


def message_of(item: Members) -> PromptMessage:
    kind = string(item, "type") or "message"
    if kind in REASONING:
        return THOUGHT
    if kind == "message":
        role, name = string(item, "role") or "", string(item, "name")
        return PromptMessage(role=role, name=name, content=content_of(item, "content"))
    if kind in _CALLS:
        call = PromptFunction(string(item, "name"), item.get("arguments", ABSENT), item.get("input", ABSENT))
        return CallItem(role="call", tool_calls=[PromptCall(string(item, "call_id"), call)])
    if kind.endswith("_output") and "output" in item:
        return PromptMessage(role="tool", tool_call_id=string(item, "call_id"), content=content_of(item, "output"))
    own = {name: raw for name, raw in item.items() if kind == "item_reference" or name not in _SERVERS_OWN}
    if not kind.endswith("_call"):
        return PromptMessage(role=kind, content=[own])
    call_id = string(own, "call_id")
    if not call_id:
        return CallItem(role=kind, content=[own])
    rest = pruned({name: read(ANY, raw, name) for name, raw in own.items() if name != "call_id"})
    call = PromptFunction(arguments=Raw(CANONICAL.encode(rest)))
    return CallItem(role=kind, tool_calls=[PromptCall(call_id, call)])
