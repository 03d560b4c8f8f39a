"""The bodies of the HTTP surface as JSON Schema: typed where the proxy reads them, open where the worker does."""

from __future__ import annotations

from typing import Any

from ..config import Lookup, Mode, StageOrder, Uncovered
from ..fleet.worker import Role, Source
from ..laws.accuracy import Basis
from ..laws.corrections import Figure
from ..openai.request import MODEL_LIMIT
from ..policy import Route
from ..sessions.table import MatchKind

Json = dict[str, Any]

_NAME = {"type": "string"}
_LAG: Json = {"type": "number", "minimum": 0, "description": "Seconds by which the event loop was late of late."}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number"}
_SECONDS = {"type": "number", "minimum": 0}
_STRING = {"type": ["string", "null"]}
_FLAG = {"type": ["boolean", "null"]}
_ID = {"type": ["string", "integer", "null"]}
_OPEN: Json = {}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: Json, optional: Json | None = None, **more: Any) -> Json:
    return {"type": "object", "required": [*required], "properties": required | (optional or {}), **more}


def _nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Json, **more: Any) -> Json:
    return {"type": "array", "items": schema, **more}


# -- what clients send

_MODEL = {"type": "string", "minLength": 1, "maxLength": MODEL_LIMIT}
_CAP = {"type": ["integer", "null"], "minimum": 0}
_IDS: Json = dict.fromkeys(("conversation_id", "session_id", "prompt_cache_key"), _ID)
_EVERY: Json = {
    "model": _MODEL,
    "stream": _FLAG,
    "cache_salt": _STRING,
    "max_tokens": _CAP,
    "max_completion_tokens": _CAP,
    "max_output_tokens": _CAP,
    "priority": {"type": ["integer", "null"]},
    **_IDS,
}
_CHOICES: Json = {
    "n": {"type": ["integer", "null"], "minimum": 1},
    "best_of": {"type": ["integer", "null"], "minimum": 1},
    "echo": _FLAG,
    "use_beam_search": _FLAG,
    "stream_options": _nullable(_object({}, {"include_usage": _FLAG})),
}
_MEMBERS = _object({}, {"type": _STRING, "text": _STRING})
_CONTENT = {"anyOf": [_STRING, _list({"anyOf": [_NAME, _MEMBERS]})]}
_FUNCTION = _nullable(_object({}, {"name": _STRING, "arguments": _OPEN}))
_TOOL_CALL = _object({}, {"id": _STRING, "function": _FUNCTION, "custom": _FUNCTION})
_MESSAGE = _object(
    {"role": _NAME},
    {
        "content": _CONTENT,
        "name": _STRING,
        "tool_call_id": _STRING,
        "tool_calls": _nullable(_list(_TOOL_CALL)),
        "function_call": _FUNCTION,
    },
)
_MESSAGES = _list(_MESSAGE, minItems=1)
_TOKEN = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_PROMPT = {
    "anyOf": [
        _NAME,
        _list(_TOKEN, minItems=1),
        _list(_NAME, minItems=1),
        _list(_list(_TOKEN, minItems=1), minItems=1),
    ]
}
_ITEM = _object({}, {"type": _STRING, "role": _STRING, "content": _CONTENT})


def _turn(prompt: Json, optional: Json) -> Json:
    required = {"model": _MODEL, **prompt}
    return _object(required, {name: schema for name, schema in (_EVERY | optional).items() if name not in required})


_REQUESTS: Json = {
    "Chat": _turn({"messages": _MESSAGES}, {**_CHOICES, "continue_final_message": _FLAG}),
    "Completions": _object(
        {"model": _MODEL}, {"prompt": _nullable(_PROMPT), "prompt_embeds": _OPEN} | _EVERY | _CHOICES
    )
    | {"anyOf": [{"required": ["prompt"]}, {"required": ["prompt_embeds"]}]},
    "Responses": _turn(
        {"input": {"anyOf": [_NAME, _list(_ITEM, minItems=1)]}},
        {
            "instructions": _CONTENT,
            "previous_response_id": _STRING,
            "truncation": _STRING,
            "conversation": {"anyOf": [_STRING, _object({"id": _NAME})]},
        },
    ),
    "Messages": _turn({"messages": _MESSAGES}, {"system": _CONTENT}),
    "PassedThrough": {"description": "What the endpoint of that name takes; its member `model` chooses the worker."},
}

# -- what clients get

_ERROR = _object({"message": _NAME, "type": _NAME, "param": _STRING, "code": {"type": ["string", "integer", "null"]}})
_ANSWERS: Json = {
    "Error": _object({"error": _ERROR}),
    "WorkerError": {"description": "The proxy's shape, or whatever the worker calls an error."},
    "TurnError": _object({"error": {"anyOf": [_ERROR, {"description": "The worker's own error."}]}}),
    "MessagesError": _object({"error": _OPEN}, {"type": {"const": "error"}}),
    "Version": _object({"version": _NAME}),
    "Load": _object({"server_load": _COUNT}),
    "TurnAnswer": {"type": "object", "description": "In the shape of the API whose path was asked."},
    "Models": _object({"object": {"const": "list"}, "data": _list(_object({"id": _NAME}))}),
    "Ways": _object({**{name: {"type": "boolean"} for name in ("split", "local", "replica")}, "loop_lag_s": _LAG}),
    "Alive": _object({"loop_lag_s": _LAG}),
    "Object": {"type": "object"},
}

# -- the operator's API

_WEIGHTS: Json = {
    "mode": {"enum": [*Mode]},
    "order": {"enum": [*StageOrder]},
    "x": {"type": "number", "minimum": 0, "maximum": 1},
    "w_ttft": {"type": "number", "minimum": 0},
    "w_tpot": {"type": "number", "minimum": 0},
    "slo_ttft_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 3600},
    "slo_ttft_factor": {"type": "number", "exclusiveMinimum": 0, "maximum": 1000},
    "slo_tpot_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 60},
    "lookup": {"enum": [*Lookup]},
    "uncovered": {"enum": [*Uncovered]},
    "table": _NAME,
    "local_tokens": _COUNT,
    "local_share": {"type": "number", "minimum": 0, "maximum": 1},
    "prefill_busy_tokens": _COUNT,
    "prefill_busy_requests": _COUNT,
    "decode_busy_requests": _COUNT,
}
_WORKER = _object(
    {
        "id": _NAME,
        "name": _NAME,
        "role": {"enum": [*Role]},
        "state": {"type": "string"},
        "models": _list(_NAME),
        "engine": _NAME,
        "engine_version": _NAME,
        "connector": _NAME,
        "missing_coordinates": _list(_NAME),
        "keeps_prefixes": {"type": ["boolean", "null"]},
        "reads_back": {"type": "boolean"},
        "takes_plain": {"type": "boolean"},
        "source": {"enum": [*Source]},
        "x": {"type": ["number", "null"]},
        "profile": _NAME,
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "sidecar": {"type": "boolean"},
        "incarnation": _NAME,
        "silent_s": {"type": ["number", "null"]},
        "running": _COUNT,
        "waiting": _COUNT,
        "kv_usage": _NUMBER,
        "kv_capacity_tokens": _COUNT,
        "report_age_s": {"type": ["number", "null"]},
        "inflight": _COUNT,
        "queued_prefill_tokens": _COUNT,
        "decoding_sequences": _COUNT,
        "decoding_context_tokens": _COUNT,
        "prefill_left_s": _SECONDS,
        "reserved_kv_tokens": _COUNT,
        "link_free_in_s": _SECONDS,
    }
)
_SESSION = _object(
    {
        "session_id": _NAME,
        "turn": _COUNT,
        "held_tokens": _COUNT,
        "decode": _OPEN,
        "prefill": _OPEN,
        "idle_s": _NUMBER,
    }
)
_NUMBERS = _list({"type": ["number", "null"]})
_TARGETS = _object(dict.fromkeys(("ttft_s", "ttft_factor", "tpot_s"), _NUMBER))
_FIGURE: Json = {"type": ["number", "null"]}
_PREDICTED = ("predicted_ttft_s", "predicted_tpot_s", "ttft_error", "tpot_error")
_CANDIDATES = _object(
    {"route": _list({"enum": [*Route]}), "decode": _list(_NAME)},
    {
        **dict.fromkeys(("prefill", "source", "excluded"), _list(_NAME)),
        "fetched_tokens": _list(_COUNT),
        "ttft_s": _NUMBERS,
        "tpot_s": _NUMBERS,
        "terms": {"type": "object", "additionalProperties": _NUMBERS},
        "chosen": {"type": ["integer", "null"], "default": 0},
        "held": {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": _COUNT}},
    },
    description="The ways that were judged, at most 8, the best first: columns, left out where they say nothing.",
)
_RECEIPT = _object(
    {
        "id": _NAME,
        "at": _NAME,
        "endpoint": _NAME,
        "model": _NAME,
        "turn": _COUNT,
        "kind": {"enum": [kind.name.lower() for kind in MatchKind]},
        "status": _COUNT,
        "slo": _TARGETS,
        "candidates": _nullable(_CANDIDATES),
        "laws": _NAME,
        **dict.fromkeys(_PREDICTED, _FIGURE),
        "outcome": {"enum": ["running", "completed", "rejected", "failed", "cancelled", "broken"]},
        "legs": _list(_object({"kind": _NAME, "worker": _NAME, "started_s": _NUMBER})),
    }
)
_FACTOR = _object({"factor": _NUMBER, "turns": _NUMBER, "median_error": {"type": ["number", "null"]}})
_LAWS = _object(
    {
        "version": _NAME,
        "workers": _list(
            _object(
                {
                    "id": _NAME,
                    "name": _NAME,
                    "role": {"enum": [*Role]},
                    "profile": _NAME,
                    **dict.fromkeys(Figure, _FACTOR),
                }
            )
        ),
        "judged": _list(
            _object(
                {
                    "basis": {"enum": [*Basis]},
                    "name": _NAME,
                    "figure": {"enum": [*Figure]},
                    "turns": _COUNT,
                    "median_error": _NUMBER,
                    "stale": {"type": "boolean"},
                }
            )
        ),
        "turns_beyond_range": {"type": "object", "additionalProperties": _COUNT},
    }
)
_OPERATOR: Json = {
    "WorkerCall": _object({"worker": _NAME}, additionalProperties=False),
    "DrainCall": _object({"draining": {"type": "boolean"}}, additionalProperties=False),
    "WeightsCall": _object({}, _WEIGHTS, additionalProperties=False),
    "Weights": _object(_WEIGHTS),
    "Named": _object({"id": _NAME}),
    "Worker": _WORKER,
    "Workers": _object({"workers": _list(ref("Worker"))}),
    "Session": _SESSION,
    "Sessions": _object({"count": _COUNT, "newest": _list(ref("Session"))}),
    "Receipt": _RECEIPT,
    "Laws": _LAWS,
    "Receipts": _object({"newest": _list(ref("Receipt"))}),
}

SCHEMAS: Json = _REQUESTS | _ANSWERS | _OPERATOR
