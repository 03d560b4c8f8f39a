"""Which worker of a SPLIT comes first, for each model, and D whose sidecars ask P."""

from __future__ import annotations

from typing import Any

from ppd.proxy.config import Mode, StageOrder


async def test_receipts_and_the_operators_api_name_the_order_of_each_model(start_fleet: Any) -> None:
    async with start_fleet("P1 D1", order_by_model=("sim:decode_first",), mode=Mode.ALWAYS_SPLIT) as fleet:
        receipt = await fleet.receipt(await fleet.conversation().say("hi"))
        assert (receipt["route"], receipt["order"]) == ("SPLIT", "decode_first")
    async with start_fleet("P1 D1", mode=Mode.ALWAYS_LOCAL) as fleet:
        for order in StageOrder:
            status, weights = await fleet.admin("PUT", "/weights", {"order": order})
            assert (status, weights["order"]) == (200, order)
            assert (await fleet.receipt(await fleet.conversation().say("hi")))["order"] == order
        status, told = await fleet.admin("PUT", "/weights", {"order": "p_first"})
        assert (status, told["error"]["param"]) == (400, "order")
        assert "mode, prefill_first, decode_first" in told["error"]["message"]
