"""The three messages as they are on the wire, and what a hostile one does: nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.discovery.heartbeat import Heartbeat, decode
from ppd.proxy.errors import FormatError
from ppd.proxy.fleet.worker import EventSource, Role, Source

OURS: dict[str, Any] = {
    "version": 1,
    "role": "D",
    "http_address": "10.0.0.5:8200",
    "models": ["m"],
    "engine_version": "0.33.0",
    "incarnation": "1763660000.12",
    "running": 3,
    "waiting": 1,
    "kv_usage": 0.25,
    "kv_capacity_tokens": 400_000,
    "draining": True,
}
P2P = {"type": "P", "http_address": "10.0.0.5:8100", "zmq_address": "10.0.0.5:21001"}
MORIIO = {
    "type": "D",
    "http_address": "10.0.0.5:8100",
    "zmq_address": "host:10.0.0.5,handshake:6301,notify:61005",
    "dp_size": 1,
    "tp_size": 8,
    "transfer_mode": "WRITE",
}


HEADS = ("engine", "engine_version", "connector", "incarnation", "profile")
HOSTILE = ("a\r\nX: 1", "a\nb", "a b", "a\x00", "a\x7f", "\u00e9", "x" * 257)


def pack(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def test_our_heartbeat_survives_the_wire() -> None:
    said = decode(Heartbeat(**OURS).encode())
    assert said.worker.role is Role.DECODE
    assert said.worker.source is Source.AGENT
    assert (said.worker.models, said.worker.incarnation) == (("m",), "1763660000.12")
    assert said.load is not None
    assert (said.load.running, said.load.kv_capacity_tokens, said.draining) == (3, 400_000, True)


def test_a_heartbeat_says_which_names_are_of_one_model() -> None:
    said = decode(Heartbeat(**{**OURS, "models": ["m", "n"]}, aliases={"n": "m"}).encode())
    assert said.worker.aliases == {"n": "m"}


def test_a_heartbeat_says_where_kv_events_are_published() -> None:
    source = EventSource("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5558", 2)
    assert decode(Heartbeat(**OURS, kv_events=source).encode()).worker.kv_events == source


@pytest.mark.parametrize(
    "source",
    [
        {"endpoint": "tcp://10.0.0.6:5557"},
        {"endpoint": "tcp://10.0.0.5:5557", "replay_endpoint": "tcp://10.0.0.6:5558"},
        {"endpoint": "inproc://events"},
        {"endpoint": "ipc:///tmp/events"},
        {"endpoint": "tcp://10.0.0.5:*"},
        {"endpoint": "tcp://10.0.0.5:0"},
        {"endpoint": "tcp://10.0.0.5"},
        {"endpoint": "tcp://10.0.0.5:5557", "ranks": 0},
        {"endpoint": "tcp://10.0.0.5:5557", "ranks": 65},
        {"endpoint": "tcp://10.0.0.5:65535", "ranks": 2},
        {"ranks": 0},
        {"ranks": 1 << 32},
        {"endpoint": 5},
        "tcp://10.0.0.5:5557",
    ],
)
def test_kv_events_come_from_the_engines_own_host_over_tcp(source: Any) -> None:
    with pytest.raises(FormatError, match="kv_events"):
        decode(pack({**OURS, "kv_events": source}))


@pytest.mark.parametrize("host", ["-a", "_a"])
def test_kv_events_are_refused_where_zeromq_could_not_connect(host: str) -> None:
    with pytest.raises(FormatError, match="kv_events"):
        decode(pack({**OURS, "http_address": f"{host}:80", "kv_events": {"endpoint": f"tcp://{host}:5557"}}))


@pytest.mark.parametrize("x", [0, 0.5, 1, None])
def test_a_d_may_have_a_share_of_its_own(x: float | None) -> None:
    assert decode(pack({**OURS, "x": x})).worker.x == x


@pytest.mark.parametrize("role", ["P", "R", "E"])
def test_only_a_d_has_a_share_of_its_own(role: str) -> None:
    assert decode(pack({**OURS, "role": role, "x": None})).worker.x is None
    with pytest.raises(FormatError, match="x: must be a share from 0 to 1, and of a D"):
        decode(pack({**OURS, "role": role, "x": 0.5}))


@pytest.mark.parametrize("x", [-0.1, 1.5, float("nan"), float("inf"), "1", True])
def test_a_share_that_is_none_is_refused(x: Any) -> None:
    with pytest.raises(FormatError, match="x"):
        decode(pack({**OURS, "x": x}))


def test_an_agent_says_whether_a_sidecar_is_before_its_engine() -> None:
    assert not decode(pack({**OURS, "role": "D"})).worker.has_sidecar
    assert [decode(pack({**OURS, "role": role, "sidecar": True})).worker.has_sidecar for role in "DR"] == [True, True]
    for wrong in (
        {"role": "P", "sidecar": True},
        {"role": "D", "sidecar": True, "connector": "mooncake"},
        {"sidecar": 1},
    ):
        with pytest.raises(FormatError, match="sidecar"):
            decode(pack({**OURS, **wrong}))


def test_labels_come_as_they_are_told() -> None:
    labels = {"llm-d.ai/role": "prefill-decode", "role": "", "a": "1.x_Y-z"}
    assert decode(pack({**OURS, "labels": labels})).worker.labels == labels


@pytest.mark.parametrize(
    "labels",
    [
        {"a b": "1"},
        {"a": "1,2"},
        {"a": "\n"},
        {"/a": "1"},
        {"a/b/c": "1"},
        {"-a": "1"},
        {"a" * 64: "1"},
        {"a": "b" * 64},
        {"": "1"},
        {"a": 1},
        {f"a{number}": "1" for number in range(65)},
    ],
)
def test_labels_that_kubernetes_would_not_take_are_refused(labels: Any) -> None:
    with pytest.raises(FormatError, match="labels"):
        decode(pack({**OURS, "labels": labels}))


def test_the_p2p_nccl_ping_names_a_worker_and_its_coordinates() -> None:
    worker = decode(pack(P2P)).worker
    assert (worker.role, worker.address, worker.connector) == (Role.PREFILL, "10.0.0.5:8100", "p2p_nccl")
    assert worker.coordinates == {"zmq_address": "10.0.0.5:21001"}


@pytest.mark.parametrize(("mode", "connector"), [("WRITE", "moriio"), ("READ", "moriio_read")])
def test_the_moriio_ping_is_told_apart_by_its_transfer_mode(mode: str, connector: str) -> None:
    worker = decode(pack({**MORIIO, "transfer_mode": mode})).worker
    assert (worker.role, worker.connector) == (Role.DECODE, connector)
    ports = {"side_channel_host": "10.0.0.5", "handshake_port": "6301", "notify_port": "61005"}
    assert worker.coordinates == {**ports, "dp_size": "1", "tp_size": "8"}


def test_fields_of_a_later_agent_are_ignored() -> None:
    assert decode(pack({**OURS, "zone": "b"})).worker.address == "10.0.0.5:8200"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({**OURS, "version": 2}, "version"),
        ({**MORIIO, "zmq_address": "10.0.0.5:6301"}, "zmq_address must be host:HOST,handshake:PORT,notify:PORT"),
        ({**MORIIO, "zmq_address": "host:a/b,handshake:1,notify:2"}, "side_channel_host = a/b: must be a host"),
        (
            {**MORIIO, "zmq_address": "host:a,handshake:0,notify:2"},
            "handshake_port = 0: must be a port from 1",
        ),
        ({**MORIIO, "tp_size": 0}, "tp_size = 0: must be a number"),
        *(({**MORIIO, "transfer_mode": value}, "transfer_mode") for value in ("read", "", 7, None, True)),
        ({**OURS, "role": "X"}, "role"),
        ({**OURS, "http_address": "evil/../x:80"}, "http_address"),
        ({**OURS, "http_address": "host:99999"}, "http_address"),
        ({**OURS, "http_address": "user@host:80"}, "http_address"),
        ({**OURS, "http_address": "a..b:80"}, "http_address"),
        ({**OURS, "http_address": "x" * 64 + ":80"}, "http_address"),
        ({**OURS, "kv_usage": 2.0}, "kv_usage"),
        ({**OURS, "kv_usage": -0.1}, "kv_usage"),
        ({**OURS, "running": -1}, "running"),
        ({k: v for k, v in OURS.items() if k != "models"}, "models"),
        *(({**OURS, name: value}, name) for name in HEADS for value in HOSTILE),
        *(({**OURS, "coordinates": {"zmq_address": value}}, "zmq_address") for value in HOSTILE),
        (
            {**OURS, "connector": "p2p_nccl", "coordinates": {"zmq_address": "a:65536"}},
            "zmq_address = a:65536: must be host:port",
        ),
        *(({**OURS, "coordinates": {name: "x"}}, "coordinates") for name in ("", "a b", "a\r\nb", "x" * 65)),
        ({**OURS, "coordinates": {str(number): "x" for number in range(33)}}, "coordinates"),
        ({**OURS, "models": ["m"] * 1025}, "models"),
        ({**OURS, "models": ["m", "n"], "aliases": {"n": "other"}}, "aliases"),  # of another worker's model
        ({**OURS, "models": ["m", "n"], "aliases": {"other": "m"}}, "aliases"),
        ({**OURS, "models": [], "aliases": {"n": "m"}}, "aliases"),
        *(({**OURS, "models": ["m", name]}, "models") for name in ("", "a\nb", "x" * 100_000)),
        *(({**MORIIO, "zmq_address": value}, "zmq_address") for value in HOSTILE),
        *(({**MORIIO, "dp_size": value}, "dp_size") for value in ([1] * 300, "1\r\nX: 1")),
        ({**P2P, "type": "R"}, "type"),
        ({**P2P, "http_address": 5}, "http_address"),
        ({**P2P, "zmq_address": "x"}, "zmq_address"),
        ({"type": "P", "http_address": "a:1"}, "zmq_address"),
        ([1, 2], "map"),
        ("x", "map"),
    ],
)
def test_a_malformed_message_is_refused_with_the_field_named(message: object, named: str) -> None:
    with pytest.raises(FormatError, match=named):
        decode(pack(message))


def test_a_message_nested_too_deeply_is_refused() -> None:
    with pytest.raises(FormatError):
        decode(b"\x91" * 60_000)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_and_nothing_else(payload: bytes) -> None:
    with pytest.raises(FormatError):
        decode(payload)


WRONG = st.one_of(st.none(), st.integers(-1, 2**40), st.text())


@given(st.dictionaries(st.sampled_from(sorted({*OURS, *MORIIO})), WRONG))
def test_wrong_types_in_any_field_never_raise_anything_else(message: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        decode(pack(message))
