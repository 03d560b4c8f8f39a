"""The name that a client gives its conversation.

The first that is present counts: headers `X-Session-ID`, `X-Session-Affinity`, `X-Correlation-ID`; body members
`conversation_id`, `session_id`, `prompt_cache_key`; then `conversation` of Responses, and of Anthropic's Messages the
session in `metadata.user_id`, where Claude Code writes `user_X_account_Y_session_Z`, or JSON with a `session_id`. What
else clients put into `metadata` (a user, an account) spans conversations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.json import Decoder

_HEADERS = ("x-session-id", "x-session-affinity", "x-correlation-id")
_MEMBERS = ("conversation_id", "session_id", "prompt_cache_key")
_ALL = frozenset((*_MEMBERS, "conversation", "metadata"))
_LONGEST_BYTES = 64 * 1024  # of metadata that is read
_IN_USER_ID = re.compile(r"user_.*_session_([0-9A-Za-z-]{8,64})")


class _Conversation(msgspec.Struct):
    id: str


class _Metadata(msgspec.Struct):
    user_id: str


class _UserId(msgspec.Struct):
    session_id: str


_ID: Decoder[str | int | None] = Decoder(str | int | None)
_CONVERSATION: Decoder[str | _Conversation | None] = Decoder(str | _Conversation | None)
_METADATA = Decoder(_Metadata)
_USER_ID = Decoder(_UserId)

Decoded = Callable[[Decoder[Any], msgspec.Raw, str], Any]
"""Reads a member, by name, or raises a RequestError."""


def session_name(
    headers: Mapping[str, str], fields: Mapping[str, msgspec.Raw], decoded: Decoded, extra: str | None
) -> str | None:
    """extra: `conversation` or `metadata`, where the endpoint has one of them."""
    for name in _HEADERS:
        if given := headers.get(name):
            return given
    if _ALL.isdisjoint(fields):
        return None
    for name in _MEMBERS:
        value = decoded(_ID, fields[name], name) if name in fields else None
        if value not in (None, ""):
            return str(value)
    if extra is None or extra not in fields:
        return None
    if extra == "metadata":
        return _in_metadata(fields[extra])
    conversation = decoded(_CONVERSATION, fields[extra], extra)
    return conversation.id if isinstance(conversation, _Conversation) else conversation or None


def _in_metadata(raw: msgspec.Raw) -> str | None:
    """None for metadata of any other form, which the worker judges."""
    if memoryview(raw).nbytes > _LONGEST_BYTES:
        return None
    try:
        user_id = _METADATA.decode(raw).user_id
        if user_id.startswith("{"):
            return _USER_ID.decode(user_id).session_id or None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    found = _IN_USER_ID.fullmatch(user_id)
    return None if found is None else found[1]
