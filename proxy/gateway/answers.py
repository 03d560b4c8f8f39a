"""What a picker answers Envoy, as encoded messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

from ..bodies.body_reader import Body
from ..bodies.shared_bytes import SharedBytes
from ..connectors.leg import leg, public_fields
from ..openai.body_members import Edited
from ..openai.request import Request
from .headers import ANSWERED, DESTINATION, LB_NAMESPACE, OWN_NAMESPACE, PREFILLER
from .messages import (
    BODY,
    END_OF_STREAM,
    OVERWRITE_IF_EXISTS_OR_ADD,
    CommonResponse,
    HeaderValueOption,
    ProcessingResponse,
    key_of,
)
from .wire.fields import field, field_head

PIECE_BYTES = 62_000
"""Of a body that is sent back, in one message; as llm-d has it, below Envoy's and gRPC's usual limits."""


_KEPT = 1024  # of each kind, encoded
_STAGES = {
    name: key_of("ProcessingResponse", name)
    for name in ("request_headers", "response_headers", "request_body", "response_body")
}
_RESPONSE = key_of("HeadersResponse", "response")  # and of a `BodyResponse`
_HEADER_MUTATION, _BODY_MUTATION = (key_of("CommonResponse", name) for name in ("header_mutation", "body_mutation"))
_STREAMED = key_of("BodyMutation", "streamed_response")
_SET_HEADERS, _REMOVE_HEADERS = (key_of("HeaderMutation", name) for name in ("set_headers", "remove_headers"))
_HEADER, _KEY, _VALUE = (
    key_of("HeaderValueOption", "header"),
    key_of("HeaderValue", "key"),
    key_of("HeaderValue", "raw_value"),
)
_REPLACES: bytes = HeaderValueOption(append_action=OVERWRITE_IF_EXISTS_OR_ADD).SerializeToString()
_SHORT = b"%c%%c%c%%c%c%%c%%b%c%%c%%b%b" % (_SET_HEADERS, _HEADER, _KEY, _VALUE, _REPLACES)
_SHORT_BYTES = 100  # of name and value: all sizes in the option then have one byte
_CLEARS_ROUTE: bytes = CommonResponse(clear_route_cache=True).SerializeToString()


@cache
def carry_on(stage: str) -> bytes:
    """Envoy goes on as it would. stage: the field of `ProcessingRequest` that is answered."""
    answer = ProcessingResponse()
    getattr(answer, stage).SetInParent()
    return _encoded(answer)


def picked(stage: str, sent: Mapping[str, str], removed: Iterable[str], body: bytes | None = None) -> bytes:
    """Where a request goes. body: what takes the place of its own, where Envoy holds that."""
    response = field(_HEADER_MUTATION, _mutation(sent, removed))
    if body is not None:
        response += field(_BODY_MUTATION, field(BODY, body))
    answer = field(_STAGES[stage], field(_RESPONSE, response + _CLEARS_ROUTE))
    destination = sent.get(DESTINATION)
    return answer + _destined(destination) if destination else answer


def told(sent: Mapping[str, str]) -> bytes:
    """Headers for the client."""
    changes = b"".join([_kept_option(name, value) for name, value in sent.items()])
    return field(_STAGES["response_headers"], field(_RESPONSE, field(_HEADER_MUTATION, changes)))


def pieces(stage: str, body: bytes, *, is_last: bool) -> Iterator[tuple[bytes, memoryview]]:
    """A body that goes on through the picker: messages, each in two parts."""
    whole = memoryview(body)
    for at in range(0, max(1, len(body)), PIECE_BYTES):
        piece = whole[at : at + PIECE_BYTES]
        head = END_OF_STREAM if is_last and at + PIECE_BYTES >= len(body) else b""
        head += field_head(BODY, len(piece))
        for outer in (_STREAMED, _BODY_MUTATION, _RESPONSE, _STAGES[stage]):
            head = field_head(outer, len(head) + len(piece)) + head
        yield head, piece


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> bytes:
    """Envoy answers the client itself."""
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = status
    immediate.body = body
    answer.dynamic_metadata.fields[OWN_NAMESPACE].struct_value.fields[ANSWERED].bool_value = True
    immediate.headers.MergeFromString(_mutation(headers, ()))
    return _encoded(answer)


@lru_cache(_KEPT)
def _destined(destination: str) -> bytes:
    """The metadata that names it."""
    answer = ProcessingResponse()
    told = answer.dynamic_metadata.fields[LB_NAMESPACE].struct_value
    told.fields[DESTINATION].string_value = destination
    return _encoded(answer)


def _mutation(sent: Mapping[str, str], removed: Iterable[str]) -> bytes:
    """A `HeaderMutation`."""
    changes = [(_kept_option if name in _REPEATED else _option)(name, value) for name, value in sent.items()]
    changes += [field(_REMOVE_HEADERS, name.encode()) for name in removed]
    return b"".join(changes)


def _option(name: str, value: str) -> bytes:
    """One of a mutation's `set_headers`."""
    key, raw = name.lower().encode(), value.encode("latin-1", "replace")
    of_key, of_raw = len(key), len(raw)
    if of_key + of_raw < _SHORT_BYTES:
        within = of_key + of_raw + 4
        return _SHORT % (within + 2 + len(_REPLACES), within, of_key, key, of_raw, raw)
    return field(_SET_HEADERS, field(_HEADER, field(_KEY, key) + field(_VALUE, raw)) + _REPLACES)


_kept_option = lru_cache(_KEPT)(_option)
"""For what is the same in many turns, as most is that the picker tells clients."""
_REPEATED = frozenset({DESTINATION, PREFILLER, "content-type"})
"""Of what it tells workers."""


def _encoded(answer: Any) -> bytes:
    encoded: bytes = answer.SerializeToString()
    return encoded


def edited(request: Request) -> bytes | None:
    """The body that workers may see, where it is another than the client's."""
    fields = public_fields(request.fields)
    if fields == request.fields and not isinstance(request.fields, Edited):
        return None
    return leg(request.endpoint, fields, "", request.fields).body


def whole(body: Body) -> bytes:
    return bytes(body.view()) if isinstance(body, SharedBytes) else body
