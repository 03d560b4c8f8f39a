from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .block_pool import Namespace
from .sequence import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One client request: prompts as token ids, each to be answered `choices` times."""

    model: str
    namespace: Namespace
    prompts: tuple[tuple[int, ...], ...]
    choices: int
    sampling: Sampling
    transfer_params: dict[str, Any] | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
