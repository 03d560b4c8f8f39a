"""KV transfers: each worker's network sends one transfer at a time and receives one at a time."""

from __future__ import annotations

from dataclasses import dataclass

from ppd.servers.engine_profile.step_time import EngineProfile


@dataclass(slots=True)
class Port:
    """One worker's end of the network, in one direction."""

    free_at_s: float = 0.0
    bytes: float = 0.0  # moved so far


def transfer(sender: Port, receiver: Port, profile: EngineProfile, tokens: int, now_s: float) -> float:
    """Book a transfer of the KV of `tokens` tokens behind those that use the same ends; when it arrives, in s.

    `transfer_s` occupies nobody, `send_s` the sender, the bytes both ends. No token, no time.
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
