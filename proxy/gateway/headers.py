"""Headers between Envoy, the picker and sidecars: what each is called, and which of a client's go on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from ..admission.auth import FORWARDED, SESSION
from ..connectors.leg import REQUEST_ID
from ..fleet.worker import WorkerId
from ..upstream import sidecar

DESTINATION = "x-gateway-destination-endpoint"
"""Host and port of the worker that answers, and behind a comma of those to take in its place (Endpoint Picker Protocol
1.0.0)."""
SERVED = "x-gateway-destination-endpoint-served"
"""Which of them has answered, as Envoy says it in its metadata."""
ATTEMPTS = "x-envoy-attempt-count"
"""Of the response: how many workers Envoy has asked."""
PREFILLER = sidecar.PREFILLER
"""Host and port of the P, for the sidecar of the worker that answers."""
TURN = "x-ppd-turn"
"""The picker's own id of the turn, for its sidecar's report: clients may choose equal request ids."""
ENCODERS = "x-encoder-hosts-ports"
"""Host and port of the encoder of each item, with commas between, for the sidecar; llm-d's name."""
ENCODER_ITEMS = "x-ppd-encoder-items"
"""Which items these are, where some are left to the worker: numbers from 0 with commas between."""
LB_NAMESPACE, SUBSET_NAMESPACE = "envoy.lb", "envoy.lb.subset_hint"
"""Of Envoy's metadata: where it reads the destination too, and where it says among which workers to choose."""
OWN_NAMESPACE, ANSWERED = "ppd", "answered"
"""Of that metadata: whether an answer is the picker's own, which Envoy must leave as it is."""
SUBSET = "x-gateway-destination-endpoint-subset"

# What belongs to the connection, to Envoy, or to bodies. The rest of a client's headers could steer an engine, a
# sidecar or the picker itself.
_KEPT = {
    *FORWARDED,
    "host",
    "content-length",
    "transfer-encoding",
    "content-encoding",
    "te",
    "user-agent",
    "via",
    "forwarded",
    "expect",
    "x-request-id",
}
_NAME, _CUTS = re.compile(r":?[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(r"[\r\n\0]")
_NUMBER = re.compile("[0-9]{1,4}")
DIGITS = 18  # of a number in a head: Python refuses to read any number of them
_KINDS_OF_CLIENTS = 64  # by the names of their headers, which are remembered
_KEPT_BEGIN = (":", "x-forwarded-", "x-envoy-")


@lru_cache(_KINDS_OF_CLIENTS)
def removed(headers: tuple[str, ...], sent: frozenset[str]) -> tuple[str, ...]:
    """Which of a client's headers must not reach a worker. sent: those that the picker sets, which replace them."""
    return tuple(
        name for name in headers if name not in _KEPT and name not in sent and not name.startswith(_KEPT_BEGIN)
    )


def to_worker(
    legs: Mapping[str, str], request_id: str, destinations: Iterable[str], prefill: str | None, session: str | None
) -> dict[str, str]:
    """legs: what every leg of the proxy carries. session: the name by which the engine knows it; None: the client's."""
    sent = {**legs, REQUEST_ID.lower(): request_id, DESTINATION: ",".join(destinations)}
    if prefill is not None:
        sent[PREFILLER] = prefill
    if session is not None:
        sent[SESSION] = session
    return sent


def item_numbers(text: str) -> frozenset[int] | None:
    """Of `ENCODER_ITEMS`; None: it says nothing, so all are meant. ValueError for what are no numbers."""
    numbers = [each.strip() for each in text.split(",") if each.strip()]
    if not all(_NUMBER.fullmatch(each) for each in numbers):
        raise ValueError(f"{ENCODER_ITEMS}: must be numbers with commas between")
    return frozenset(map(int, numbers)) if numbers else None


def read(headers: Any) -> dict[str, str]:
    """Of a `HeaderMap`: names in lower case, values with a character for each byte; the first of a repeated one."""
    found: dict[str, str] = {}
    for one in headers.headers:
        name, value = one.key, (one.raw_value or one.value.encode()).decode("latin-1")
        if _NAME.fullmatch(name) and not _CUTS.search(value):  # HTTP has no others
            found.setdefault(name.lower(), value)
    return found


def subset(metadata: Any) -> frozenset[WorkerId] | None:
    """The workers among which Envoy lets choose; None: all. metadata: a `Metadata`; None: it says nothing."""
    hint = None if metadata is None else metadata.filter_metadata.get(SUBSET_NAMESPACE)
    if hint is None or SUBSET not in hint.fields:
        return None
    given = hint.fields[SUBSET]
    texts = [each.string_value for each in given.list_value.values] or given.string_value.split(",")
    return frozenset(WorkerId(text.strip()) for text in texts if text.strip())


def served(metadata: Any) -> WorkerId:
    """Empty where Envoy does not say it. metadata: as `subset` takes it."""
    served = None if metadata is None else metadata.filter_metadata.get(LB_NAMESPACE)
    return WorkerId("" if served is None or SERVED not in served.fields else served.fields[SERVED].string_value)
