"""The paper's figure 5 beside the same figures by Algorithm 1 from tables: shares of LOCAL as w_tpot grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ppd.proxy.decision_table.table import DecisionTable

from ..analysis.arms import CLASSES
from ..analysis.tradeoff import TradeOff, by_topology, trade_offs
from ..page.document import Section, Table, Text
from ..page.numerals import percent, signed_percent

TOPOLOGY: Final = "1P_3D"
CLASS: Final = CLASSES[-1]  # prefill-heavy
PRINTED_LOCAL: Final = {1.0: 95, 3.0: 50, 6.0: 20}  # percent of the cells, by w_tpot
PRINTED_SAVED: Final = "94 to 96 %"  # of TTFT, at any weight
PRINTED_ADDED: Final = "7 to 12 %"  # of TPOT
CLOSE: Final = 0.1  # of the printed share


def section(tables: Sequence[DecisionTable]) -> Section | None:
    """None without a table of the printed topology."""
    found = trade_offs(by_topology(tables).get(TOPOLOGY, []), tuple(PRINTED_LOCAL), (CLASS,))
    if not found:
        return None
    table = Table(
        caption=(
            f"Share of LOCAL among the {CLASS} cells of {TOPOLOGY} as w_tpot grows (w_ttft is 1): as the paper prints "
            "it in figure 5, and by the proxy's own Algorithm 1 from the published rows. Saved and added: means over "
            f"the cells, where a SPLIT cell counts as 0; the paper prints {PRINTED_SAVED} of TTFT saved and "
            f"{PRINTED_ADDED} of TPOT added."
        ),
        head=("w_tpot", "cells", "LOCAL, printed", "LOCAL, here", "TTFT saved", "TPOT added"),
        rows=[
            (
                f"{each.w_tpot:g}",
                str(each.cells),
                f"{PRINTED_LOCAL[each.w_tpot]} %",
                percent(each.local_share, 0),
                percent(each.ttft_saved),
                signed_percent(each.tpot_added),
            )
            for each in found
        ],
    )
    return Section("paper-figure-5", "The paper's figure 5, side by side", (table, Text(_about(found))))


def _about(found: Sequence[TradeOff]) -> str:
    far = [each for each in found if abs(each.local_share - PRINTED_LOCAL[each.w_tpot] / 100) > CLOSE]
    if not far:
        return "Every share is within 10 points of the printed one."
    weights = ", ".join(f"{each.w_tpot:g}" for each in far)
    least = min(found, key=lambda each: each.local_share)
    return (
        f"The figures disagree at w_tpot {weights}. In the published rows LOCAL saves so much TTFT for so little TPOT "
        f"that weights hardly matter: {percent(least.local_share, 0)} of the cells are LOCAL even at w_tpot "
        f"{least.w_tpot:g}. So the printed shares come from other measurements, or from a rule that the paper does not "
        "state; who expects a weight of 3 to halve the LOCAL turns will not see it."
    )
