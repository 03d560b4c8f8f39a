"""Answers are written in their encoding: Envoy reads in them what message objects would have said."""

from __future__ import annotations

from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2

from ppd.proxy.gateway import answers
from ppd.proxy.gateway.answers import PIECE_BYTES
from ppd.proxy.gateway.headers import DESTINATION, LB_NAMESPACE

SIZES = [0, 1, 80, 99, 100, 127, 128, 16_383, 16_384, 70_000]


def read(encoded: bytes) -> Any:
    return external_processor_pb2.ProcessingResponse.FromString(encoded)


def changes(mutation: Any) -> dict[str, bytes]:
    assert all(each.append_action == each.OVERWRITE_IF_EXISTS_OR_ADD for each in mutation.set_headers)
    return {each.header.key: each.header.raw_value for each in mutation.set_headers}


@pytest.mark.parametrize("stage", ["request_headers", "request_body"])
@pytest.mark.parametrize("size", SIZES)
def test_where_a_request_goes(stage: str, size: int) -> None:
    sent = {DESTINATION: "10.0.0.6:8000", "X-Long": "v" * size, "n" * max(1, min(size, 200)): "\xe9\u20ac"}
    answer = read(answers.picked(stage, sent, ["r" * max(1, size), "gone"], b"b" * size))
    response = getattr(answer, stage).response
    name = "n" * max(1, min(size, 200))
    assert changes(response.header_mutation) == {
        DESTINATION: b"10.0.0.6:8000",
        "x-long": b"v" * size,
        name: b"\xe9?",
    }
    assert list(response.header_mutation.remove_headers) == ["r" * max(1, size), "gone"]
    assert response.clear_route_cache
    assert response.body_mutation.WhichOneof("mutation") == "body" and response.body_mutation.body == b"b" * size
    assert answer.dynamic_metadata[LB_NAMESPACE][DESTINATION] == "10.0.0.6:8000"


def test_without_a_body_or_a_destination_neither_is_said() -> None:
    answer = read(answers.picked("request_body", {"a": "1"}, []))
    assert not answer.HasField("dynamic_metadata")
    assert not answer.request_body.response.HasField("body_mutation")


@pytest.mark.parametrize("size", SIZES)
def test_what_clients_are_told(size: int) -> None:
    for _ in range(2):
        answer = read(answers.told({"X-PPD-Route": "LOCAL", "X-Request-Id": "i" * size}))
        found = changes(answer.response_headers.response.header_mutation)
        assert found == {"x-ppd-route": b"LOCAL", "x-request-id": b"i" * size}
    assert read(answers.told({})).WhichOneof("response") == "response_headers"


@pytest.mark.parametrize("stage", ["request_body", "response_body"])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("size", [*SIZES, PIECE_BYTES, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 1])
def test_a_body_goes_back_in_pieces(stage: str, size: int, is_last: bool) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    found = [read(head + piece) for head, piece in answers.pieces(stage, body, is_last=is_last)]
    streamed = [getattr(each, stage).response.body_mutation.streamed_response for each in found]
    assert all(each.WhichOneof("response") == stage for each in found)
    assert b"".join(each.body for each in streamed) == body
    assert [each.end_of_stream for each in streamed] == [False] * (len(streamed) - 1) + [is_last]
