"""A profile of the engine that runs here, for modes that predict: a few requests to one that does nothing else."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from statistics import median

from ppd.proxy.laws.profile_file import ProfileFile, Status, Transfers
from ppd.proxy.laws.step_time import EngineProfile
from ppd.servers.vllm.cpu_install import VERSION
from ppd.servers.vllm.launch import TINY_NAME

from .conversations import Message
from .engines import BLOCK
from .play import Player

NOTE = (
    "Prefill, step and host costs are from requests to one idle engine (medians of three). A transfer's costs are a "
    "guess, and so is that attention costs nothing beside them."
)
_SHORT, _LONG = 64, 1600  # tokens
_TIMES, _STREAMS, _ANSWER_TOKENS = 3, 4, 48
_KV_BYTES = 3072  # of a token of the tiny model


async def measured(player: Player, kv_tokens: int) -> ProfileFile:
    """player: before an engine that knows none of these prompts. kv_tokens: of the engines that the profile is for."""
    short_s = median([await player.ttft_s(_prompt(_SHORT, number)) for number in range(_TIMES)])
    long_s = median([await player.ttft_s(_prompt(_LONG, number)) for number in range(_TIMES)])
    alone_s = median([await _tpot_s(player, 1, number) for number in range(_TIMES)])
    together_s = median([await _tpot_s(player, _STREAMS, number) for number in range(_TIMES)])
    prefill_token_s = max(0.0, long_s - short_s) / (_LONG - _SHORT)
    sequence_s = max(0.0, together_s - alone_s) / (_STREAMS - 1)
    step_s = max(0.0, alone_s - sequence_s)
    costs = EngineProfile(
        step_s=step_s,
        decode_sequence_s=sequence_s,
        context_token_s=0.0,
        prefill_token_s=prefill_token_s,
        attention_pair_s=0.0,
        request_s=max(0.0, short_s - step_s - _SHORT * prefill_token_s),
        request_token_s=0.0,
        transfer_s=0.02,
        transfer_bytes_per_s=1e9,
        kv_bytes_per_token=_KV_BYTES,
        max_batched_tokens=2048,
    )
    return profile_of(costs, kv_tokens)


def profile_of(costs: EngineProfile, kv_tokens: int) -> ProfileFile:
    return ProfileFile(
        name="tiny-on-this-cpu",
        status=Status.MEASURED,
        model=TINY_NAME,
        gpu="none",
        gpu_count=1,
        engine=f"vLLM {VERSION} on a CPU, one thread",
        source="python -m benchmarks.eviction",
        note=NOTE,
        licence="Apache-2.0",
        costs=costs,
        kv_capacity_tokens=kv_tokens,
        block_size=BLOCK,
        max_num_seqs=16,
        transfers=Transfers.MISSING,
        network="loopback",
    )


async def _tpot_s(player: Player, streams: int, number: int) -> float:
    """Mean time of a step of so many sequences, from the difference of a long and a short answer."""
    seconds = []
    for tokens in (1, _ANSWER_TOKENS):
        longer = replace(player, answer_tokens=tokens)
        begun_s = time.perf_counter()
        first = 1000 * tokens + 100 * streams + 10 * number
        await asyncio.gather(*(longer.text(_prompt(_SHORT, first + stream)) for stream in range(streams)))
        seconds.append(time.perf_counter() - begun_s)
    return max(0.0, seconds[1] - seconds[0]) / (_ANSWER_TOKENS - 1)


def _prompt(tokens: int, number: int) -> list[Message]:
    """About so many, that differ from the first on."""
    return [{"role": "user", "content": (f"{number} of {tokens}: what does it cost? " * tokens)[:tokens]}]
