"""NIXL, pull mode: P pins the prompt's KV blocks and names them in its answer; D pulls those that its cache lacks.

The legs run one after the other. P's parameters go to D unchanged and at once, because P's lease on the blocks expires.
Parameters that lack anything D needs can hang the request or kill D's engine, so they are checked here; if they fail,
D gets no parameters at all. Source: vLLM's `NixlPullConnector`, 0.13 to 0.33; the layout is in docs/protocols.md.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..openai.answer_shapes import Usage, usage_of
from ..openai.body_members import decoded, encoded, without_nan
from ..openai.request import Endpoint, Fields
from .leg import Handoff, LegRequest, NoHandoff, Pair, answering_fields, leg
from .prefill import engine_version, prefill_fields

PARAMS = "kv_transfer_params"

# The nulls are convention: only `do_remote_decode` is read.
_ASK = encoded(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)

# What D needs to find the blocks and to keep P's lease alive, with the type that D takes for granted.
_NEEDED: dict[str, type] = {
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
    "tp_size": int,
}

# The hosts that P reports if VLLM_NIXL_SIDE_CHANNEL_HOST is not set, or is a wildcard.
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "0.0.0.0", "::1", "::")


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw] | None = None
    usage: Usage | None = None


class Nixl:
    name = "nixl"
    needs_handoff = True
    coordinates = frozenset[str]()
    shares_request_id = False
    takes_either_leg = True

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        body = prefill_fields(endpoint, fields, engine_version(pair.prefill.engine_version))
        return leg(endpoint, {**body, PARAMS: _ASK}, leg_id, fields)

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | NoHandoff:
        try:
            body = msgspec.json.decode(without_nan(answer) or answer, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return NoHandoff("answer_undecodable")
        params = body.kv_transfer_params
        if not params:
            return NoHandoff("params_missing")
        if (reason := _flaw(params)) is not None:
            return NoHandoff(reason)
        usage = usage_of(body.usage)
        hits = _count(params, "remote_prefill_cached_tokens")
        return Handoff(
            params=_reachable(params, pair.prefill.address),
            tokens=_count(params, "remote_num_tokens") or 0,
            cached_tokens=hits if hits is not None else usage.cached_tokens,
        )

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        body = answering_fields(endpoint, fields)
        if handoff is not None:
            body[PARAMS] = encoded(handoff.params)
        return leg(endpoint, body, leg_id, fields)


def _flaw(params: dict[str, msgspec.Raw]) -> str | None:
    if _value(params, "do_remote_prefill") is not True:
        return "not_a_remote_prefill"
    if _value(params, "transfer_mode") not in (None, "pull"):
        return "transfer_mode_not_pull"
    if not _pins_blocks(_value(params, "remote_block_ids")):
        return "remote_block_ids_empty"
    for name, kind in _NEEDED.items():
        value = _value(params, name)
        if value is None or value == "":
            return f"{name}_missing"
        if type(value) is not kind:
            return f"{name}_invalid"
    return None


def _pins_blocks(groups: Any) -> bool:
    # A list for each KV-cache group since vLLM 0.18, one flat list of ids before.
    if not isinstance(groups, list) or not all(type(group) in (int, list) for group in groups):
        return False
    return any(type(group) is int or group for group in groups)


def _reachable(params: dict[str, msgspec.Raw], address: str) -> dict[str, Any]:
    """With the host at which the proxy reaches P, in place of a host that only P itself can reach."""
    host = address.rpartition(":")[0].strip("[]")
    is_local = host in _LOCAL_HOSTS or host.startswith("127.")
    if is_local or _value(params, "remote_host") not in _LOCAL_HOSTS:
        return dict(params)
    return {**params, "remote_host": encoded(host)}


def _count(params: dict[str, msgspec.Raw], name: str) -> int | None:
    value = _value(params, name)
    return value if type(value) is int and value >= 0 else None


def _value(params: dict[str, msgspec.Raw], name: str) -> Any:
    return decoded(params[name]) if name in params else None
