"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.config import SimConfig
from ..core.errors import BadRequest, SimError
from ..core.sequence import Generation, Ranking
from ..core.tokens import Tokenizer, decode, is_token
from ..engine.deltas import Delta
from .answer_parts import Piece
from .logprobs import chat_logprobs, chat_logprobs_asked, completion_logprobs, completion_logprobs_asked
from .prompts import chat_prompt, thoughts
from .reply import DONE, Choice, Reply, data_event, openai_error
from .requests import JsonBody, formed, read_generation
from .structured import chat_form, completions_form


class _OpenAI:
    id_prefix: str
    object: str
    chunk_object: str

    def frame(self, reply: Reply, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": reply.id,
            "object": kind,
            "created": reply.created,
            "model": reply.generation.model,
            "choices": choices,
        }

    def chunk(self, reply: Reply, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self.frame(reply, self.chunk_object, choices)
        if reply.generation.continuous_usage:
            chunk["usage"] = reply.usage()
        return chunk

    def delta_chunk(self, reply: Reply, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        """The last one of a D names what it keeps, as on vLLM since 0.33."""
        params = delta.transfer_params
        named = {"kv_transfer_params": params} if params and params.get("do_remote_decode") else {}
        return self.chunk(reply, [choice]) | named

    def closing(self, reply: Reply) -> Iterable[bytes]:
        if reply.generation.include_usage:
            yield data_event(self.frame(reply, self.chunk_object, []) | {"usage": reply.usage()})
        yield DONE

    def failure(self, error: SimError) -> Iterable[bytes]:
        return [data_event(openai_error(error)), DONE]

    def error(self, error: SimError) -> dict[str, Any]:
        return openai_error(error)


class ChatCompletions(_OpenAI):
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def read(self, body: JsonBody, config: SimConfig) -> Generation:
        prompt = transferred_prompt(body, config) or chat_prompt(body, config)
        return _chat_generation(body, config, (prompt,))

    def whole(self, reply: Reply) -> dict[str, Any]:
        with_ids = reply.generation.return_token_ids
        choices = [self._choice(reply, at) for at in range(len(reply.choices))]
        return self.frame(reply, self.object, choices) | {
            "usage": reply.usage(),
            "prompt_token_ids": list(reply.generation.prompts[0]) if with_ids else None,
            "kv_transfer_params": reply.transfer_params,
        }

    def opening(self, reply: Reply) -> Iterable[bytes]:
        for at in range(len(reply.choices)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": at, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = self.chunk(reply, [choice])
            if reply.generation.return_token_ids:
                chunk["prompt_token_ids"] = list(reply.generation.prompts[0])
            yield data_event(chunk)

    def delta(self, reply: Reply, delta: Delta) -> Iterable[bytes]:
        if not is_shown(reply, delta):
            return
        choice = {
            "index": delta.choice,
            "delta": _chat_delta(reply, delta.choice),
            "logprobs": self._logprobs(reply, [] if delta.logprobs is None else [delta.logprobs]),
            "finish_reason": reply.finish_reason(delta.choice),
            **ending(reply, delta),
        }
        yield data_event(self.delta_chunk(reply, choice, delta))

    def _choice(self, reply: Reply, at: int) -> dict[str, Any]:
        choice, calls = reply.choices[at], []
        if (called := choice.called) is not None:
            calls = [_call_head(reply, at) | _function(called.name, called.arguments)]
        return {
            "index": at,
            "message": {
                "role": "assistant",
                "content": choice.content,
                "refusal": None,
                "tool_calls": calls,
                **({} if (name := reply.generation.reasoning_field) is None else {name: choice.reasoning or None}),
            },
            "logprobs": self._logprobs(reply, choice.logprobs),
            "finish_reason": reply.finish_reason(at),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if reply.generation.return_token_ids and reply.shows_tokens else None,
        }

    def _logprobs(self, reply: Reply, rankings: list[Ranking]) -> dict[str, Any] | None:
        top = reply.generation.sampling.logprobs
        return None if top is None or not reply.shows_tokens else chat_logprobs(rankings, top)


class BatchChatCompletions(ChatCompletions):
    """Several conversations at once, one choice each; never streamed."""

    def read(self, body: JsonBody, config: SimConfig) -> Generation:
        if body.flag("stream") or body.raw("tools") or (body.integer("n", least=1) or 1) > 1:
            raise BadRequest("Batch chat completions support neither streaming nor tools, and n must be 1.")
        batch = body.raw("messages")
        if not isinstance(batch, list) or not batch:
            raise BadRequest("messages must be a list of conversations.", "messages")
        prompts = tuple(chat_prompt(body.with_members(messages=messages), config) for messages in batch)
        return _chat_generation(body, config, prompts)


class Completions(_OpenAI):
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def read(self, body: JsonBody, config: SimConfig) -> Generation:
        prompts = read_prompts(body.raw("prompt"), config.tokenizer)
        generation = read_generation(body, config, prompts, limits=("max_tokens",), default_limit=16)
        return formed(generation, completions_form(body), logprobs=completion_logprobs_asked(body))

    def whole(self, reply: Reply) -> dict[str, Any]:
        choices = [self._choice(reply, at, choice) for at, choice in enumerate(reply.choices)]
        return self.frame(reply, self.object, choices) | {
            "usage": reply.usage(),
            "kv_transfer_params": reply.transfer_params,
        }

    def opening(self, reply: Reply) -> Iterable[bytes]:
        return ()

    def delta(self, reply: Reply, delta: Delta) -> Iterable[bytes]:
        if not is_shown(reply, delta):
            return
        choice = {
            "index": delta.choice,
            "text": delta.text,
            "logprobs": self._latest_logprobs(reply, delta),
            "finish_reason": delta.finish,
            **ending(reply, delta),
        }
        if reply.generation.return_token_ids and len(reply.choices[delta.choice].token_ids) == 1:
            choice["prompt_token_ids"] = list(reply.generation.prompts[delta.choice // reply.generation.choices])
        yield data_event(self.delta_chunk(reply, choice, delta))

    def _choice(self, reply: Reply, at: int, choice: Choice) -> dict[str, Any]:
        with_ids = reply.generation.return_token_ids
        prompt = reply.generation.prompts[at // reply.generation.choices]
        return {
            "index": at,
            "text": choice.text,
            "logprobs": None if reply.generation.sampling.logprobs is None else completion_logprobs(choice.logprobs),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if with_ids else None,
            "prompt_token_ids": list(prompt) if with_ids else None,
        }

    def _latest_logprobs(self, reply: Reply, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        before = decode(reply.choices[delta.choice].token_ids[:-1])
        return completion_logprobs([delta.logprobs], len(before))


def _chat_generation(body: JsonBody, config: SimConfig, prompts: tuple[tuple[int, ...], ...]) -> Generation:
    generation = read_generation(body, config, prompts, limits=("max_completion_tokens", "max_tokens"))
    return formed(generation, chat_form(body), thoughts(body, config), logprobs=chat_logprobs_asked(body))


def is_shown(reply: Reply, delta: Delta) -> bool:
    """False while text is held back for a stop string, or for the name of a tool."""
    is_asked = reply.shows_tokens and (reply.generation.return_token_ids or delta.logprobs is not None)
    return bool(reply.choices[delta.choice].latest != Piece() or delta.finish or is_asked)


def _chat_delta(reply: Reply, at: int) -> dict[str, Any]:
    piece = reply.choices[at].latest
    if piece.name is not None:
        call = _call_head(reply, at) | {"index": 0} | _function(piece.name, piece.arguments)
        return {"tool_calls": [call]}
    if piece.arguments:
        return {"tool_calls": [{"index": 0, "function": {"arguments": piece.arguments}}]}
    delta = {"content": piece.content} if piece.content or not piece.reasoning else {}
    if piece.reasoning and (name := reply.generation.reasoning_field) is not None:
        delta[name] = piece.reasoning
    return delta


def _call_head(reply: Reply, at: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-tool-{reply.call_id(at)}", "type": "function"}


def _function(name: str | None, arguments: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


def ending(reply: Reply, delta: Delta) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if delta.finish is not None:
        fields["stop_reason"] = delta.stop_reason
    if reply.generation.return_token_ids and reply.shows_tokens:
        fields["token_ids"] = [] if delta.token is None else [delta.token]
    return fields


def transferred_prompt(body: JsonBody, config: SimConfig) -> tuple[int, ...] | None:
    """P's token ids, used instead of rendering the messages again.

    On vLLM 0.32 they are in kv_transfer_params, on TensorRT-LLM beside the messages.
    """
    is_trtllm = config.connector == "trtllm"
    params = body if is_trtllm else JsonBody(body.mapping("kv_transfer_params") or {})
    if params.raw("prompt_token_ids") is None:
        return None
    tokens = params.token_ids("prompt_token_ids")
    if not tokens:
        raise BadRequest(
            "prompt_token_ids must not be empty.", "prompt_token_ids" if is_trtllm else "kv_transfer_params"
        )
    return tokens


def read_prompts(prompt: Any, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and is_token(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("prompt must be a string, a list of token ids, or a list of either.", "prompt")
    return tuple(_prompt(item, tokenizer) for item in prompt)


def _prompt(item: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(item, str):
        return tuple(tokenizer.tokens(item))
    if not isinstance(item, list) or not all(is_token(token) for token in item):
        raise BadRequest("prompt must be a string, a list of token ids, or a list of either.", "prompt")
    return tuple(item)
