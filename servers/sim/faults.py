"""Faults to order: what a test tells an engine to do wrong next."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Fault(StrEnum):
    REFUSE = "refuse"
    HANG = "hang"
    GARBAGE = "garbage"
    CUT = "cut"


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """How many of the next generation requests each fault takes; they are used up in this order."""

    refuse: int = 0  # answered with `refuse_status`
    refuse_status: int = 503
    hang: int = 0  # never answered
    garbage: int = 0  # answered 200 with a body that is not JSON
    cut: int = 0  # closed after `cut_after_events` streamed events, or at once where not streamed
    cut_after_events: int = 1

    def take(self) -> Fault | None:
        """The fault that the request at hand gets."""
        for fault in Fault:
            left = getattr(self, fault.value)
            if left > 0:
                setattr(self, fault.value, left - 1)
                return fault
        return None
