"""The messages of Envoy's external processing and of gRPC's health checks, as far as a picker needs them.

`envoy.service.ext_proc.v3` and what it refers to, and `grpc.health.v1`, written down as descriptors of our own: the
packages that have all of them bring a gRPC library and a top-level package `envoy`. Fields that are not here are
skipped when they come. `tests/proxy/gateway/test_messages.py` compares names, numbers and types with Envoy's own.

Needs the extra `gateway` (protobuf).
"""

from __future__ import annotations

from typing import Any

import msgspec
from google.protobuf import struct_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from .. import plane
from .headers import read
from .wire.fields import key

_EXT_PROC, _CORE, _TYPE = "envoy.service.ext_proc.v3", "envoy.config.core.v3", "envoy.type.v3"
_HEALTH = "grpc.health.v1"
_SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "string": FieldDescriptorProto.TYPE_STRING,
    "int32": FieldDescriptorProto.TYPE_INT32,  # enums too: on the wire they are the same
    "uint32": FieldDescriptorProto.TYPE_UINT32,
}

# By message: each field as number, name and type; a message's type by its full name, `*` before a repeated one, and
# after a slash the group of which only one is set.
FIELDS: dict[str, tuple[str, ...]] = {
    f"{_CORE}.HeaderValue": ("1 key string", "2 value string", "3 raw_value bytes"),
    f"{_CORE}.HeaderMap": (f"1 headers *{_CORE}.HeaderValue",),
    f"{_CORE}.HeaderValueOption": (f"1 header {_CORE}.HeaderValue", "3 append_action int32"),
    f"{_CORE}.Metadata.FilterMetadataEntry": ("1 key string", "2 value google.protobuf.Struct"),
    f"{_CORE}.Metadata": (f"1 filter_metadata *{_CORE}.Metadata.FilterMetadataEntry",),
    f"{_TYPE}.HttpStatus": ("1 code int32",),
    f"{_EXT_PROC}.HttpHeaders": (f"1 headers {_CORE}.HeaderMap", "3 end_of_stream bool"),
    f"{_EXT_PROC}.HttpBody": ("1 body bytes", "2 end_of_stream bool"),
    f"{_EXT_PROC}.HttpTrailers": (f"1 trailers {_CORE}.HeaderMap",),
    f"{_EXT_PROC}.ProtocolConfiguration": ("1 request_body_mode int32", "2 response_body_mode int32"),
    f"{_EXT_PROC}.ProcessingRequest": (
        f"2 request_headers {_EXT_PROC}.HttpHeaders/request",
        f"3 response_headers {_EXT_PROC}.HttpHeaders/request",
        f"4 request_body {_EXT_PROC}.HttpBody/request",
        f"5 response_body {_EXT_PROC}.HttpBody/request",
        f"6 request_trailers {_EXT_PROC}.HttpTrailers/request",
        f"7 response_trailers {_EXT_PROC}.HttpTrailers/request",
        f"8 metadata_context {_CORE}.Metadata",
        "10 observability_mode bool",
        f"11 protocol_config {_EXT_PROC}.ProtocolConfiguration",
    ),
    f"{_EXT_PROC}.HeaderMutation": (f"1 set_headers *{_CORE}.HeaderValueOption", "2 remove_headers *string"),
    f"{_EXT_PROC}.StreamedBodyResponse": ("1 body bytes", "2 end_of_stream bool"),
    f"{_EXT_PROC}.BodyMutation": (
        "1 body bytes/mutation",
        "2 clear_body bool/mutation",
        f"3 streamed_response {_EXT_PROC}.StreamedBodyResponse/mutation",
    ),
    f"{_EXT_PROC}.CommonResponse": (
        f"2 header_mutation {_EXT_PROC}.HeaderMutation",
        f"3 body_mutation {_EXT_PROC}.BodyMutation",
        "5 clear_route_cache bool",
    ),
    f"{_EXT_PROC}.HeadersResponse": (f"1 response {_EXT_PROC}.CommonResponse",),
    f"{_EXT_PROC}.BodyResponse": (f"1 response {_EXT_PROC}.CommonResponse",),
    f"{_EXT_PROC}.TrailersResponse": (f"1 header_mutation {_EXT_PROC}.HeaderMutation",),
    f"{_EXT_PROC}.ImmediateResponse": (
        f"1 status {_TYPE}.HttpStatus",
        f"2 headers {_EXT_PROC}.HeaderMutation",
        "3 body bytes",
        "5 details string",
    ),
    f"{_EXT_PROC}.ProcessingResponse": (
        f"1 request_headers {_EXT_PROC}.HeadersResponse/response",
        f"2 response_headers {_EXT_PROC}.HeadersResponse/response",
        f"3 request_body {_EXT_PROC}.BodyResponse/response",
        f"4 response_body {_EXT_PROC}.BodyResponse/response",
        f"5 request_trailers {_EXT_PROC}.TrailersResponse/response",
        f"6 response_trailers {_EXT_PROC}.TrailersResponse/response",
        f"7 immediate_response {_EXT_PROC}.ImmediateResponse/response",
        "8 dynamic_metadata google.protobuf.Struct",
    ),
    f"{_HEALTH}.HealthCheckRequest": ("1 service string",),
    f"{_HEALTH}.HealthCheckResponse": ("1 status int32",),
}


def _add_field(message: DescriptorProto, line: str) -> None:
    """One line of `FIELDS`."""
    number, name, kind = line.split()
    kind, _, group = kind.partition("/")
    field = message.field.add(name=name, number=int(number))
    repeated = kind.startswith("*")
    field.label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
    kind = kind.removeprefix("*")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{kind}"
    if group:
        names = [one.name for one in message.oneof_decl]
        if group not in names:
            message.oneof_decl.add(name=group)
            names.append(group)
        field.oneof_index = names.index(group)


def _pool() -> DescriptorPool:
    """One of our own, so that whoever has Envoy's messages in the same process keeps them."""
    pool = DescriptorPool()
    for known in (struct_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    files: dict[str, FileDescriptorProto] = {}
    for full_name, lines in FIELDS.items():
        package = next(each for each in (_EXT_PROC, _CORE, _TYPE, _HEALTH) if full_name.startswith(f"{each}."))
        if package not in files:
            needs = [struct_pb2.DESCRIPTOR.name, *(f"{each}.proto" for each in files)]
            files[package] = FileDescriptorProto(
                name=f"{package}.proto", package=package, syntax="proto3", dependency=needs
            )
        *outer, name = full_name.removeprefix(f"{package}.").split(".")
        if outer:  # the entry of a map
            entry = DescriptorProto(name=name)
            entry.options.map_entry = True
            holder = _entries.setdefault(".".join((package, *outer)), [])
            holder.append(entry)
            for line in lines:
                _add_field(entry, line)
            continue
        message = files[package].message_type.add(name=name)
        message.nested_type.extend(_entries.pop(full_name, []))
        for line in lines:
            _add_field(message, line)
    for file in files.values():
        pool.Add(file)
    return pool


_entries: dict[str, list[DescriptorProto]] = {}
POOL = _pool()


def _message(full_name: str) -> Any:
    return GetMessageClass(POOL.FindMessageTypeByName(full_name))


ProcessingRequest = _message(f"{_EXT_PROC}.ProcessingRequest")
Metadata = _message(f"{_CORE}.Metadata")
ProcessingResponse = _message(f"{_EXT_PROC}.ProcessingResponse")
CommonResponse = _message(f"{_EXT_PROC}.CommonResponse")
HeaderValueOption = _message(f"{_CORE}.HeaderValueOption")
HealthCheckRequest = _message(f"{_HEALTH}.HealthCheckRequest")
HealthCheckResponse = _message(f"{_HEALTH}.HealthCheckResponse")
BUFFERED, FULL_DUPLEX_STREAMED = 2, 4
"""Of `ProtocolConfiguration`'s body modes (`ProcessingMode.BodySendMode`)."""
OVERWRITE_IF_EXISTS_OR_ADD = 2
"""Of `HeaderValueOption.append_action`."""


def key_of(message: str, name: str) -> int:
    """Of a field that is a string, bytes or a message: what stands before it."""
    full_name = next(each for each in FIELDS if each.endswith(f".{message}"))
    number: int = POOL.FindMessageTypeByName(full_name).fields_by_name[name].number
    return key(number)


BODY, END_OF_STREAM = key_of("HttpBody", "body"), b"\x10\x01"
"""Of `HttpBody` and of `StreamedBodyResponse`: what stands before the body, and `end_of_stream` where it is true."""


class Stage(msgspec.Struct, frozen=True):
    """What Envoy tells of a request: its head, a piece of its body, its trailers, or the same of its answer."""

    name: str  # of its field in `ProcessingRequest`; empty: it tells none that is known
    headers: dict[str, str]  # of a head, as `headers.read` has them
    piece: bytes  # of a body
    is_last: bool  # nothing comes behind it but trailers
    modes: tuple[int, int] | None  # in which the bodies of the request and of its answer come; None: not told
    metadata: Any  # a `Metadata`; None: it says nothing
    is_only_shown: bool  # Envoy waits for no answer


_STAGES = {
    field.number: field.name for field in ProcessingRequest.DESCRIPTOR.fields if field.containing_oneof is not None
}


def read_stage(data: bytes | memoryview) -> Stage:
    """DecodeError for what is no `ProcessingRequest`."""
    usual = plane.envoy_stage(data) if plane.IS_BUILT else None
    if usual is None:
        return _decoded_stage(ProcessingRequest.FromString(data))
    number, headers, piece, is_last, modes, metadata, is_only_shown = usual
    told = Metadata.FromString(metadata) if metadata else None
    return Stage(_STAGES[number], headers, piece, is_last, modes, told, is_only_shown)


def _decoded_stage(request: Any) -> Stage:
    name, modes, metadata = request.WhichOneof("request") or "", request.protocol_config, request.metadata_context
    part: Any = getattr(request, name, None)
    is_head, is_body = name.endswith("_headers"), name.endswith("_body")
    return Stage(
        name,
        read(part.headers) if is_head else {},
        part.body if is_body else b"",
        (is_head or is_body) and part.end_of_stream,
        (modes.request_body_mode, modes.response_body_mode) if request.HasField("protocol_config") else None,
        metadata if metadata.filter_metadata else None,
        request.observability_mode,
    )
