"""What the HTTP servers of two kinds of engine do not have in common: some paths, and how they write errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from aiohttp import web

from ppd.proxy.fleet.worker import Role

from ..core.errors import BadRequest
from ..engine.engine import SimEngine
from . import pooling
from .reply import json_response

VLLM = "0.33.0"  # the releases whose wire formats these follow
_LAST_WITH = {"p2p_nccl": "0.23.0"}  # newer ones lack that connector
SGLANG = "0.5.23"
TRTLLM = "1.4.0rc1"

_MODES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}


class EngineApi(Protocol):
    owner: str  # of its models
    metrics: str  # the path of those for Prometheus
    hears_uuid: bool  # a media part's `uuid` is its item's name

    def add_routes(self, app: web.Application) -> None: ...

    def error(self, payload: dict[str, Any]) -> dict[str, Any]: ...

    def check(self, path: str, members: Mapping[str, Any]) -> None:
        """BadRequest for a member that such an engine refuses."""
        ...

    def whole(self, payload: dict[str, Any], prompt: tuple[int, ...]) -> dict[str, Any]:
        """An answer that is not streamed, from one as vLLM writes it. `prompt`: the first one's tokens."""
        ...


_SHARED = frozenset(  # that TensorRT-LLM takes in chats and in completions; it refuses any other
    {
        *("model", "max_tokens", "n", "best_of", "use_beam_search", "stream", "stream_options", "user", "seed"),
        *("temperature", "top_p", "top_k", "top_p_min", "min_p", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "length_penalty", "early_stopping", "logit_bias", "logprobs", "prompt_ignore_length"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens"),
        *("spaces_between_special_tokens", "truncate_prompt_tokens", "lora_request", "echo", "add_special_tokens"),
        *("response_format", "disaggregated_params", "conversation_params", "priority", "thinking_token_budget"),
    }
)
_TRTLLM_MEMBERS = {
    "/v1/completions": _SHARED | {"prompt", "suffix", "detokenize", "return_context_logits"},
    "/v1/chat/completions": _SHARED
    | {
        *("messages", "prompt_token_ids", "prompt_token_ids_b64", "max_completion_tokens", "top_logprobs", "tools"),
        *("tool_choice", "parallel_tool_calls", "reasoning_effort", "thinking", "add_generation_prompt", "documents"),
        *("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "cache_salt"),
        "agent_hierarchy",
    },
}


class VllmApi:
    owner = "vllm"
    hears_uuid = True
    metrics = "/metrics"

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    def add_routes(self, app: web.Application) -> None:
        get, post = app.router.add_get, app.router.add_post
        post("/v1/audio/transcriptions", self.transcribe)
        get("/version", self.version)
        get("/load", self.load)
        get("/ping", self.ping)
        post("/ping", self.ping)
        get("/kv_event_sources", self.kv_event_sources)
        if self._engine.config.dev_mode:
            post("/reset_prefix_cache", self.reset_prefix_cache)

    def error(self, payload: dict[str, Any]) -> dict[str, Any]:
        return payload

    def check(self, path: str, members: Mapping[str, Any]) -> None:
        """What it does not know it ignores."""

    def whole(self, payload: dict[str, Any], prompt: tuple[int, ...]) -> dict[str, Any]:
        return payload

    async def ping(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self._engine.is_dead else 200)

    async def transcribe(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != "multipart/form-data":
            raise BadRequest("The body must be multipart/form-data.")
        form = await request.post()
        upload = form.get("file")
        if not isinstance(upload, web.FileField):
            raise BadRequest("file is required.", "file")
        return json_response(pooling.transcription(upload.filename, upload.file.read()))

    async def version(self, request: web.Request) -> web.StreamResponse:
        return json_response({"version": _LAST_WITH.get(self._engine.config.connector, VLLM)})

    async def load(self, request: web.Request) -> web.StreamResponse:
        return json_response({"server_load": len(list(self._engine.scheduler.sequences))})

    async def kv_event_sources(self, request: web.Request) -> web.StreamResponse:
        """By data-parallel rank. The limits of vLLM's queues are its defaults."""
        if (events := self._engine.events) is None:
            return json_response({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events.endpoint,
            "replay_endpoint": events.replay_endpoint,
            "buffer_steps": events.buffer_steps,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": events.topic,
        }
        return json_response({"0": source})

    async def reset_prefix_cache(self, request: web.Request) -> web.StreamResponse:
        preempts = request.query.get("reset_running_requests", "false").lower() in ("true", "1", "yes", "on")
        return json_response({"success": self._engine.reset_prefix_cache(preempts=preempts)})


class SglangApi:
    owner = "sglang"
    hears_uuid = False
    metrics = "/metrics"

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/health_generate", self.health_generate)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self.server_info)
        app.router.add_post("/flush_cache", self.flush_cache)

    def error(self, payload: dict[str, Any]) -> dict[str, Any]:
        return _flat(payload)

    def check(self, path: str, members: Mapping[str, Any]) -> None:
        """What it does not know it ignores."""

    def whole(self, payload: dict[str, Any], prompt: tuple[int, ...]) -> dict[str, Any]:
        payload.pop("kv_transfer_params", None)
        return payload

    async def health_generate(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self._engine.is_dead else 200)

    async def server_info(self, request: web.Request) -> web.StreamResponse:
        config = self._engine.config
        return json_response(
            {
                "version": SGLANG,
                "model_path": config.model,
                "served_model_name": config.model,
                "disaggregation_mode": _MODES.get(config.role, "null"),
                "disaggregation_bootstrap_port": self._engine.own.port,
                "disaggregation_decode_enable_radix_cache": config.decode_radix_cache,
                "page_size": config.block_size,
                "max_total_num_tokens": config.num_blocks * config.block_size,
            }
        )

    async def flush_cache(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self._engine.reset_prefix_cache(preempts=False) else 400)


class TrtLlmApi:
    owner = "tensorrt_llm"
    hears_uuid = False
    metrics = "/prometheus/metrics"

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/version", self.version)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/metrics", self.iterations)

    def error(self, payload: dict[str, Any]) -> dict[str, Any]:
        return _flat(payload)

    def check(self, path: str, members: Mapping[str, Any]) -> None:
        known = _TRTLLM_MEMBERS.get(path)
        if known is None:
            return
        if unknown := sorted(members.keys() - known):
            raise BadRequest(f"{unknown[0]}: Extra inputs are not permitted", unknown[0])
        priority = members.get("priority")
        if priority is not None and not (isinstance(priority, int | float) and 0 <= priority <= 1):
            raise BadRequest(f"priority: must be between 0 and 1, got {priority}", "priority")

    def whole(self, payload: dict[str, Any], prompt: tuple[int, ...]) -> dict[str, Any]:
        """P's parameters lie in the choice, and beside them the prompt."""
        params = payload.pop("kv_transfer_params", None)
        if params is not None:
            payload["choices"][0]["disaggregated_params"] = params
            payload["prompt_token_ids"] = list(prompt)
        return payload

    async def version(self, request: web.Request) -> web.StreamResponse:
        return json_response({"version": TRTLLM})

    async def server_info(self, request: web.Request) -> web.StreamResponse:
        host, port = self._engine.side_address
        return json_response(
            {"disaggregated_params": {"ctx_info_endpoint": [f"tcp://{host}:{port}"], "ctx_dp_rank": 0}}
        )

    async def iterations(self, request: web.Request) -> web.StreamResponse:
        """Of the engine's latest steps; empty, as where `enable_iter_perf_stats` is off."""
        return web.json_response([])


def _flat(payload: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's error body without the member `error` around it; Anthropic's as it is."""
    if payload.get("type") == "error":
        return payload
    error = payload.get("error") or {"message": payload.get("detail"), "type": "error", "param": None}
    return {"object": "error", **error}


APIS: dict[str, Callable[[SimEngine], EngineApi]] = {"vllm": VllmApi, "sglang": SglangApi, "trtllm": TrtLlmApi}
