"""Which of a proxy's processes one is, and what it shares with the others from its start."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from .channels import Ends

SERIALS = 1 << 40
"""Sessions that one process may number, until it would give a number that is another's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of a proxy; by default its only one."""

    index: int = 0
    ends: Ends = field(default_factory=dict)
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Keys the hashes of prompts; where processes differ in it, none finds another's sessions."""

    @property
    def leads(self) -> bool:
        """Whether it watches the workers, and tells the others what it sees."""
        return self.index == 0

    @property
    def serial(self) -> int:
        return self.index * SERIALS
