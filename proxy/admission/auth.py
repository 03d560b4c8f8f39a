"""Who sent a request, by its API key, and what the sender may do; the operator is known by the admin key.

A client's key never counts as the admin key, nor the admin key as a client's.

Headers are mappings with names in lower case.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

from werkzeug.datastructures import Headers

from ..errors import Forbidden, LoopDetected, NotFound, RequestError, Unauthorized
from ..laws.targets import ALLOWED_TARGETS, GivenTargets, given_targets
from ..policy import Route
from .keys import Client
from .tenant_scope import TenantScope

# The only client headers that workers get. Others could steer an engine (X-data-parallel-rank, X-Vllm-Priority) or
# another proxy.
SESSION = "x-session-id"
LOAD_FORMAT = "endpoint-load-metrics-format"  # how vLLM is to tell its load in the answer's headers
FORWARDED = ("accept", "content-type", "traceparent", "tracestate", "anthropic-version", LOAD_FORMAT, SESSION)
_LINE_ENDS = frozenset("\r\n\0")
FORCE_ROUTE = "x-ppd-force-route"
QUEUE_TIMEOUT = "x-ppd-queue-timeout"
SLO = "x-ppd-slo"
HOPS = "x-ppd-hops"
NAMELESS = 1024  # tenants without a key of the file that are remembered
HOP_LIMIT = 2  # proxies that a request may have passed before this one


class Ring(Protocol):
    """The clients' keys in force."""

    def find(self, key: str) -> Client | None: ...


def lowered(headers: Headers) -> dict[str, str]:
    return {name.lower(): value for name, value in reversed(list(headers.items()))}  # the first of a repeated header


def client_key(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else bare_key(headers)


def bare_key(headers: Mapping[str, str]) -> str:
    """The key in the header that Anthropic's clients use, or in that of Azure's."""
    return headers.get("x-api-key") or headers.get("api-key", "")


def tenant_of(headers: Mapping[str, str]) -> str:
    """A name for the holder of a key that does not reveal the key; "" for all who send none."""
    key = headers.get("authorization") or bare_key(headers)
    return blake2b(key.encode(), digest_size=8).hexdigest() if key else ""


def authenticate(headers: Mapping[str, str], ring: Ring | None) -> Client:
    """The client with this key; Unauthorized if there is none. Without a ring no key is needed.

    Reads no more than the headers, so the body of an unknown client is never read.
    """
    if ring is None:
        return _nameless(tenant_of(headers))
    key = client_key(headers)
    if not key:
        raise Unauthorized("an API key is needed: Authorization: Bearer, X-Api-Key or Api-Key", code="invalid_api_key")
    client = ring.find(key)
    if client is None:
        raise Unauthorized("the API key is unknown or was revoked", code="invalid_api_key")
    return client


@lru_cache(NAMELESS)
def _nameless(tenant: str) -> Client:
    """Where no key is asked for. One for all requests of a tenant: an open stream keeps its client."""
    return Client(name="", tenant=tenant)


def check_use(client: Client, model: str) -> None:
    """NotFound, as OpenAI answers, if the client's key is not for this model; `model` may be empty.

    A request that names no model gets the worker's default: a key for some models only must name one.
    """
    if not client.may_use(model):
        if not model:
            raise RequestError("model: is required, as this key is limited to some models", param="model")
        raise NotFound(
            f"model {model!r} does not exist, or this key may not use it", param="model", code="model_not_found"
        )


def check_operator_path(headers: Mapping[str, str], path: str, open_paths: Collection[str], admin_key: str) -> None:
    """Unauthorized if the path is not open and the admin key was not sent; NotFound if no admin key is set.

    A client's key does not open it: the fleet's figures are those of all tenants.
    """
    if path not in open_paths:
        check_admin(headers, admin_key)


def leg_headers(
    headers: Mapping[str, str], *, forwards_key: bool = True, scope: TenantScope | None = None
) -> dict[str, str]:
    """forwards_key: whether the client's key is for the workers. RequestError for what would break a leg's head.

    LoopDetected if the request has passed too many proxies: a worker may be a proxy, or this very one.
    scope: of the client's tenant; a session's id then reaches workers only as the tenant's own.
    """
    kept = {name: headers[name] for name in FORWARDED if name in headers}
    kept[HOPS] = str(_hops(headers) + 1)
    if not forwards_key:
        pass
    elif "authorization" in headers:
        kept["authorization"] = headers["authorization"]
    elif key := bare_key(headers):  # vLLM reads the other header only
        kept["authorization"] = f"Bearer {key}"
    for name, value in kept.items():
        if not _LINE_ENDS.isdisjoint(value):  # else the legs would fail, and the workers get the blame
            raise RequestError(f"{name}: must hold no line end", param=name)
    if scope is not None and SESSION in kept:
        kept[SESSION] = scope.id(kept[SESSION])
    return kept


def _hops(headers: Mapping[str, str]) -> int:
    """How many proxies sent this request on. A client that says so itself harms no other."""
    text = headers.get(HOPS)
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RequestError("X-PPD-Hops: must be a whole number", param="X-PPD-Hops")
    if int(text) > HOP_LIMIT:
        raise LoopDetected(f"the request has passed {text} proxies: a worker of a proxy is a proxy", code="loop")
    return int(text)


def check_admin(headers: Mapping[str, str], admin_key: str) -> None:
    """Unauthorized unless the request carries the admin key; NotFound if the config sets none."""
    if not admin_key:
        raise NotFound("this is off: set admin_key in the config")
    if not _is_same(headers.get("x-admin-key") or client_key(headers), admin_key):
        raise Unauthorized("the admin key is missing or wrong")


def forced_route(headers: Mapping[str, str], admin_key: str) -> Route | None:
    """The route that the operator asks for on this one request; Forbidden without the admin key.

    Only X-Admin-Key counts, as `Authorization` says whose conversation it is.
    """
    wanted = headers.get(FORCE_ROUTE)
    if wanted is None:
        return None
    if not admin_key or not _is_same(headers.get("x-admin-key", ""), admin_key):
        raise Forbidden("X-PPD-Force-Route needs the admin key, in X-Admin-Key", param="X-PPD-Force-Route")
    if wanted not in [*Route]:
        raise RequestError(f"X-PPD-Force-Route: must be {', '.join(Route)}", param="X-PPD-Force-Route")
    return Route(wanted)


def queue_patience_s(headers: Mapping[str, str]) -> float:
    text = headers.get(QUEUE_TIMEOUT)
    if text is None:
        return math.inf
    try:
        patience_s = float(text)
    except ValueError:
        patience_s = math.nan
    if not 0 <= patience_s < math.inf:
        raise RequestError("X-PPD-Queue-Timeout: must be a number of seconds", param="X-PPD-Queue-Timeout")
    return patience_s


def slo_targets(headers: Mapping[str, str]) -> GivenTargets | None:
    """What the client sets for this one request; None: nothing. RequestError for what cannot be read."""
    text = headers.get(SLO)
    if text is None:
        return None
    try:
        return given_targets(text)
    except ValueError:
        raise RequestError(f"X-PPD-SLO: must be {ALLOWED_TARGETS}", param="X-PPD-SLO") from None


def _is_same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())
