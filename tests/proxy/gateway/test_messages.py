"""Our few messages against Envoy's own: names, numbers and types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2
from envoy.type.v3 import http_status_pb2
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.gateway import messages

ENVOYS = {
    each.full_name: each
    for file in (base_pb2, external_processor_pb2, http_status_pb2)
    for each in file.DESCRIPTOR.message_types_by_name.values()
}
ENUMS_AS_INTEGERS = 14, 5  # Envoy's type of an enum's field, and ours
OURS = [name for name in messages.FIELDS if name.startswith("envoy.") and not name.endswith("Entry")]


def shapes(message: Any, names: Any = None) -> Iterator[tuple[Any, ...]]:
    for field in message.fields:
        if names is None or field.name in names:
            of = field.message_type.full_name if field.message_type else ""
            kind = ENUMS_AS_INTEGERS[1] if field.type == ENUMS_AS_INTEGERS[0] else field.type
            group = field.containing_oneof.name if field.containing_oneof else ""
            yield field.number, field.name, kind, field.is_repeated, of, group


@pytest.mark.parametrize("name", OURS)
def test_fields_are_envoys(name: str) -> None:
    ours = messages.POOL.FindMessageTypeByName(name)
    assert sorted(shapes(ours)) == sorted(shapes(ENVOYS[name], [field.name for field in ours.fields]))


def test_a_message_with_a_map_means_the_same_to_both() -> None:
    sent = messages.ProcessingRequest(observability_mode=True)
    sent.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/chat/completions")
    sent.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({"names": ["a", "b"]})
    read = external_processor_pb2.ProcessingRequest.FromString(sent.SerializeToString())
    assert read.request_headers.headers.headers[0].raw_value == b"/v1/chat/completions"
    assert list(read.metadata_context.filter_metadata["envoy.lb.subset_hint"]["names"]) == ["a", "b"]
    assert messages.ProcessingRequest.FromString(read.SerializeToString()) == sent


def test_numbers_of_enums() -> None:
    assert processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED == messages.FULL_DUPLEX_STREAMED
    assert base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD == messages.OVERWRITE_IF_EXISTS_OR_ADD


def body_message(
    stage: str, body: bytes, *, is_last: bool = False, metadata: bool = False, more: bool = False
) -> bytes:
    sent = messages.ProcessingRequest()
    part = getattr(sent, stage)
    part.body, part.end_of_stream = body, is_last
    part.SetInParent()
    if metadata:
        sent.metadata_context.SetInParent()
    sent.observability_mode = more
    encoded: bytes = sent.SerializeToString()
    return encoded


@pytest.mark.parametrize("stage", ["request_body", "response_body"])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("metadata", [True, False])
@pytest.mark.parametrize("size", [1, 120, 128, 16_384, 3_000_000])
def test_a_piece_of_a_body_is_read_from_its_encoding(stage: str, is_last: bool, metadata: bool, size: int) -> None:
    sent = body_message(stage, b"x" * size, is_last=is_last, metadata=metadata)
    assert messages.body_piece(memoryview(sent)) == (stage, b"x" * size, is_last)
    assert messages.body_piece(body_message(stage, b"x" * size, is_last=is_last, metadata=metadata, more=True)) is None


BODIES = [
    body_message(stage, body, is_last=is_last, metadata=metadata)
    for stage in ("request_body", "response_body")
    for body in (b"", b"{}", b"x" * 127, b"x" * 200)
    for is_last in (True, False)
    for metadata in (True, False)
]


@given(st.sampled_from(BODIES), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2), st.binary(max_size=2))))
def test_what_is_read_of_a_damaged_one_is_what_its_message_says(
    sent: bytes, edits: list[tuple[int, int, bytes]]
) -> None:
    damaged = bytearray(sent)
    for at, cut, put in edits:
        start = at % (len(damaged) + 1)
        damaged[start : start + cut] = put
    read = messages.body_piece(bytes(damaged))
    try:
        message = messages.ProcessingRequest.FromString(bytes(damaged))
    except DecodeError:
        assert read is None
        return
    if read is not None:
        stage, body, is_last = read
        assert message.WhichOneof("request") == stage
        part = getattr(message, stage)
        assert (part.body, part.end_of_stream, message.observability_mode) == (body, is_last, False)
