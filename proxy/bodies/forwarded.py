"""What the proxy reads of a request that it only forwards: the model it names, and members that end at the proxy."""

from __future__ import annotations

import msgspec

from ..admission.keys import Client
from ..admission.queue import effective_priority
from ..connectors.leg import public_fields
from ..errors import RequestError
from ..openai.body_members import check_depth, decoded, encoded
from ..openai.form import field as form_field
from ..openai.form import is_form
from ..openai.request import MODEL_LIMIT, Fields


class _ModelOnly(msgspec.Struct):
    model: str = ""


def model_of(content_type: str, body: bytes) -> str:
    """The model that a body names, "" where it names none; RequestError for a name that is too long."""
    if is_form(content_type):
        model = form_field(content_type, body, "model") or ""
    else:
        try:
            model = msgspec.json.decode(body, type=_ModelOnly).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            model = ""
    if len(model) > MODEL_LIMIT:
        raise RequestError(f"model: must be a name of at most {MODEL_LIMIT} characters", param="model")
    return model


def public_body(body: bytes, client: Client, depth_limit: int) -> bytes:
    """A JSON object without the members that end at the proxy, and with a `priority` that the client's key allows.

    The same bytes where that changes nothing. RequestError for a body
    that is no JSON object: workers accept more than JSON (NaN, UTF-16), and could find members there that were not
    checked here.
    """
    check_depth(body, depth_limit)
    try:
        fields = msgspec.json.decode(body, type=Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("the body must be a JSON object or a multipart form") from None
    kept = _in_class(public_fields(fields), client)
    return body if kept == fields else msgspec.json.encode(kept)


def _in_class(fields: Fields, client: Client) -> Fields:
    asked = decoded(fields["priority"]) if "priority" in fields else None
    if not client.name or asked is None:
        return fields
    if isinstance(asked, bool) or not isinstance(asked, (int, float)) or asked != int(asked):
        raise RequestError("priority: must be a whole number", param="priority")
    return {**fields, "priority": encoded(effective_priority(client.priority, int(asked)))}
