"""Which worker of a SPLIT is chosen first, by the operator's word for the turn's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from ..config import Mode, ProxyConfig, StageOrder, all_of, refused
from ..errors import ConfigError

ALLOWED_ORDERS = f"MODEL:ORDER, with one of {', '.join(StageOrder)}"
BY_MODE, ANY = frozenset((StageOrder.MODE,)), frozenset(StageOrder)
SETTLED: Final[Mapping[Mode, tuple[frozenset[StageOrder], str]]] = {
    Mode.PROFILES: (BY_MODE, "mode where mode = 'profiles': there stageOrder of epp_config says the order"),
} | {
    mode: (
        ANY - {StageOrder.PREFILL_FIRST},
        f"mode or decode_first where mode = {mode.value!r}: it places sessions",
    )
    for mode in (Mode.SESSION_HASH, Mode.FREE_KV)
}
"""The modes that say the order themselves: which may be asked for all the same."""


class OrderRules(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's: the usual order, and those of models by name."""

    usual: StageOrder = StageOrder.MODE
    by_model: Mapping[str, StageOrder] = {}

    def of(self, model: str) -> StageOrder:
        return self.by_model.get(model, self.usual)


def order_rules(config: ProxyConfig) -> OrderRules:
    """ConfigError tells each entry that is misspelt, named twice, or not for the mode."""
    models, errors = dict[str, StageOrder](), list[ConfigError]()
    may, allowed = SETTLED.get(config.mode, (ANY, ""))
    if config.order not in may:
        errors.append(refused("order", config.order.value, allowed))
    for entry in config.order_by_model:
        model, _, name = entry.rpartition(":")
        if not model or name not in ANY:
            errors.append(refused("order_by_model", entry, ALLOWED_ORDERS))
        elif model in models:
            errors.append(refused("order_by_model", entry, "of a model that is named once"))
        elif StageOrder(name) not in may:
            errors.append(refused("order_by_model", entry, allowed))
        else:
            models[model] = StageOrder(name)
    if errors:
        raise all_of(errors)
    return OrderRules(usual=config.order, by_model=models)
