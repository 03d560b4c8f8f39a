"""What goes over the wire, and what is refused of what comes in."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.servers.ec_redis.reservations import Embedding, Key, Offer
from ppd.servers.ec_redis.settings import read_settings
from ppd.servers.ec_redis.wire import (
    MOST_CONTROL_BYTES,
    Answer,
    Data,
    Malformed,
    Metadata,
    Withdrawn,
    decode_answer,
    decode_data,
    decode_metadata,
    encode,
    encode_data,
)

ROWS = Embedding((2, 3), "BF16")
DATA = Data(Key("leg", "a"), ROWS, b"0123456789ab")
OFFER = Offer("E1", "leg", "a", ROWS)


def test_messages_come_back_as_they_were() -> None:
    assert decode_metadata(encode(Metadata(OFFER))) == Metadata(OFFER)
    assert decode_metadata(encode(Withdrawn("leg", "a"))).key == Key("leg", "a")  # type: ignore[union-attr]
    assert decode_answer(encode(Answer("PD1", "leg", "a", True))) == Answer("PD1", "leg", "a", True)
    assert decode_data(encode_data(DATA), 12) == DATA


def test_data_are_a_safetensors_file() -> None:
    """As https://huggingface.co/docs/safetensors says; with the library itself: tests/vllm/test_ec_redis.py."""
    file = encode_data(DATA)
    size = int.from_bytes(file[:8], "little")
    assert (8 + size) % 8 == 0 and file[8 + size :] == DATA.rows
    assert json.loads(file[8 : 8 + size]) == {
        "__metadata__": {"version": "1", "leg": "leg", "item": "a"},
        "ec_cache": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    }


def test_only_rows_of_their_shape_are_sent() -> None:
    with pytest.raises(ValueError, match="11 bytes"):
        encode_data(Data(DATA.key, ROWS, DATA.rows[1:]))


def file(rows: bytes = DATA.rows, **changed: object) -> bytes:
    head: dict[str, object] = {
        "__metadata__": {"version": "1", "leg": "leg", "item": "a"},
        "ec_cache": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]} | changed,
    }
    told = json.dumps(head).encode()
    return len(told).to_bytes(8, "little") + told + rows


def with_head(head: object) -> bytes:
    told = json.dumps(head).encode()
    return len(told).to_bytes(8, "little") + told + DATA.rows


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "head"),
        (b"\x80\x04\x95pickled.", "head"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "head"),
        (b"\0" * 8 + b"{}", "head"),
        (file(DATA.rows[1:]), "11 are there"),
        (file(DATA.rows + b"x"), "13 are there"),
        (file(dtype="I64"), "dtype"),
        (file(shape=[2]), "shape"),
        (file(shape=[2, 3, 1]), "shape"),
        (file(shape=[0, 3]), "shape"),
        (file(shape=[-2, -3]), "shape"),
        (file(shape=[1 << 40, 3]), "shape"),
        (file(shape=[1 << 20, 1 << 20]), "max_item_bytes"),
        (file(data_offsets=[0, 6]), "be alone"),
        (file(data_offsets=[6, 12]), "be alone"),
        (file(shape=[2, 9], data_offsets=[0, 36]), "36 bytes"),
        (with_head({"ec_cache": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}), "__metadata__"),
        (with_head({"__metadata__": {"version": "2", "leg": "l", "item": "a"}}), "version|ec_cache"),
        (with_head([]), "object"),
    ],
)
def test_data_that_can_not_be_are_refused(message: bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        decode_data(message, 64)


def test_data_beyond_max_item_bytes_are_refused() -> None:
    with pytest.raises(Malformed, match=r"max_item_bytes \(11\)"):
        decode_data(encode_data(DATA), 11)


@pytest.mark.parametrize("decode", [decode_metadata, decode_answer])
@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x80\x04.",
        b"[]",
        b'{"type":"metadata"}',
        b'{"type":"other","leg":"l","item":"i"}',
        encode(Metadata(OFFER)).replace(b'"version":1', b'"version":2'),
        encode(Metadata(OFFER)).replace(b'"leg":"leg"', b'"leg":""'),
        encode(Answer("PD1", "leg", "a", True)).replace(b"true", b'"yes"'),
        encode(Metadata(OFFER)) + b" " * MOST_CONTROL_BYTES,
        encode(Answer("PD1", "leg", "a", True)) + b" " * MOST_CONTROL_BYTES,
        '{"leg":"\ud800"}'.encode("utf-8", "surrogatepass"),
        encode(Metadata(OFFER)).replace(b'"leg":"leg"', rb'"leg":"\ud800"'),
        *(head + b"[" * 4000 for head in (b'{"type":', b'{"type":"metadata","more":', b'{"more":')),
    ],
)
def test_control_messages_that_can_not_be_are_refused(decode: Callable[[bytes], object], message: bytes) -> None:
    with pytest.raises(Malformed):
        decode(message)


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 200))
def test_damaged_data_are_refused_or_as_their_shape_says(noise: bytes, at: int, until: int) -> None:
    whole = encode_data(DATA)
    try:
        data = decode_data(whole[:at] + noise + whole[until:], 64)
    except Malformed:
        return
    assert len(data.rows) == data.embedding.size_bytes


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"redis_timeout_s": 0}, "redis_timeout_s"),
        ({"max_item_bytes": 1 << 30}, "max_item_bytes"),
        ({"receive_threads": 0}, "receive_threads"),
        ({"name": "a b"}, "name"),
        ({"redis_port": 1}, "redis_port"),
        ({"transport": 1}, "transport"),
    ],
)
def test_a_setting_that_can_not_be_is_named(extra: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=f"ec_connector_extra_config: .*{why}"):
        read_settings(extra)
