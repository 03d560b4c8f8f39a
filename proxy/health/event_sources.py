"""Where an engine publishes its KV events, as vLLM tells since 0.31: `GET /kv_event_sources`, by data-parallel rank."""

from __future__ import annotations

import re

import msgspec

from ..discovery.heartbeat import check_events
from ..errors import UNREADABLE, FormatError
from ..fleet.worker import NO_EVENTS, EventSource

PATH = "/kv_event_sources"

_ENDPOINT = re.compile(r"tcp://(.+):([0-9]{1,5})")
_ANY_HOST = ("*", "0.0.0.0", "[::]", "::")


class _Source(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None
    publisher: str | None = "zmq"


def event_source(answer: bytes, address: str) -> EventSource:
    """Ports of the worker's own host alone, so that no engine has the proxy connect to another machine.

    NO_EVENTS also where an engine connects to its subscriber, and where its ranks' ports do not follow each other.
    """
    try:
        told = msgspec.json.decode(answer, type=dict[int, _Source])
    except UNREADABLE:
        return NO_EVENTS
    host = address.rpartition(":")[0]
    ranks = [_at(told[rank], host) for rank in sorted(told)]
    if not ranks or not ranks[0].endpoint:
        return NO_EVENTS
    source = EventSource(ranks[0].endpoint, ranks[0].replay_endpoint, len(ranks))
    try:
        check_events(source)
    except FormatError:
        return NO_EVENTS
    return source if all(source.of_rank(number) == rank for number, rank in enumerate(ranks)) else NO_EVENTS


def _at(told: _Source, host: str) -> EventSource:
    if told.publisher != "zmq":
        return NO_EVENTS
    return EventSource(_endpoint(told.endpoint, host), _endpoint(told.replay_endpoint or "", host))


def _endpoint(told: str, host: str) -> str:
    match = _ENDPOINT.fullmatch(told)
    return f"tcp://{host}:{int(match[2])}" if match and match[1] in (*_ANY_HOST, host) else ""
