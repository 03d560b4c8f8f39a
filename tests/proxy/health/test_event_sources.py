"""Where an engine says that it publishes KV events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppd.proxy.fleet.worker import NO_EVENTS, EventSource
from ppd.proxy.health.event_sources import event_source


def told(endpoint: str, replay: str | None = None, **more: Any) -> dict[str, Any]:
    """As vLLM 0.32 answers for one rank."""
    limits = {"buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": ""}
    return {"enable_kv_cache_events": True, "publisher": "zmq", **limits} | {
        "endpoint": endpoint,
        "replay_endpoint": replay,
        **more,
    }


@pytest.mark.parametrize(
    ("answer", "source"),
    [
        ({"0": told("tcp://*:5557", "tcp://*:5558")}, EventSource("tcp://d1:5557", "tcp://d1:5558")),
        ({"0": told("tcp://*:5557")}, EventSource("tcp://d1:5557")),
        ({"0": told("tcp://[::]:5557")}, EventSource("tcp://d1:5557")),
        ({"0": told("tcp://d1:41233")}, EventSource("tcp://d1:41233")),
        ({"3": told("tcp://*:5560")}, EventSource("tcp://d1:5560")),  # one rank of several, each with its own server
        (
            {"1": told("tcp://*:5558", "tcp://*:5601"), "0": told("tcp://*:5557", "tcp://*:5600")},
            EventSource("tcp://d1:5557", "tcp://d1:5600", 2),
        ),
        ({"0": told("tcp://*:5557"), "1": told("tcp://*:41233")}, NO_EVENTS),
        ({"0": told("tcp://*:5557", "tcp://*:5600"), "1": told("tcp://*:5558")}, NO_EVENTS),
        ({"0": told("tcp://other:5557")}, NO_EVENTS),  # it connects there
        ({"0": told("tcp://*:5557", "tcp://other:5558")}, EventSource("tcp://d1:5557")),
        ({"0": told("tcp://*:0")}, NO_EVENTS),
        ({"0": told("tcp://*:99999")}, NO_EVENTS),
        ({"0": told("ipc:///tmp/events")}, NO_EVENTS),
        ({"0": told("tcp://*:5557", publisher="null")}, NO_EVENTS),
        ({str(rank): told(f"tcp://*:{5557 + rank}") for rank in range(65)}, NO_EVENTS),
        ({}, NO_EVENTS),
        ({"zero": told("tcp://*:5557")}, NO_EVENTS),
        ({"0": {"endpoint": 5557}}, NO_EVENTS),
        ([], NO_EVENTS),
    ],
)
def test_ports_of_the_engines_own_host_are_subscribed_to(answer: Any, source: EventSource) -> None:
    assert event_source(json.dumps(answer).encode(), "d1:8200") == source


DEEP = b'{"0": {"endpoint": "tcp://*:1", "more": ' + 5000 * b"[" + 5000 * b"]" + b"}}"


@pytest.mark.parametrize("answer", [b"", b"{", b"\xff", b'{"0": "' + b"[" * 10_000, DEEP])
def test_what_cannot_be_read_names_none(answer: bytes) -> None:
    assert event_source(answer, "d1:8200") == NO_EVENTS
