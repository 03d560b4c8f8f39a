"""What a picker answers Envoy, as encoded messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from ..bodies.body_reader import Body
from ..bodies.shared_bytes import SharedBytes
from ..connectors.leg import leg, public_fields
from ..openai.body_members import Edited
from ..openai.request import Request
from .headers import ANSWERED, DESTINATION, LB_NAMESPACE, OWN_NAMESPACE
from .messages import OVERWRITE_IF_EXISTS_OR_ADD, ProcessingResponse

PIECE_BYTES = 62_000
"""Of a body that is sent back, in one message; as llm-d has it, below Envoy's and gRPC's usual limits."""


@cache
def carry_on(stage: str) -> bytes:
    """Envoy goes on as it would. stage: the field of `ProcessingRequest` that is answered."""
    answer = ProcessingResponse()
    getattr(answer, stage).SetInParent()
    return _encoded(answer)


def picked(stage: str, sent: Mapping[str, str], removed: Iterable[str], body: bytes | None = None) -> bytes:
    """Where a request goes. body: what takes the place of its own, where Envoy holds that."""
    answer = ProcessingResponse()
    common = getattr(answer, stage).response
    common.clear_route_cache = True
    _mutate(common.header_mutation, sent, removed)
    if body is not None:
        common.body_mutation.body = body
    if destination := sent.get(DESTINATION):
        told = answer.dynamic_metadata.fields[LB_NAMESPACE].struct_value
        told.fields[DESTINATION].string_value = destination
    return _encoded(answer)


def told(sent: Mapping[str, str]) -> bytes:
    """Headers for the client."""
    answer = ProcessingResponse()
    _mutate(answer.response_headers.response.header_mutation, sent, ())
    return _encoded(answer)


def pieces(stage: str, body: bytes, *, is_last: bool) -> Iterator[bytes]:
    """A body that goes on through the picker."""
    for at in range(0, max(1, len(body)), PIECE_BYTES):
        answer = ProcessingResponse()
        streamed = getattr(answer, stage).response.body_mutation.streamed_response
        streamed.body = body[at : at + PIECE_BYTES]
        streamed.end_of_stream = is_last and at + PIECE_BYTES >= len(body)
        yield _encoded(answer)


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> bytes:
    """Envoy answers the client itself."""
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = status
    immediate.body = body
    answer.dynamic_metadata.fields[OWN_NAMESPACE].struct_value.fields[ANSWERED].bool_value = True
    _mutate(immediate.headers, headers, ())
    return _encoded(answer)


def _mutate(mutation: Any, sent: Mapping[str, str], removed: Iterable[str]) -> None:
    mutation.remove_headers.extend(removed)
    for name, value in sent.items():
        option = mutation.set_headers.add()
        option.append_action = OVERWRITE_IF_EXISTS_OR_ADD
        option.header.key = name.lower()
        option.header.raw_value = value.encode("latin-1", "replace")


def _encoded(answer: Any) -> bytes:
    encoded: bytes = answer.SerializeToString()
    return encoded


def edited(request: Request) -> bytes | None:
    """The body that workers may see, where it is another than the client's."""
    fields = public_fields(request.fields)
    is_same = len(fields) == len(request.fields) and all(
        fields.get(name) is value for name, value in request.fields.items()
    )
    if is_same and not isinstance(request.fields, Edited):
        return None
    return leg(request.endpoint, fields, "", request.fields).body


def whole(body: Body) -> bytes:
    return bytes(body.view()) if isinstance(body, SharedBytes) else body
