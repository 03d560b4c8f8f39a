"""An engine that takes part in no transfer: what a request says of one is ignored, as by vLLM without a connector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppd.proxy.fleet.worker import Role

from ..core.fault_orders import FaultLeg
from ..core.handoffs import HandedOver, Transfer
from .legs import Leg, Own, leg_of_params, params_of, plain


class NoTransfers:
    engine = "vllm"
    is_joint = False
    is_written = False
    key_member = None

    def leg(self, members: Mapping[str, Any], role: Role) -> FaultLeg:
        return leg_of_params(members)

    def read(self, leg: Leg, own: Own) -> tuple[Transfer, ...]:
        params_of(leg)
        return plain(leg)

    def answer(self, handed_over: HandedOver, own: Own) -> None:
        return None

    def coordinates(self, own: Own) -> dict[str, str]:
        return {}

    def page(self, path: str, query: Mapping[str, str], own: Own) -> None:
        return None
