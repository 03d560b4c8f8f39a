"""TensorRT-LLM, context first: P answers with `disaggregated_params`, and D gets them with the prompt's token ids.

D finds P's KV by `disagg_request_id`, which the orchestrator chose, at an address that only the engines read. If P's
first token ends the answer, nothing is handed over: P's answer is the whole one. Generation first, both legs come at
once, D is told P's `ctx_info_endpoint`, and P computes once D has come. Both engines reuse blocks: D asks P for those
that it lacks. Only chat and completions carry the parameters. Source: TensorRT-LLM 1.4.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from ppd.proxy.config import PORT_PATTERN
from ppd.proxy.fleet.worker import Role

from ..core.errors import BadRequest
from ..core.fault_orders import FaultLeg
from ..core.handoffs import HandedOver, RemotePrefill, Transfer
from .legs import Leg, Own, fields_of, plain

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Tokens = Annotated[list[int], msgspec.Meta(min_length=1)]
_WHERE = "disaggregated_params"
_CONVERSATION = "conversation_params"
_PATHS = ("/v1/chat/completions", "/v1/completions")
_ENDPOINT = re.compile(rf"tcp://(.+):({PORT_PATTERN})")
_LEGS = {"context_only": FaultLeg.PREFILL, "generation_only": FaultLeg.DECODE}


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    disagg_request_id: _Id
    schedule_style: Literal[0] = 0  # context first
    return_prompt_token_ids_b64: Literal[None] = None
    resolved_thinking: bool | None = None


class _Context(_Common):
    request_type: Literal["context_only"]


class _Generation(_Common):
    request_type: Literal["generation_only"]
    first_gen_tokens: _Tokens
    ctx_request_id: _Id
    encoded_opaque_state: str
    ctx_dp_rank: Literal[0] = 0
    draft_tokens: Literal[None] = None
    ctx_usage: dict[str, Any] | None = None
    first_gen_log_probs: list[Any] | None = None


class _Early(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    disagg_request_id: _Id
    schedule_style: Literal[1]  # generation first


class _EarlyContext(_Early):
    request_type: Literal["context_only"]


class _EarlyGeneration(_Early):
    request_type: Literal["generation_only"]
    ctx_request_id: _Id
    ctx_info_endpoint: str
    ctx_dp_rank: Literal[0] | None = None


class _OpaqueState(msgspec.Struct):
    """Where P's KV is, and what else the parameters beside it must say."""

    engine_id: str
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    disagg_request_id: int
    first_gen_tokens: list[int]


class _Conversation(msgspec.Struct, forbid_unknown_fields=True):
    conversation_id: Annotated[str, msgspec.Meta(min_length=1)]


class TrtLlm:
    engine = "trtllm"
    is_joint = False
    is_written = False
    key_member = f"{_WHERE}.disagg_request_id"

    def leg(self, members: Mapping[str, Any], role: Role) -> FaultLeg:
        params = members.get(_WHERE)
        kind = params.get("request_type") if isinstance(params, dict) else None
        return _LEGS.get(kind, FaultLeg.PLAIN) if isinstance(kind, str) else FaultLeg.PLAIN

    def read(self, leg: Leg, own: Own) -> tuple[Transfer, ...]:
        if leg.path not in _PATHS and (given := leg.members.keys() & {_WHERE, _CONVERSATION}):
            raise BadRequest(f"{min(given)}: Extra inputs are not permitted", min(given))
        if (conversation := leg.members.get(_CONVERSATION)) is not None:
            fields_of(conversation, _Conversation, _CONVERSATION)
        params = leg.members.get(_WHERE)
        if params is None or (isinstance(params, dict) and params.get("request_type") == "context_and_generation"):
            return plain(leg)
        if leg.sequences != 1:
            raise BadRequest(f"{_WHERE}: only one prompt and one choice can be handed over", _WHERE)
        if self.leg(leg.members, own.role) is FaultLeg.DECODE:
            return (self.pull(params),)
        key = self.context_id(params)
        if leg.members.get("stream"):
            raise BadRequest("stream: must be false with request_type context_only", "stream")
        return (Transfer(hands_over=True, key=key, only_at_length=not self.is_joint, ends_after_prefill=True),)

    def context_id(self, params: Any) -> str:
        return str(fields_of(params, _Context, _WHERE).disagg_request_id)

    def pull(self, params: Any) -> Transfer:
        return _pull(fields_of(params, _Generation, _WHERE))

    def answer(self, handed_over: HandedOver, own: Own) -> dict[str, Any] | None:
        """The choice's `disaggregated_params`."""
        request_id = int(handed_over.key)
        first = [handed_over.first_token]
        state = _OpaqueState(own.engine_id, own.host, own.port, request_id, first)
        return {
            "request_type": "context_only",
            "first_gen_tokens": first,
            "ctx_request_id": request_id,
            "disagg_request_id": request_id,
            "ctx_dp_rank": 0,
            "encoded_opaque_state": base64.b64encode(msgspec.msgpack.encode(state)).decode(),
            "draft_tokens": None,
        }

    def coordinates(self, own: Own) -> dict[str, str]:
        return {}

    def page(self, path: str, query: Mapping[str, str], own: Own) -> None:
        return None


class TrtLlmEarly(TrtLlm):
    """Generation first."""

    is_joint = True

    def context_id(self, params: Any) -> str:
        return str(fields_of(params, _EarlyContext, _WHERE).disagg_request_id)

    def pull(self, params: Any) -> Transfer:
        fields = fields_of(params, _EarlyGeneration, _WHERE)
        key = str(fields.disagg_request_id)
        if fields.ctx_request_id != fields.disagg_request_id:
            raise BadRequest(f"{_WHERE}.ctx_request_id: must be {key}", f"{_WHERE}.ctx_request_id")
        if (told := _ENDPOINT.fullmatch(fields.ctx_info_endpoint)) is None:
            name = f"{_WHERE}.ctx_info_endpoint"
            allowed = "tcp://host:port, with a port from 1 to 65535, as a context server tells it"
            raise BadRequest(f"{name}: must be {allowed}, got {fields.ctx_info_endpoint}", name)
        return Transfer(key=key, remote=RemotePrefill("", key, told[1], int(told[2]), None))

    def answer(self, handed_over: HandedOver, own: Own) -> None:
        return None


def _pull(fields: _Generation) -> Transfer:
    try:
        state = msgspec.msgpack.decode(base64.b64decode(fields.encoded_opaque_state, validate=True), type=_OpaqueState)
    except (binascii.Error, ValueError) as exc:
        name = f"{_WHERE}.encoded_opaque_state"
        raise BadRequest(f"{name}: is not what a context server answered", name) from exc
    for name, given, answered in (
        ("disagg_request_id", fields.disagg_request_id, state.disagg_request_id),
        ("ctx_request_id", fields.ctx_request_id, state.disagg_request_id),
        ("first_gen_tokens", fields.first_gen_tokens, state.first_gen_tokens),
    ):
        if given != answered:
            raise BadRequest(
                f"{_WHERE}.{name}: the context server answered {answered}, got {given}", f"{_WHERE}.{name}"
            )
    key = str(state.disagg_request_id)
    return Transfer(key=key, remote=RemotePrefill(state.engine_id, key, state.host, state.port, None))
