"""Bodies of requests, parsed: short ways to write down what a client sends."""

from __future__ import annotations

import json
from typing import Any

from ppd.proxy.config import SessionKey
from ppd.proxy.openai.request import Endpoint, ReadingRules, Request, label_of, parse_request, scope_of
from ppd.proxy.sessions.hasher import Hasher
from ppd.proxy.sessions.templates import NO_TEMPLATES, Templates

HASHER = Hasher(b"a secret of the proxy")
CHAT, COMPLETIONS, RESPONSES, MESSAGES = Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES
USER = {"role": "user", "content": "hi"}
PROMPT_MEMBER = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input", MESSAGES: "messages"}


def parse_bytes(
    body: bytes,
    endpoint: Endpoint = CHAT,
    headers: dict[str, str] | None = None,
    tenant: str = "t",
    session_key: SessionKey = SessionKey.PREFIX,
    templates: Templates = NO_TEMPLATES,
) -> Request:
    rules = ReadingRules(hasher=HASHER, tenant=tenant, session_key=session_key, templates=templates)
    return parse_request(endpoint, body, headers or {}, rules)


def parse(
    endpoint: Endpoint = CHAT, prompt: Any = None, *, templates: Templates = NO_TEMPLATES, **members: Any
) -> Request:
    default = "hi" if endpoint in (COMPLETIONS, RESPONSES) else [USER]
    body = {"model": "m", PROMPT_MEMBER[endpoint]: default if prompt is None else prompt, **members}
    return parse_bytes(json.dumps(body).encode(), endpoint, templates=templates)


def label(name: str | None, endpoint: Endpoint = CHAT) -> int | None:
    """Of a request as `parse` makes it, whose client names its conversation so."""
    return label_of(HASHER, scope_of(endpoint, HASHER, "t", "m"), name)


def keys(*messages: dict[str, Any], endpoint: Endpoint = CHAT, **members: Any) -> tuple[int, ...]:
    return tuple(parse(endpoint, list(messages), **members).prompt.chain.keys)


def user(content: Any, **members: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **members}


def assistant(content: Any = None, **members: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **members}


def text(value: str, **members: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **members}


def call(id: str = "c1", name: str = "f", arguments: Any = "{}", **members: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}, **members}


def image(url: str, **members: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **members}}


def depth_of(value: Any) -> int:
    """How many lists and objects lie in one another, of decoded JSON."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)
