"""How long an engine takes for a step, for a request's host work, and for a KV transfer. Pure.

The simulated engine sleeps for these times; the simulator in virtual time adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError

FIRST_SEQUENCES = 8  # of a batch: from here on, another one costs less
LONGEST_S = 3600.0  # of any cost
HOST_TOKEN_S = 1e-6  # of host work per prompt token, cached or not: tokenizers read a million tokens a second


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """Costs of work on one engine, in seconds and bytes; the defaults are an H100 with Llama-3.1-8B.

    The defaults are derived from laws fitted to the published PPD measurements (4 x H100, vLLM 0.13, P2pNccl over
    NVLink; m new and c cached prompt tokens, B decoding sequences with C thousand tokens of context each; ms):

    * TPOT 8.1 + 0.11 B + 0.027 B C: `step_s`, `decode_sequence_s` and `context_token_s`;
    * TTFT of an append on D, 31.3 + 0.031 m + 0.017 c: one step and the request's host work. Half of c is the answer
      before, which is computed again, since its text comes back as other tokens. So what is computed costs 31 us a
      token, and what is cached next to nothing. Part of it is host work, which delays only this request; the rest is
      `prefill_token_s`, for which every decoding sequence of the batch waits. With it an append of 1,024 tokens
      at the published rates lengthens TPOT by 30 to 50 %, and one of 128 tokens by less than 5 %, as measured;
    * TTFT through P, 92.2 + 0.045 m + 0.0245 c: the same on P, then D's fixed request cost, one transfer, one step.

    `attention_pair_s` is not in those laws (its share is 2 ms at m = 1,024, c = 2,048); it is the attention's
    arithmetic, 0.5 MFLOP for each pair of a new token and an earlier one, and matters from 30,000 tokens of context on.
    Bare steps of an H100 have 0.9e-9 of it with cuDNN's kernels (tables/source/h100-engine-steps.jsonl.gz).
    """

    step_s: float = 8.1e-3  # of any step
    decode_sequence_s: float = 0.11e-3
    first_sequence_s: float = 0.0  # on top of it, for each of the first FIRST_SEQUENCES
    context_token_s: float = 27e-9  # per token of context that a decoding sequence reads
    mean_context_token_s: float = 0.0  # per token of the decoding sequences' mean context, however many they are
    prefill_token_s: float = 14e-6
    attention_pair_s: float = 1e-9  # per (prompt token, earlier token)
    request_s: float = 23.2e-3  # host work before a request can be scheduled
    request_token_s: float = 15e-6  # the same per prompt token that is neither cached nor pulled
    connector_s: float = 0.0  # the same, on an engine that has a KV connector
    transfer_s: float = 29.6e-3  # of any KV transfer: set-up and notification; delays no other transfer
    send_s: float = 0.0  # the same, but the sender can send nothing else during it
    transfer_bytes_per_s: float = 16e9
    kv_bytes_per_token: int = 131_072
    max_batched_tokens: int = 8192  # tokens that one step may compute
    long_prefill_tokens: int = 0  # of one prompt, while there are other requests; 0: as many as a step may compute

    def __post_init__(self) -> None:
        costs = {name: getattr(self, name) for name in self.__slots__}
        for name, value in costs.items():
            if value < 0:
                raise ConfigError(f"{name} must not be negative, got {value}", param=name)
            if value > LONGEST_S and name.endswith("_s") and name != "transfer_bytes_per_s":
                raise ConfigError(f"{name} must be at most {LONGEST_S:g} s, got {value:g}", param=name)
        # What is predicted is divided by: no step, and so neither TTFT nor TPOT, takes no time.
        for name in ("step_s", "transfer_bytes_per_s", "kv_bytes_per_token", "max_batched_tokens"):
            if costs[name] == 0:
                raise ConfigError(f"{name} must be positive, got 0", param=name)

    def most_of_a_prompt(self, requests: int) -> int:
        """Tokens that one step may compute of it, with so many requests on the engine; vLLM caps none that is alone."""
        cap = self.long_prefill_tokens
        return cap if cap and requests > 1 else self.max_batched_tokens


def attention_pairs(chunk_tokens: int, context_tokens: int) -> int:
    """Pairs of a token and one at or before it, for a prefill chunk of `chunk_tokens` after `context_tokens`."""
    return chunk_tokens * context_tokens + chunk_tokens * (chunk_tokens + 1) // 2


def step_time_s(
    profile: EngineProfile,
    decode_sequences: int,
    decode_context_tokens: int,
    prefill_tokens: int,
    prefill_attention_pairs: int,
) -> float:
    """Duration of one engine step.

    decode_context_tokens: summed over the decoding sequences; prefill_tokens and prefill_attention_pairs (see
    `attention_pairs`): summed over the step's prefill chunks.
    """
    # Spelt out by parts, since a simulation asks for this more often than for anything else.
    time_s = profile.step_s + profile.context_token_s * decode_context_tokens
    if decode_sequences:
        first = decode_sequences if decode_sequences < FIRST_SEQUENCES else FIRST_SEQUENCES
        time_s += profile.decode_sequence_s * decode_sequences + profile.first_sequence_s * first
        time_s += profile.mean_context_token_s * decode_context_tokens / decode_sequences
    if prefill_tokens or prefill_attention_pairs:
        time_s += profile.prefill_token_s * prefill_tokens + profile.attention_pair_s * prefill_attention_pairs
    return time_s


def request_time_s(profile: EngineProfile, prompt_tokens: int, new_tokens: int, *, has_connector: bool = True) -> float:
    """Host work between a request's arrival and the scheduler.

    new_tokens: of the prompt, not cached when it arrives; 0 where the prompt's KV is pulled from another engine.
    """
    fixed_s = profile.request_s + (profile.connector_s if has_connector else 0.0)
    return fixed_s + profile.request_token_s * new_tokens + HOST_TOKEN_S * prompt_tokens


def transfer_time_s(profile: EngineProfile, tokens: int) -> float:
    """Duration of moving the KV of `tokens` tokens between two idle engines; 0 for no tokens."""
    if tokens == 0:
        return 0.0
    return profile.transfer_s + link_time_s(profile, tokens)


def link_time_s(profile: EngineProfile, tokens: int) -> float:
    """Of that, how long the engines' links can move nothing else."""
    if tokens == 0:
        return 0.0
    return profile.send_s + tokens * profile.kv_bytes_per_token / profile.transfer_bytes_per_s
