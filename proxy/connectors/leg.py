"""One request to a worker (a leg): its path, body and headers, and the handoff from the prefill to the decode leg."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from ..fleet.worker import Worker
from ..leg_moves import LegsEvent
from ..openai.answer_shapes import Incomplete, UsageOnly, body_usage, usage_of
from ..openai.body_members import NULL, Edited, Part, answer_as, decoded, encoded, members, spliced, value_of
from ..openai.request import CHOOSING, Endpoint, Fields
from ..readback.handles import Handle

REQUEST_ID = "X-Request-Id"

# Members that are never forwarded.
# * The transfer members hold peers' addresses and block ids. From a client they can hang a request, read another
#   tenant's KV, open connections to any host, or kill the engine: only connectors write them.
# * The ranks (SGLang's) would have one client choose where in an engine it and what it displaces are computed; by
#   TensorRT-LLM's `conversation_params` and SGLang's `routing_key` engines choose by a name that any client may give.
# * `session_params` goes on with a conversation that SGLang keeps: anybody's whose name is known, and by its `rid`.
# * `prompt_token_ids` would take the place of the messages by which the turn is routed; TensorRT-LLM's D gets them.
# * `request_id` would name the request inside the engine. vLLM prefers the header, but /v1/responses reads no header,
#   and P2pNccl takes its peers' addresses from that name. The proxy sets its own where a tenant's responses are stored.
# * `rid` is SGLang's name for the same.
# * `conversation_id` is this proxy's own.
PRIVATE = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "disaggregated_params", "transfer_id"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "disagg_prefill_dp_rank"),
        *("routed_dp_rank", "data_parallel_rank", "decode_tp_size", "conversation_params", "routing_key"),
        *("session_params", "prompt_token_ids", "prompt_token_ids_b64"),
        *("request_id", "rid", "conversation_id"),
    }
)

# vLLM merges `vllm_xargs` into the very dict that it then reads the transfer parameters from, so they can hide there.
_XARGS = "vllm_xargs"
_HIDDEN = ("kv_transfer_params", "ec_transfer_params")

# What clients say to this proxy, and it to vLLM, that another engine refuses or takes for something else.
# * In SGLang a higher `priority` is served first, and an engine without priorities may refuse it. `input_ids` would
#   take the place of a chat's messages, as `prompt_token_ids` do.
# * TensorRT-LLM refuses each member that it does not know. Its `priority` lies between 0 and 1, and it takes a
#   `cache_salt` in chats alone.
_UNTAKEN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "sglang": frozenset(("priority", "input_ids")),
        "trtllm": frozenset(("priority", "session_id", "prompt_cache_key", _XARGS)),
    }
)
_SALT, _SALTED_IN_CHATS = "cache_salt", ("trtllm",)


class Pair(msgspec.Struct, frozen=True):
    """The P that prefills and the D that answers, for one attempt."""

    prefill: Worker
    decode: Worker
    key: str = ""  # the attempt's, by the connector's `new_key`: in both legs
    handle: Handle | None = None  # of KV that P reads back from D before it computes the rest


class LegRequest(msgspec.Struct, frozen=True):
    """One upstream POST. `headers` are only those that the leg itself needs, not authorization or content type."""

    path: str
    parts: tuple[Part, ...]  # of the body; the client's own bytes are not copied
    headers: dict[str, str]

    @property
    def body(self) -> bytes:
        first = self.parts[0]
        return first if len(self.parts) == 1 and isinstance(first, bytes) else b"".join(self.parts)


class Handoff(msgspec.Struct, frozen=True):
    """P's answer, checked: what D needs to pull the prompt's KV. It expires within seconds and is used once."""

    params: dict[str, Any]  # opaque and complete, forwarded as it is; empty where the connector puts nothing in bodies
    tokens: int  # prompt tokens that the handoff covers; 0 where P does not say
    cached_tokens: int | None  # prompt tokens that P found in its own cache; None where P does not say
    prompt: msgspec.Raw = NULL  # its token ids, where D is given them in place of the text

    event: ClassVar[LegsEvent] = LegsEvent.HANDED_OVER

    @classmethod
    def untold(cls, pair: Pair) -> Handoff:
        """As long as P has not answered, where both legs run at once: not forwarded, but `params` name P in errors."""
        told = pair.prefill.coordinates.values()
        names = (pair.prefill.host, *(value for value in told if not value.isdecimal()))
        return cls({name: encoded(name) for name in names}, 0, None)


def counts_of(answer: bytes) -> Handoff:
    """Where D needs nothing of P's answer: what P has counted."""
    usage = body_usage(answer)
    return Handoff({}, usage.prompt_tokens or 0, usage.cached_tokens)


CHOICES_NOT_ONE = "choices_not_one"  # P is asked for one: of which of several it tells, nobody knows


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Ended(UsageOnly):
    """Why an answer ended, in whichever API's words: chat and completions, Messages, Responses."""

    choices: list[_Choice] | None = None
    stop_reason: str | None = None
    incomplete_details: Incomplete | None = None


_AT_LENGTH = ("length", "max_tokens", "max_output_tokens")


def counts_at_length(answer: bytes) -> Handoff | NoHandoff:
    """As `counts_of`, of a P that hands over only what ends for its length, and does not tell D when it does not."""
    ended = answer_as(answer, _Ended)
    if ended is None:
        return NoHandoff("answer_undecodable")
    if ended.choices and len(ended.choices) > 1:
        return NoHandoff(CHOICES_NOT_ONE)
    cut = ended.incomplete_details.reason if ended.incomplete_details is not None else None
    reasons = [choice.finish_reason for choice in ended.choices or ()] or [ended.stop_reason or cut]
    if not all(reason in _AT_LENGTH for reason in reasons):
        return NoHandoff("not_ended_by_length")
    usage = usage_of(ended.usage)
    return Handoff({}, usage.prompt_tokens or 0, usage.cached_tokens)


class Finished(msgspec.Struct, frozen=True):
    """P's first token was the last one: its answer is the client's, and there is nothing for D to do."""

    answer: bytes  # P's whole body
    cached_tokens: int | None  # as of a `Handoff`

    event: ClassVar[LegsEvent] = LegsEvent.WHOLE


class NoHandoff(msgspec.Struct, frozen=True):
    """Why P's answer cannot be handed over. D then gets the plain body and computes the prompt itself."""

    reason: str  # from a bounded set: it labels a metric

    event: ClassVar[LegsEvent] = LegsEvent.NOTHING


def public_fields(fields: Fields) -> Fields:
    kept = dict(fields)  # callers edit it
    if not PRIVATE.isdisjoint(kept):
        for name in PRIVATE:
            kept.pop(name, None)
    xargs = members(kept[_XARGS]) if _XARGS in kept else None
    if xargs is not None and any(name in xargs for name in _HIDDEN):
        kept[_XARGS] = encoded({name: value for name, value in xargs.items() if name not in _HIDDEN})
    if isinstance(fields, Edited):
        kept |= fields.own
    return kept


def client_wants_usage(endpoint: Endpoint, fields: Fields) -> bool:
    """Whether the client gets usage in its stream without an edit by the proxy.

    Only chat and completions have the choice. A value that is not a boolean is left for the worker to judge.
    """
    if endpoint not in CHOOSING:
        return True
    value = fields.get("stream_options", NULL)
    options = members(value)
    if options is None:
        return decoded(value) is not None
    return value_of(options, "include_usage") not in (None, False)


def taken_fields(endpoint: Endpoint, fields: Fields, engine: str) -> Fields:
    """Without what an engine of this kind does not take."""
    untaken = _UNTAKEN.get(engine, frozenset())
    if engine in _SALTED_IN_CHATS and endpoint is not Endpoint.CHAT:
        untaken |= {_SALT}
    if untaken.isdisjoint(fields):  # as nearly always
        return fields
    return {name: value for name, value in fields.items() if name not in untaken}


def answering_fields(endpoint: Endpoint, fields: Fields, engine: str = "vllm") -> Fields:
    """The members of the leg that answers the client: the client's own, with usage in every stream.

    The usage chunk tells the proxy true token counts. The relay hides it from a client that did not ask for it.
    """
    kept = public_fields(fields)
    if engine in _UNTAKEN:
        kept = taken_fields(endpoint, kept, engine)
    if "stream" not in kept or decoded(kept["stream"]) is not True or client_wants_usage(endpoint, kept):
        return kept
    options = members(kept.get("stream_options", NULL)) or {}
    # Continuous usage needs include_usage, which this client did not set: the relay would have to remove it again.
    others = {name: value for name, value in options.items() if name != "continuous_usage_stats"}
    kept["stream_options"] = encoded({**others, "include_usage": True})
    return kept


def leg(endpoint: Endpoint, fields: Fields, request_id: str, original: Fields) -> LegRequest:
    return LegRequest(endpoint, spliced(fields, original), {REQUEST_ID: request_id})


def plain_leg(endpoint: Endpoint, fields: Fields, leg_id: str, engine: str = "vllm") -> LegRequest:
    """The leg of LOCAL and REPLICA, and of a SPLIT without a handoff: the client's request, and nothing about KV."""
    return leg(endpoint, answering_fields(endpoint, fields, engine), leg_id, fields)
