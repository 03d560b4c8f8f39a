"""The sequences of a request: one for each of its prompts and choices, with its part of the KV transfer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from ..core.config import SimConfig
from ..core.embeddings import placed
from ..core.fault_orders import FaultKind, Faults
from ..core.handoffs import Transfer
from ..core.sequence import Generation, Sequence


def new_sequences(
    generation: Generation, request_id: str, config: SimConfig, faults: Faults, new_id: Callable[[], str]
) -> list[Sequence]:
    """faults: orders that strike transfers as they begin are used up."""
    model = generation.model if generation.model in config.loras else config.model
    key = hashlib.sha256(f"{model}:{config.seed}".encode()).digest()
    prompts = [prompt for prompt in generation.prompts for _ in range(generation.choices)]
    transfers = [_ordered(transfer, faults) for transfer in generation.transfers] or [Transfer()] * len(prompts)
    return [
        Sequence(
            id=f"{request_id}-{new_id()[:8]}",
            prompt=prompt,
            sampling=generation.sampling.first_token() if transfer.ends_after_prefill else generation.sampling,
            namespace=generation.namespace,
            session_id=generation.session_id,
            tokenizer=config.tokenizer,
            answer_key=key,
            transfer=transfer,
            media=placed(prompt, generation.media),
        )
        for prompt, transfer in zip(prompts, transfers, strict=True)
    ]


def _ordered(transfer: Transfer, faults: Faults) -> Transfer:
    is_absent = bool(transfer.key) and faults.take_of_transfer(FaultKind.ABSENT)
    return replace(transfer, is_absent=is_absent, stops=transfer.hands_over and faults.take_of_transfer(FaultKind.STOP))
