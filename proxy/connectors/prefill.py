"""The prefill leg's body: the client's request cut down to computing the prompt's KV, and one token to throw away.

Two rules decide every row of `RULES`. P must not refuse or fail what D would serve. And P must render exactly the
prompt that D renders, because NIXL pairs blocks by position and nothing compares the tokens. So whatever a chat
template can see stays: messages, tools, template kwargs, media, salt, `reasoning_effort`, and `response_format`, which
templates of newer models print.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ..fleet.worker import Worker
from ..openai.body_members import decoded
from ..openai.request import Endpoint, Fields
from .leg import public_fields

Version = tuple[int, int]  # major and minor

_VERSION = re.compile(r"v?([0-9]{1,9})\.([0-9]{1,9})")
_ALL = frozenset(Endpoint)
_OPENAI = frozenset((Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES))
_RESPONSES = frozenset((Endpoint.RESPONSES,))
_MAX_TOKENS = frozenset((Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.MESSAGES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What happens to one member of the body; a `value` of None drops it."""

    member: str
    value: bytes | None = None
    add: bool = False  # also where the client did not send it, and whatever it sent
    endpoints: frozenset[Endpoint] = _ALL
    only: Callable[[Any], bool] | None = None  # applies only to values for which this is true
    engines_before: Version | None = None  # applies to engines older than this, not to one of unknown version
    why: str


def _is_forced(choice: Any) -> bool:
    kind = choice.get("type") if isinstance(choice, dict) else choice  # "required", a function, Messages' "any", "tool"
    return kind not in (None, "none", "auto")


RULES: tuple[Rule, ...] = (
    Rule(member="stream", value=b"false", why="the handoff is in a whole body; streams have it only since 0.33"),
    Rule(member="stream_options", why="refused with 400 where stream is false"),
    Rule(member="max_tokens", value=b"1", add=True, endpoints=_MAX_TOKENS, why="the least that an engine accepts"),
    Rule(member="max_output_tokens", value=b"1", add=True, endpoints=_RESPONSES, why="the cap's name in Responses"),
    Rule(member="max_completion_tokens", value=b"1", why="overrides max_tokens where it is sent, and only there"),
    Rule(member="min_tokens", why="above the cap it is refused with 400"),
    Rule(member="min_completion_tokens", why="above the cap it is refused with 400"),
    Rule(member="n", value=b"1", why="a handoff belongs to one sequence"),
    Rule(member="best_of", why="a handoff belongs to one sequence"),
    Rule(member="use_beam_search", why="a handoff belongs to one sequence, and beams get no transfer parameters"),
    Rule(member="stop", why="up to 0.20 a stop as the first token brings no handoff"),
    Rule(member="stop_token_ids", why="as stop"),
    Rule(member="stop_sequences", why="as stop, in Messages"),
    Rule(member="ignore_eos", value=b"true", add=True, endpoints=_OPENAI, why="as stop, for the end of sequence"),
    Rule(member="logprobs", why="P's token is thrown away; in completions a number, in chat a boolean"),
    Rule(member="top_logprobs", why="refused without logprobs"),
    Rule(member="logprob_token_ids", why="refused without logprobs"),
    Rule(member="prompt_logprobs", why="makes P skip its prefix cache, for numbers that nobody reads"),
    Rule(member="echo", why="repeats the prompt in an answer that nobody reads; with logprobs as prompt_logprobs"),
    Rule(member="return_token_ids", why="the prompt's ids in an answer that nobody reads"),
    Rule(member="return_prompt_text", why="the prompt in an answer that nobody reads"),
    Rule(member="structured_outputs", why="compiles a grammar for a token that is thrown away; not in the prompt"),
    Rule(member="guided_json", why="as structured_outputs, its name up to 0.11"),
    Rule(member="guided_regex", why="as guided_json"),
    Rule(member="guided_choice", why="as guided_json"),
    Rule(member="guided_grammar", why="as guided_json"),
    Rule(
        member="tool_choice",
        only=_is_forced,
        engines_before=(0, 19),
        why="old engines answer 500, as one token is no whole call (vllm#38911, fixed by vllm#36841). Absent it means"
        " auto, which renders the same tools. Newer engines accept a cut call, and templates may print it: it is kept",
    ),
    Rule(member="background", why="refused with 400 where store is false"),
    Rule(member="store", value=b"false", add=True, endpoints=_RESPONSES, why="D's answer is the one to keep"),
)


_RULES_OF = {
    endpoint: {rule.member: rule for rule in RULES if endpoint in rule.endpoints and not rule.add}
    for endpoint in Endpoint
}
_ADDED = {
    endpoint: {
        rule.member: msgspec.Raw(rule.value)
        for rule in RULES
        if rule.add and rule.value is not None and endpoint in rule.endpoints
    }
    for endpoint in Endpoint
}


def engine_version(text: str) -> Version | None:
    match = _VERSION.match(text)
    return (int(match.group(1)), int(match.group(2))) if match else None


def prefill_fields(endpoint: Endpoint, fields: Fields, worker: Worker, usual: Version | None = None) -> Fields:
    """usual: the version of an engine that does not say its own."""
    kept, rules = public_fields(fields), _RULES_OF[endpoint]
    engine = engine_version(worker.engine_version) or usual
    for member in kept.keys() & rules.keys():
        rule = rules[member]
        if not _applies(rule, kept, engine):
            continue
        if rule.value is None:
            del kept[member]
        else:
            kept[member] = msgspec.Raw(rule.value)
    kept |= _ADDED[endpoint]
    return kept


def _applies(rule: Rule, fields: Fields, engine: Version | None) -> bool:
    if rule.engines_before is not None and (engine is None or engine >= rule.engines_before):
        return False
    return rule.only is None or rule.only(decoded(fields[rule.member]))
