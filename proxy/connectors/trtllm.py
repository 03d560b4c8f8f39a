"""TensorRT-LLM, in both of its styles: the `disaggregated_params` that P and D get, and those that P answers.

Context first: P computes the prompt, samples the first token, and answers with opaque parameters and the prompt's token
ids; D gets both back and answers from that token on. If the first token ends the answer, P's answer is all of it.
Generation first: both legs at once, under an id of the proxy's; D is told P's endpoint, which `GET /server_info` tells.
If P's first token ends the answer and D has not begun, P's answer is all of it too: nobody says whether such a P hands
over. P samples with what the client asked for, and its role ends it after one token. An id is used once.

Source: TensorRT-LLM 1.4 (`trtllm-serve disaggregated`); the layout is in docs/protocols.md.
"""

from __future__ import annotations

import secrets
from types import MappingProxyType
from typing import Any

import msgspec

from ..errors import UNREADABLE
from ..fleet.worker import PREFIX_CACHE, Role, Worker
from ..leg_moves import LegOrder
from ..openai.answer_shapes import body_usage
from ..openai.body_members import NULL, answer_as, decoded, encoded
from ..openai.request import CHOOSING, Endpoint, Fields
from .coordinates import ENDPOINT, RANK, SWITCH
from .leg import CHOICES_NOT_ONE, Finished, Handoff, LegRequest, NoHandoff, Pair, answering_fields, counts_of, leg

ENGINE = "trtllm"
PARAMS = "disaggregated_params"
GENERATION_FIRST = 1  # of `schedule_style`
_LEAST_ID = 1 << 62  # smaller ones may be an engine's own

_MOVED = ("length", "not_finished")  # how P's answer ends where D is to go on
_WHOLE = ("stop", "tool_calls", "function_call", "content_filter")  # and where its first token was the last one


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    disaggregated_params: dict[str, msgspec.Raw] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: msgspec.Raw = NULL
    prompt_token_ids: msgspec.Raw = NULL


class TrtLlm:
    name = "trtllm"
    order = LegOrder.P_THEN_D
    needs_handoff = True
    coordinates = MappingProxyType({PREFIX_CACHE: SWITCH})
    takes_either_leg = False
    decodes_alone = True
    finds_by_content = False
    endpoints = frozenset(CHOOSING)  # elsewhere TensorRT-LLM takes no parameters

    def new_key(self) -> str:
        return _new_id()

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        return leg(endpoint, _context(endpoint, fields, pair), leg_id, fields)

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | Finished | NoHandoff:
        body = answer_as(answer, _Answer)
        if body is None:
            return NoHandoff("answer_undecodable")
        if len(body.choices) != 1:
            return NoHandoff(CHOICES_NOT_ONE)
        choice, usage = body.choices[0], body_usage(answer)
        if choice.finish_reason in _WHOLE:
            return Finished(answer, usage.cached_tokens)
        if choice.finish_reason not in _MOVED:
            return NoHandoff("finish_reason_unknown")
        if not choice.disaggregated_params:
            return NoHandoff("params_missing")
        if (reason := _flaw(choice.disaggregated_params, body.prompt_token_ids, pair)) is not None:
            return NoHandoff(reason)
        params: dict[str, Any] = {**choice.disaggregated_params, "request_type": "generation_only"}
        if body.usage != NULL:
            params["ctx_usage"] = body.usage
        return Handoff(params, usage.prompt_tokens or 0, usage.cached_tokens, prompt=body.prompt_token_ids)

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        body = answering_fields(endpoint, fields, ENGINE)
        if handoff is not None:
            body[PARAMS] = encoded(handoff.params)
            body["prompt" if endpoint is Endpoint.COMPLETIONS else "prompt_token_ids"] = handoff.prompt
        return leg(endpoint, body, leg_id, fields)


class TrtLlmGenerationFirst:
    name = "trtllm_gen_first"
    order = LegOrder.D_FIRST
    needs_handoff = False
    coordinates = MappingProxyType(
        {"ctx_info_endpoint": ENDPOINT.of(Role.PREFILL), "ctx_dp_rank": RANK, PREFIX_CACHE: SWITCH}
    )
    takes_either_leg = False
    decodes_alone = True
    finds_by_content = False
    endpoints = frozenset(CHOOSING)  # elsewhere TensorRT-LLM takes no parameters

    def new_key(self) -> str:
        return _new_id()

    def prefill_leg(self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str) -> LegRequest:
        body = _context(endpoint, fields, pair, schedule_style=GENERATION_FIRST)
        return leg(endpoint, body, leg_id, fields)

    def handoff(self, answer: bytes, pair: Pair) -> Handoff | Finished | NoHandoff:
        counts = counts_of(answer)
        return Finished(answer, counts.cached_tokens) if _is_whole(answer) else counts

    def decode_leg(
        self, endpoint: Endpoint, fields: Fields, pair: Pair, leg_id: str, handoff: Handoff | None
    ) -> LegRequest:
        told = pair.prefill.coordinates
        body = answering_fields(endpoint, fields, ENGINE)
        body[PARAMS] = encoded(
            {
                "request_type": "generation_only",
                "schedule_style": GENERATION_FIRST,
                "disagg_request_id": int(pair.key),
                "ctx_request_id": int(pair.key),
                "ctx_info_endpoint": told["ctx_info_endpoint"],
                "ctx_dp_rank": int(told["ctx_dp_rank"]) if "ctx_dp_rank" in told else None,  # None: any
            }
        )
        return leg(endpoint, body, leg_id, fields)


def _is_whole(answer: bytes) -> bool:
    body = answer_as(answer, _Answer)
    return body is not None and len(body.choices) == 1 and body.choices[0].finish_reason in _WHOLE


def info_url(worker: Worker) -> str:
    """Where a P tells its endpoint; empty if it need not be asked."""
    is_asked = worker.connector == TrtLlmGenerationFirst.name and worker.role is Role.PREFILL
    return f"{worker.base_url}/server_info" if is_asked and "ctx_info_endpoint" not in worker.coordinates else ""


class _Told(msgspec.Struct):
    ctx_info_endpoint: list[str] | str | None = None
    ctx_dp_rank: int | None = None


class _ServerInfo(msgspec.Struct):
    disaggregated_params: _Told


def endpoint_told(answer: bytes) -> dict[str, str]:
    """The coordinates in an answer to `info_url`; empty for an answer that is none. Of several endpoints the first."""
    try:
        told = msgspec.json.decode(answer, type=_ServerInfo).disaggregated_params
    except UNREADABLE:
        return {}
    said = told.ctx_info_endpoint or ""
    found = {"ctx_info_endpoint": said if isinstance(said, str) else said[0]}
    if told.ctx_dp_rank is not None:
        found["ctx_dp_rank"] = str(told.ctx_dp_rank)
    known = TrtLlmGenerationFirst.coordinates
    return found if all(known[name].pattern.fullmatch(value) for name, value in found.items()) else {}


def _new_id() -> str:
    return str(_LEAST_ID + secrets.randbits(62))


def _context(endpoint: Endpoint, fields: Fields, pair: Pair, **style: int) -> Fields:
    """P's body: D's, as what bears on the first token stays."""
    body = {**answering_fields(endpoint, fields, ENGINE), "stream": encoded(False)}
    body.pop("stream_options", None)
    body[PARAMS] = encoded({"request_type": "context_only", "disagg_request_id": int(pair.key), **style})
    return body


def _flaw(params: dict[str, msgspec.Raw], prompt: msgspec.Raw, pair: Pair) -> str | None:
    """The first thing for which D would fail the request, or answer another one."""
    told = {name: decoded(value) for name, value in params.items()}
    if told.get("request_type") != "context_only":
        return "not_a_context"
    for name in ("ctx_request_id", "disagg_request_id"):
        if type(told.get(name)) is not int:
            return f"{name}_missing"
    if str(told["disagg_request_id"]) != pair.key:
        return "another_request"
    if not _are_tokens(told.get("first_gen_tokens")):
        return "first_gen_tokens_missing"
    state = told.get("encoded_opaque_state") or told.get("ctx_info_endpoint")
    if not isinstance(state, str | list) or not state:
        return "opaque_state_missing"
    return None if _are_tokens(decoded(prompt)) else "prompt_token_ids_missing"


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int and each >= 0 for each in value)
