"""What the proxy reads of a request that it only forwards: the model it names, and members that end at the proxy."""

from __future__ import annotations

import msgspec

from ..admission.keys import Client
from ..admission.queue import effective_priority
from ..admission.tenant_scope import SALTED
from ..connectors.leg import public_fields
from ..errors import UNREADABLE, RequestError
from ..media.items import without_names
from ..openai.body_members import decoded, encoded, value_of
from ..openai.form import field as form_field
from ..openai.form import is_form
from ..openai.request import MODEL_LIMIT, Fields
from ..openai.units import check_depth

UNSALTED_PATHS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v2/embed")
"""The paths whose engines take no `cache_salt`, in vLLM 0.32: all but the last compute no prompt."""


_HOLDERS = ("messages", "input")


class _ModelOnly(msgspec.Struct):
    model: str = ""


def model_of(content_type: str, body: bytes) -> str:
    """The model that a body names, "" where it names none; RequestError for a name that is too long."""
    if is_form(content_type):
        model = form_field(content_type, body, "model") or ""
    else:
        try:
            model = msgspec.json.decode(body, type=_ModelOnly).model
        except UNREADABLE:
            model = ""
    if len(model) > MODEL_LIMIT:
        raise RequestError(f"model: must be a name of at most {MODEL_LIMIT} characters", param="model")
    return model


def read_forwarded(content_type: str, body: bytes, client: Client, depth_limit: int, path: str) -> tuple[str, bytes]:
    """The model that it names, and the body that a worker may see: a form as it came, else `public_body`."""
    model = model_of(content_type, body)
    return model, body if not body or is_form(content_type) else public_body(body, client, depth_limit, path)


def public_body(body: bytes, client: Client, depth_limit: int, path: str = "") -> bytes:
    """A JSON object without the members that end at the proxy, and with a `priority` that the client's key allows.

    With keys it has the tenant's salt too, where the path's engine keeps KV of prompts, and ids that are the tenant's.

    The same bytes where that changes nothing. RequestError for a body that is no JSON object: workers accept more than
    JSON (NaN, UTF-16), and could find members there that were not checked here.
    """
    check_depth(body, depth_limit)
    try:
        fields = msgspec.json.decode(body, type=Fields)
    except UNREADABLE:
        raise RequestError("the body must be a JSON object or a multipart form") from None
    kept = _in_scope(_in_class(public_fields(fields), client), client, path)
    if b"uuid" in body or b"\\u" in body:
        kept |= _unnamed(kept)
    return body if kept == fields else msgspec.json.encode(kept)


def _unnamed(fields: Fields) -> Fields:
    """Members in which media have names of the client's, without them: engines know media by names, of any tenant."""
    found = {name: decoded(fields[name]) for name in _HOLDERS if name in fields}
    return {name: encoded(value) for name, value in found.items() if without_names(value)}


def _in_scope(fields: Fields, client: Client, path: str) -> Fields:
    if client.scope is None:
        return fields
    if path in UNSALTED_PATHS:
        return client.scope.fields(fields)
    own = value_of(fields, SALTED)
    if own is not None and not isinstance(own, str):
        raise RequestError("cache_salt: must be a string", param=SALTED)
    return client.scope.fields(fields, client.scope.salt(own or ""))


def _in_class(fields: Fields, client: Client) -> Fields:
    asked = value_of(fields, "priority")
    if not client.name or asked is None:
        return fields
    if isinstance(asked, bool) or not isinstance(asked, (int, float)) or asked != int(asked):
        raise RequestError("priority: must be a whole number", param="priority")
    return {**fields, "priority": encoded(effective_priority(client.priority, int(asked)))}
