"""The messages between producers and consumers, and their checks. Nothing that comes in is ever unpickled.

Metadata, withdrawals and verdicts are small JSON objects with a `version`. Data are a safetensors file with one tensor,
`ec_cache`, whose `__metadata__` says whose it is: https://huggingface.co/docs/safetensors (format).
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from .reservations import Embedding, Key, Name, Offer

VERSION = 1
MOST_CONTROL_BYTES = 8 << 10  # of a message without data, and of a data message's head
TENSOR = "ec_cache"

Version = Annotated[int, msgspec.Meta(ge=VERSION, le=VERSION)]


class Malformed(ValueError):
    """A message that is not kept; says what is wrong with it, not what it holds."""


class Metadata(msgspec.Struct, frozen=True, tag="metadata"):
    """A producer encodes this, or has."""

    offer: Offer
    version: Version = VERSION


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """A producer can't send what was granted."""

    leg: Name
    item: Name
    version: Version = VERSION

    @property
    def key(self) -> Key:
        return Key(self.leg, self.item)


class Answer(msgspec.Struct, frozen=True):
    """A consumer's verdict on what a producer offered."""

    consumer: Name
    leg: Name
    item: Name
    is_granted: bool
    version: Version = VERSION

    @property
    def key(self) -> Key:
        return Key(self.leg, self.item)


class Data(msgspec.Struct, frozen=True):
    """An embedding, row by row."""

    key: Key
    embedding: Embedding
    rows: bytes


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Whose(msgspec.Struct, forbid_unknown_fields=True):
    version: Literal["1"]
    leg: Name
    item: Name


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    """Of a safetensors file."""

    whose: _Whose = msgspec.field(name="__metadata__")
    tensor: _Tensor = msgspec.field(name=TENSOR)


T = TypeVar("T")
_METADATA: msgspec.json.Decoder[Metadata | Withdrawn] = msgspec.json.Decoder(Metadata | Withdrawn)
_ANSWER = msgspec.json.Decoder(Answer)
_HEAD = msgspec.json.Decoder(_Head)


def encode(message: Metadata | Withdrawn | Answer) -> bytes:
    return msgspec.json.encode(message)


def decode_metadata(message: bytes) -> Metadata | Withdrawn:
    return _decode(message, _METADATA)


def decode_answer(message: bytes) -> Answer:
    return _decode(message, _ANSWER)


def encode_data(data: Data) -> bytes:
    """ValueError: there are other bytes than the shape says."""
    size = data.embedding.size_bytes
    if len(data.rows) != size:
        raise ValueError(f"{len(data.rows)} bytes of data for {data.embedding}, which has {size}")
    head = msgspec.json.encode(
        _Head(
            _Whose("1", data.key.leg, data.key.item),
            _Tensor(data.embedding.dtype, list(data.embedding.shape), (0, size)),
        )
    )
    head += b" " * (-len(head) % 8)  # the data begin aligned
    return b"".join((len(head).to_bytes(8, "little"), head, data.rows))


def decode_data(message: bytes, max_item_bytes: int) -> Data:
    """Malformed: it is none, or larger than `max_item_bytes`."""
    head_bytes = int.from_bytes(message[:8], "little")
    if len(message) < 8 or not 0 < head_bytes <= min(MOST_CONTROL_BYTES, len(message) - 8):
        raise Malformed(f"a safetensors head must have 1 to {MOST_CONTROL_BYTES} bytes, and be there")
    head = _decode(message[8 : 8 + head_bytes], _HEAD)
    try:
        embedding = msgspec.convert({"shape": head.tensor.shape, "dtype": head.tensor.dtype}, Embedding)
    except msgspec.ValidationError as exc:
        raise Malformed(f"{TENSOR}: {exc}") from exc
    size, there = embedding.size_bytes, len(message) - 8 - head_bytes
    if size > max_item_bytes:
        raise Malformed(f"{TENSOR} has {size} bytes, more than max_item_bytes ({max_item_bytes})")
    if head.tensor.data_offsets != (0, size) or there != size:
        raise Malformed(f"{TENSOR} must have the {size} bytes of its shape, and be alone; {there} are there")
    return Data(Key(head.whose.leg, head.whose.item), embedding, message[8 + head_bytes :])


def most_data_bytes(max_item_bytes: int) -> int:
    return 8 + MOST_CONTROL_BYTES + max_item_bytes


def _decode(message: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    if len(message) > MOST_CONTROL_BYTES:
        raise Malformed(f"a message may have {MOST_CONTROL_BYTES} bytes, this one has {len(message)}")
    try:
        return decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Malformed(str(exc)) from exc
