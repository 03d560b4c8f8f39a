"""Our few messages against Envoy's own: names, numbers and types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2
from envoy.type.v3 import http_status_pb2
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppd.proxy import plane
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


HEADERS = {":path": b"/v1/chat/completions", "x-long": b"y" * 300, "accept": b"caf\xe9"}
ODD_HEADERS = {**HEADERS, "X-Upper": b"1", "x-empty": b"", "x-cut": b"1\r\n2", "x_y": b"3"}


def told(stage: str, *, is_last: bool = False, metadata: str = "none", more: str = "", **values: Any) -> bytes:
    """metadata: none, empty, or the name of a namespace. more: of the message's other fields, those that are set."""
    sent = messages.ProcessingRequest()
    part = getattr(sent, stage)
    part.SetInParent()
    if stage.endswith("_body"):
        part.body, part.end_of_stream = values["body"], is_last
    elif stage.endswith("_headers"):
        for name, value in values["headers"].items():
            part.headers.headers.add(key=name, raw_value=value)
        part.end_of_stream = is_last
    if metadata != "none":
        sent.metadata_context.SetInParent()
    if metadata not in ("none", "empty"):
        sent.metadata_context.filter_metadata[metadata].update({"names": ["a", "b"]})
    sent.observability_mode = "shown" in more
    if "modes" in more:
        sent.protocol_config.request_body_mode = messages.FULL_DUPLEX_STREAMED
    encoded: bytes = sent.SerializeToString()
    return encoded


SENT = [
    told(stage, is_last=is_last, metadata=metadata, more=more, headers=headers, body=body)
    for stage, headers, body in (
        ("request_headers", HEADERS, b""),
        ("request_headers", ODD_HEADERS, b""),
        ("response_headers", {":status": b"200"}, b""),
        ("response_headers", {}, b""),
        *(("request_body", {}, size * b"x") for size in (0, 1, 120, 128, 16_384)),
        ("response_body", {}, b"{}"),
        ("request_trailers", {}, b""),
        ("response_trailers", {}, b""),
    )
    for is_last in (True, False)
    for metadata in ("none", "empty", "envoy.lb")
    for more in ("", "shown", "modes", "shown modes")
]


def read(data: bytes) -> Any:
    """Of a `Stage`, what can be compared; None for what is no message."""
    try:
        stage = messages.read_stage(data)
    except DecodeError:
        return None
    metadata = {} if stage.metadata is None else {name: dict(of) for name, of in stage.metadata.filter_metadata.items()}
    return *msgspec.structs.astuple(msgspec.structs.replace(stage, metadata=None)), metadata


def assert_read_alike(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With compiled code, and without."""
    found = read(data)
    with monkeypatch.context() as without:
        without.setattr(plane, "IS_BUILT", False)
        assert read(data) == found
    return found


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\x12", told("request_body", body=b"x" * 3_000_000, is_last=True), *SENT]
)
def test_a_stage_is_read_as_its_message_says(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_read_alike(data, monkeypatch)
    assert read(memoryview(data)) == read(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "is_usual"),
    [
        (told("request_headers", headers=HEADERS, metadata="envoy.lb", more="modes", is_last=True), True),
        (told("response_headers", headers={":status": b"200"}, metadata="empty"), True),
        (told("request_body", body=b"{}", is_last=True, metadata="empty"), True),
        (told("request_body", body=b"", more="shown"), True),
        (told("request_headers", headers=ODD_HEADERS), False),
        (told("request_trailers"), False),
        (told("request_body", body=b"1") + told("request_body", body=b"2"), False),
        (b"", False),
    ],
)
def test_what_is_usual_is_read_from_its_bytes(data: bytes, is_usual: bool) -> None:
    assert (plane.envoy_stage(data) is not None) is is_usual


@given(st.sampled_from(SENT), st.lists(st.tuples(st.integers(0, 900), st.integers(0, 2), st.binary(max_size=2))))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_one_is_read_as_its_message_says(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, edits: list[tuple[int, int, bytes]]
) -> None:
    damaged = bytearray(sent)
    for at, cut, put in edits:
        start = at % (len(damaged) + 1)
        damaged[start : start + cut] = put
    assert_read_alike(bytes(damaged), monkeypatch)
