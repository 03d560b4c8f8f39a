"""One engine's counters since its start; `engine.metrics` exports them under vLLM's names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Trap(StrEnum):
    """Misuse of a KV handoff that kills a real engine or makes its answer wrong, with little in its log."""

    NO_REMOTE_BLOCKS = "no_remote_blocks"  # D: do_remote_prefill without block ids; the engine dies
    TOO_FEW_BLOCKS = "too_few_blocks"  # D: fewer remote blocks than the prompt needs; the engine dies
    NO_REMOTE_ADDRESS = "no_remote_address"  # D: host, port, engine or request id is missing; the request hangs
    WRONG_ENGINE = "wrong_engine"  # P: the pull names another engine; the load fails
    NOT_BIDIRECTIONAL = "not_bidirectional"  # P: a D's handle without bidirectional_kv_xfer; the request hangs
    READ_AGAIN = "read_again"  # P: recomputes what it could not read back; it waits for that KV again, and for ever
    FOREIGN_BLOCKS = "foreign_blocks"  # P: block ids that are not the handoff's; wrong KV
    UNKNOWN_HANDOFF = "unknown_handoff"  # P: no such request; wrong KV
    EXPIRED_HANDOFF = "expired_handoff"  # P: pulled after the lease; wrong KV
    USED_HANDOFF = "used_handoff"  # P: pulled again after it was freed; wrong KV
    USED_KEY = "used_key"  # P: another leg has named this key; refused, and the load fails
    OTHER_PROMPT = "other_prompt"  # D: P's prompt under this key has another length; the load fails


@dataclass(slots=True)
class Counters:
    """Written only by the engine. Tokens unless the name says otherwise."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    local_compute_tokens: int = 0
    local_cache_hit_tokens: int = 0
    external_kv_tokens: int = 0  # pulled from another engine
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    encoded_items: int = 0  # media that were encoded in its own steps
    pulled_blocks: int = 0
    handoffs: int = 0  # finished prefills pinned for a peer
    kept_answers: int = 0  # of D, pinned with their prompts for a P to read back
    expired_handoffs: int = 0
    notifications_after_expiry: int = 0
    failed_transfers: int = 0
    failed_notifications: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # requests by finish reason
    traps: Counter[Trap] = field(default_factory=Counter)
