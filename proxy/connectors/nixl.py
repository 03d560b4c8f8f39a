"""NIXL, pull mode: P pins the prompt's KV blocks and names them in its answer; D pulls those that its cache lacks.

The legs run one after the other. P's parameters go to D unchanged and at once, because P's lease on the blocks expires.
Parameters that lack anything D needs can hang the request or kill D's engine, so they are checked here; if they fail,
D gets no parameters at all. Source: vLLM's `NixlPullConnector`, 0.13 to 0.33; the layout is in docs/protocols.md.

With `bidirectional_kv_xfer` on both sides, D keeps the KV of a prompt that it pulled and of its answer, and its answer
has a handle by which P reads that back. P's leg then has a salt of its own: vLLM compares no tokens, so what P computes
with a handle that does not fit is under a name that nobody else asks for.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec

from ..errors import UNREADABLE
from ..fleet.worker import PairingKind, Worker
from ..leg_moves import LegOrder
from ..openai.answer_shapes import MOST_TOKENS, Usage, usage_of
from ..openai.body_members import answer_as, decoded, encoded, value_of, without_nan
from ..openai.request import Endpoint, Fields
from ..readback.handles import NOT_A_PREFIX
from .coordinates import COUNT, YES
from .leg import CHOICES_NOT_ONE, Handoff, LegRequest, NoHandoff, Pair, answering_fields, leg
from .prefill import prefill_fields

PARAMS = "kv_transfer_params"
READS_BACK, KEPT_S = "bidirectional_kv_xfer", "decoder_kv_blocks_ttl"
KEPT_USUALLY_S = 480  # where D does not say

# The nulls are convention: only `do_remote_decode` is read.
ASK = encoded(
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
_NEEDED_KINDS = tuple(_NEEDED.values())

# The hosts that P reports if VLLM_NIXL_SIDE_CHANNEL_HOST is not set, or is a wildcard.
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "0.0.0.0", "::1", "::")


_BLOCK_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # of models with one kind of cache

_YES = msgspec.Raw(b"true")


class TransferAnswer(msgspec.Struct):
    """P's."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    choices: list[msgspec.Raw] | None = None
    usage: Usage | None = None


_ANSWER = msgspec.json.Decoder(TransferAnswer)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_VALUES = msgspec.json.Decoder(dict[str, Any])


class _Tokens(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Prompt(_Tokens):
    """Chat has it beside its choices, completions in each."""

    choices: list[_Tokens] | None = None

    @property
    def ids(self) -> list[int]:
        first = self.choices[0].prompt_token_ids if self.choices else None
        return self.prompt_token_ids or first or []


class Nixl:
    name = "nixl"
    needs_handoff = True
    order = LegOrder.P_THEN_D
    coordinates = MappingProxyType({READS_BACK: YES, KEPT_S: COUNT})
    decodes_alone = True
    finds_by_content = False
    endpoints = frozenset(Endpoint)
    takes_either_leg = True

    def new_key(self) -> str:
        return ""

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        body = prefill_fields(endpoint, fields, pair.prefill)
        if pair.handle is None:
            return leg(endpoint, {**body, PARAMS: ASK}, leg_id, fields)
        body.pop("session_id", None)  # by whose name the engine would announce what is under this leg's salt
        own = {PARAMS: msgspec.Raw(pair.handle.params), "cache_salt": encoded(leg_id), "return_token_ids": _YES}
        return leg(endpoint, {**body, **own}, leg_id, fields)

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | NoHandoff:
        told = _told(answer)
        if isinstance(told, NoHandoff):
            return told
        body, params = told
        values = _values(body.kv_transfer_params, params)
        if (reason := _flaw(values)) is not None:
            return NoHandoff(reason)
        if pair.handle is not None and not pair.handle.proves(_prompt_ids(answer)):
            return NoHandoff(NOT_A_PREFIX)
        usage = usage_of(body.usage)
        hits = _count(values, "remote_prefill_cached_tokens")
        if pair.handle is not None:  # what was read back is in P's usage
            hits = max(hits or 0, usage.cached_tokens or 0)
        return Handoff(
            params=_reachable(params, values, pair.prefill.host),
            tokens=_count(values, "remote_num_tokens") or 0,
            cached_tokens=hits if hits is not None else usage.cached_tokens,
        )

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        body = answering_fields(endpoint, fields)
        if handoff is not None:
            body[PARAMS] = encoded(handoff.params)
        return leg(endpoint, body, leg_id, fields)


def reads_back(worker: Worker | PairingKind) -> bool:
    """Whether it says that P may read KV back from D, as that one or as this one."""
    return worker.connector == Nixl.name and READS_BACK in worker.coordinates


def kept_s(decode: Worker) -> int:
    """For how long this D keeps the KV of a handle."""
    return int(decode.coordinates.get(KEPT_S, KEPT_USUALLY_S))


def push_counts(answer: bytes) -> Handoff | NoHandoff:
    """What a P in push mode has counted. One whose answer names nothing to write would keep D waiting."""
    told = _told(answer)
    if isinstance(told, NoHandoff):
        return told
    body, params = told
    if value_of(params, "transfer_mode") not in (None, "push"):
        return NoHandoff("transfer_mode_not_push")
    if not _pins_blocks(value_of(params, "remote_block_ids")):
        return NoHandoff("remote_block_ids_empty")
    usage = usage_of(body.usage)
    return Handoff({}, usage.prompt_tokens or 0, usage.cached_tokens)


def handle_params(told: bytes, decode: Worker, handoff: Handoff) -> bytes | None:
    """A D's handle as a P may be given it; None for one that would hang P's request, or pair other blocks.

    handoff: from which D had the prompt. vLLM pairs blocks from the last one on, so none too many may be in the list.
    """
    try:
        params = _MEMBERS.decode(told)
    except UNREADABLE:
        return None
    if not params:
        return None
    values = _values(told, params)
    if values.get("do_remote_decode") is not True or values.get("do_remote_prefill") is not False:
        return None
    sizes = _block_sizes(handoff.params)
    if _pinned_flaw(values) or len(sizes) != 1 or not sizes <= _block_sizes(params):
        return None
    return msgspec.json.encode(_reachable(params, values, decode.host))


def _block_sizes(params: dict[str, Any]) -> set[int]:
    """Those with which so many tokens are in so many blocks; of two blocks and more there is one at most."""
    tokens, groups = value_of(params, "remote_num_tokens"), value_of(params, "remote_block_ids")
    if type(tokens) is not int or tokens < 1 or not isinstance(groups, list) or len(groups) != 1:
        return set()
    blocks = len(groups[0]) if isinstance(groups[0], list) else 0
    return {size for size in _BLOCK_SIZES if -(-tokens // size) == blocks}


def _prompt_ids(answer: bytes) -> list[int]:
    prompt = answer_as(answer, _Prompt)
    return [] if prompt is None else prompt.ids


def _told(answer: bytes) -> tuple[TransferAnswer, dict[str, msgspec.Raw]] | NoHandoff:
    """P's answer, and the parameters in it."""
    try:
        body = _ANSWER.decode(without_nan(answer) or answer)
        params = _MEMBERS.decode(body.kv_transfer_params)
    except UNREADABLE:
        return NoHandoff("answer_undecodable")
    if body.choices and len(body.choices) > 1:
        return NoHandoff(CHOICES_NOT_ONE)
    return (body, params) if params else NoHandoff("params_missing")


def _values(told: bytes | msgspec.Raw, params: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """Of these parameters, told in one object. One that cannot be decoded is None, and the worker will reject it."""
    try:
        return _VALUES.decode(told)
    except UNREADABLE:
        return {name: decoded(value) for name, value in params.items()}


def _flaw(values: dict[str, Any]) -> str | None:
    if values.get("do_remote_prefill") is not True:
        return "not_a_remote_prefill"
    return _pinned_flaw(values)


def _pinned_flaw(values: dict[str, Any]) -> str | None:
    """What is wrong with the blocks that one engine pins for another."""
    if values.get("transfer_mode") not in (None, "pull"):
        return "transfer_mode_not_pull"
    if not _pins_blocks(values.get("remote_block_ids")):
        return "remote_block_ids_empty"
    if tuple(map(type, map(values.get, _NEEDED))) == _NEEDED_KINDS and "" not in values.values():
        return None  # nearly always
    for name, kind in _NEEDED.items():
        value = values.get(name)
        if type(value) is not kind or value == "":
            return f"{name}_missing" if value is None or value == "" else f"{name}_invalid"
    return None


def _pins_blocks(groups: Any) -> bool:
    # A list for each KV-cache group since vLLM 0.18, one flat list of ids before.
    if not isinstance(groups, list):
        return False
    kinds = set(map(type, groups))
    return kinds <= {int, list} and (int in kinds or any(groups))


def _reachable(params: dict[str, msgspec.Raw], values: dict[str, Any], host: str) -> dict[str, Any]:
    """With the host at which the proxy reaches the engine, in place of a host that only the engine itself can reach."""
    is_local = host in _LOCAL_HOSTS or host.startswith("127.")
    if is_local or values.get("remote_host") not in _LOCAL_HOSTS:
        return dict(params)
    return {**params, "remote_host": encoded(host)}


def _count(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None
