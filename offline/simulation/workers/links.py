"""The links between simulated workers: one transfer at a time out of each and into each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ppd.proxy.laws.step_time import EngineProfile


@dataclass(slots=True)
class Port:
    """One direction of a worker's network. It carries one transfer at a time."""

    free_at_s: float = 0.0
    bytes: float = 0.0  # moved so far


class Move(NamedTuple):
    """KV that was sent from one worker to another, by their names."""

    sender: str
    receiver: str
    tokens: int


@dataclass(slots=True)
class Work:
    """What one turn has taken of the workers so far, whether or not it ended well."""

    computed_tokens: int = 0  # of prompts, on all workers; with what was computed again after a preemption
    fetched_tokens: int = 0  # of KV, from caches of workers that have no part in the turn else
    moves: list[Move] = field(default_factory=list)  # handoffs and fetches


def transfer(sender: Port, receiver: Port, profile: EngineProfile, tokens: int, now_s: float) -> float:
    """Queues a transfer of the KV of `tokens` tokens on both ports. Returns when it arrives, in s.

    `transfer_s` occupies neither port, `send_s` the sender, the bytes both. A transfer of no token takes no time.
    """
    if tokens == 0:
        return now_s
    kv_bytes = tokens * profile.kv_bytes_per_token
    bytes_from_s = max(max(now_s, sender.free_at_s) + profile.send_s, receiver.free_at_s)
    end_s = bytes_from_s + kv_bytes / profile.transfer_bytes_per_s
    for port in (sender, receiver):
        port.free_at_s = end_s
        port.bytes += kv_bytes
    return end_s + profile.transfer_s
