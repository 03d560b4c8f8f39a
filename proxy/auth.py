"""Who is asking: the tenant that a client's key stands for, the operator's admin key, and what only that allows.

Headers come as a mapping with names in lower case.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import blake2b

from werkzeug.datastructures import Headers

from .errors import Forbidden, NotFound, RequestError, Unauthorized
from .policy import Route

# What a worker may see of a client's headers. Everything else stays here: a header must not steer an engine
# (X-data-parallel-rank, X-Vllm-Priority) nor another proxy.
FORWARDED = ("accept", "content-type", "traceparent", "tracestate", "anthropic-version", "x-session-id")
FORCE_ROUTE = "x-ppd-force-route"


def lowered(headers: Headers) -> dict[str, str]:
    """A request's headers by lower-case name; of a repeated one the first."""
    return {name.lower(): value for name, value in reversed(list(headers.items()))}


def client_key(headers: Mapping[str, str]) -> str:
    """The API key that the client sent, in OpenAI's or Anthropic's header; empty if none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def tenant_of(headers: Mapping[str, str]) -> str:
    """A name for the holder of a key that does not reveal the key; one name for all who send none."""
    key = headers.get("authorization") or headers.get("x-api-key", "")
    return blake2b(key.encode(), digest_size=8).hexdigest() if key else ""


def leg_headers(headers: Mapping[str, str], worker_api_key: str) -> dict[str, str]:
    """What every leg of a client's request carries."""
    kept = {name: headers[name] for name in FORWARDED if name in headers}
    if worker_api_key:
        kept["authorization"] = f"Bearer {worker_api_key}"
    elif "authorization" in headers:
        kept["authorization"] = headers["authorization"]
    elif "x-api-key" in headers:  # Anthropic's clients; vLLM reads the other header only
        kept["authorization"] = f"Bearer {headers['x-api-key']}"
    return kept


def check_admin(headers: Mapping[str, str], admin_key: str) -> None:
    """Unauthorized unless the request carries the admin key; without one in the config there is no admin API."""
    if not admin_key:
        raise NotFound("the admin API is off: set admin_key")
    if not _is_same(headers.get("x-admin-key") or client_key(headers), admin_key):
        raise Unauthorized("the admin key is missing or wrong")


def forced_route(headers: Mapping[str, str], admin_key: str) -> Route | None:
    """The route that the operator asks for on this one request; Forbidden for anybody else who names one.

    Only the admin key's own header counts: `Authorization` says whose conversation it is.
    """
    wanted = headers.get(FORCE_ROUTE)
    if wanted is None:
        return None
    if not admin_key or not _is_same(headers.get("x-admin-key", ""), admin_key):
        raise Forbidden("X-PPD-Force-Route needs the admin key, in X-Admin-Key", param="X-PPD-Force-Route")
    if wanted not in [*Route]:
        raise RequestError(f"X-PPD-Force-Route: must be {', '.join(Route)}", param="X-PPD-Force-Route")
    return Route(wanted)


def _is_same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())
