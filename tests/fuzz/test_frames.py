"""ZeroMQ frames from strangers: each is an announcement or refused, and nothing else comes of it."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.discovery.heartbeat import decode
from ppd.proxy.errors import FormatError
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Announcement

OURS: dict[str, Any] = {
    "version": 1,
    "role": "D",
    "http_address": "10.0.0.5:8200",
    "models": ["m"],
    "coordinates": {"zmq_address": "10.0.0.5:9"},
    "incarnation": "1",
    "running": 3,
    "kv_usage": 0.25,
    "kv_capacity_tokens": 400_000,
}
PINGS: list[dict[str, Any]] = [
    {"type": "P", "http_address": "10.0.0.5:8100", "zmq_address": "10.0.0.5:21001"},
    {
        "type": "D",
        "http_address": "h:1",
        "zmq_address": "host:h,handshake:1,notify:2",
        "dp_size": 1,
        "tp_size": 8,
        "transfer_mode": "WRITE",
    },
]
FRAMES = [msgspec.msgpack.encode(message) for message in (OURS, *PINGS)]
ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def announced(frame: bytes) -> Announcement | None:
    """What a frame says, held against what the registry may be told; None where it is refused."""
    try:
        said = decode(frame)
    except FormatError as exc:
        assert len(exc.message) < 300
        return None
    worker = said.worker
    assert ADDRESS.fullmatch(worker.address), worker.address
    assert all(isinstance(text, str) for text in (*worker.models, *worker.coordinates.values(), worker.engine))
    if said.load is not None:
        assert 0 <= said.load.kv_usage <= 1 and said.load.running >= 0
    registry = Registry()
    registry.apply(said, 1.0)
    assert len(registry.views()) == (0 if said.leaving else 1)
    return said


@pytest.mark.parametrize("frame", FRAMES)
def test_the_frames_that_are_damaged_here_are_whole(frame: bytes) -> None:
    assert announced(frame) is not None


@given(st.sampled_from(FRAMES), st.lists(st.tuples(st.integers(0, 500), st.integers(0, 3), st.binary(max_size=3))))
def test_a_damaged_frame_is_an_announcement_or_refused(frame: bytes, edits: list[tuple[int, int, bytes]]) -> None:
    damaged = bytearray(frame)
    for at, cut, put in edits:
        start = at % (len(damaged) + 1)
        damaged[start : start + cut] = put
    announced(bytes(damaged))


@given(st.sampled_from([OURS, *PINGS]), st.data())
def test_any_value_in_any_field_is_an_announcement_or_refused(message: dict[str, Any], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from([*message]), min_size=1, max_size=3, unique=True))
    announced(msgspec.msgpack.encode({**message, **{name: data.draw(VALUES) for name in names}}))


@given(st.dictionaries(st.none() | st.integers(-9, 9) | st.booleans() | st.text(max_size=8), VALUES, max_size=4))
def test_maps_with_keys_that_are_no_names(message: dict[Any, Any]) -> None:
    announced(msgspec.msgpack.encode({**OURS, **message}))


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.5:\u0668\u0660",  # digits, but not those of a port
        "10.0.0.5:8080\n",
        "10.0.0.5:8080 ",
        "\uff11\uff10.0.0.5:80",
        "[fe80::1%25eth0]:80",
        "[::::]:80",
        "[1.2.3.4.5]:80",
        "a:0x50",
        "-:1:2",
        "a:00000",
    ],
)
def test_an_address_that_no_url_can_hold_is_refused(address: str) -> None:
    assert announced(msgspec.msgpack.encode({**OURS, "http_address": address})) is None
