"""What an operator promises of a turn."""

from __future__ import annotations

import msgspec


class SloTargets(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT may be `ttft_s`, or `ttft_factor` times what it takes on an idle engine, whichever is more."""

    ttft_s: float = 0.25
    ttft_factor: float = 3.0
    tpot_s: float = 0.025  # the mean of the turn
