"""Whose weights count for a turn."""

from __future__ import annotations

import pytest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.decision_table.score import TurnWeights, Weights, weight_rules
from ppd.proxy.errors import ConfigError

RULES = weight_rules(ProxyConfig(w_ttft=2.0, weights_by_model=("llama:w_tpot=3", "org/a:7b:w_ttft=0,w_tpot=0.5")))


@pytest.mark.parametrize(
    ("model", "key", "weights"),
    [
        ("other", None, None),
        ("llama", None, Weights(2.0, 3.0)),
        ("org/a:7b", None, Weights(0.0, 0.5)),
        ("llama", TurnWeights(w_ttft=9.0), Weights(9.0, 3.0)),
        ("other", TurnWeights(w_ttft=9.0, w_tpot=0.0), Weights(9.0, 0.0)),
        ("org/a:7b", TurnWeights(w_tpot=0.0), Weights(1.0, 0.0)),  # only TTFT counts, as for its model TPOT
    ],
)
def test_a_keys_weights_count_before_its_models_and_those_before_the_configs(
    model: str, key: TurnWeights | None, weights: Weights | None
) -> None:
    assert RULES.of(model, key) == weights


UNREADABLE = ("", "llama", "llama:", ":w_ttft=1", "w_ttft=1", "m:w_ttft=-1", "m:w_ttft=nan", "m:w_tpot=1000001")


@pytest.mark.parametrize("entry", [*UNREADABLE, "m:w=1", "m:w_ttft=0,w_tpot=0"])
def test_what_cannot_be_read_is_named(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"weights_by_model = .* must be MODEL:w_ttft") as caught:
        weight_rules(ProxyConfig(weights_by_model=(entry,)))
    assert caught.value.param == "weights_by_model"


def test_a_model_is_named_once() -> None:
    with pytest.raises(ConfigError, match="named once"):
        weight_rules(ProxyConfig(weights_by_model=("m:w_ttft=1", "m:w_tpot=1")))
