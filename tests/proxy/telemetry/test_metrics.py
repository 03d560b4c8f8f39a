"""The metrics of every turn: the same series, in the same words, as the library's own would show."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ppd.proxy.admission.keys import Client, decode, encode, hash_of
from ppd.proxy.errors import ConfigError
from ppd.proxy.policy import Route
from ppd.proxy.telemetry.metrics import KEYS_SHOWN, OTHER, TTFT_BUCKETS_S, Metrics, TurnHistogram


def test_each_set_of_labels_is_one_series_whoever_names_it() -> None:
    metrics = Metrics()
    for route in (Route.LOCAL, "LOCAL", Route.LOCAL, Route.SPLIT):
        metrics.turns.add(route, "forced", "completed")
    for outcome in ("completed", "failed"):
        metrics.turns.add(Route.LOCAL, "first_turn", outcome)
    metrics.turns.add("", "", "failed")  # refused before any decision
    values = {
        (route, reason): metrics.registry.get_sample_value("ppd_turns_total", {"route": route, "reason": reason})
        for route in Route
        for reason in ("forced", "first_turn")
    }
    assert values[Route.LOCAL, "forced"] == 3
    assert values[Route.SPLIT, "forced"] == 1
    assert values[Route.LOCAL, "first_turn"] == 2
    assert values[Route.REPLICA, "forced"] is None
    ended = {
        (route, outcome): metrics.registry.get_sample_value(
            "ppd_turn_outcomes_total", {"route": route, "outcome": outcome}
        )
        for route in (Route.LOCAL, "none")
        for outcome in ("completed", "failed")
    }
    assert list(ended.values()) == [4, 1, 0, 1]  # the first failure is a rise from 0


def test_every_metric_has_its_type_and_help_before_it_counts() -> None:
    text = generate_latest(Metrics().registry).decode()
    assert "# TYPE ppd_turns_total counter" in text
    assert "# HELP ppd_ttft_seconds Time to first token, at the proxy" in text


def test_a_spread_is_the_librarys_histogram() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    spread = TurnHistogram(ours, "x_seconds", "X", TTFT_BUCKETS_S, ("route",))
    histogram = Histogram("x_seconds", "X", ["route"], buckets=TTFT_BUCKETS_S, registry=theirs)
    for amount in (0.0, 0.01, 0.010001, 0.3, 60.0, 61.0, 1e9):
        for route in ("LOCAL", Route.SPLIT):
            spread.observe(amount, route)
            histogram.labels(route).observe(amount)

    def shown(registry: CollectorRegistry) -> set[tuple[str, str, float]]:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        return {
            (sample.name, str(sorted(sample.labels.items())), sample.value)
            for family in families
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    assert shown(ours) == shown(theirs)


def test_clients_are_told_apart_by_their_keys_up_to_a_bound() -> None:
    metrics = Metrics()

    def turns(key: str) -> float | None:
        return metrics.registry.get_sample_value("ppd_key_turns_total", {"key": key, "outcome": "completed"})

    for round_ in range(2):
        for number in range(KEYS_SHOWN + 5):
            metrics.by_key.turn(f"key{number}", "completed", 10, round_)
    assert turns("key0") == turns(f"key{KEYS_SHOWN - 1}") == 2
    assert turns(f"key{KEYS_SHOWN}") is None
    assert turns(OTHER) == 10
    tokens = {"key": "key0", "kind": "prompt"}
    assert metrics.registry.get_sample_value("ppd_key_tokens_total", tokens) == 20


def test_what_stands_for_all_other_keys_is_no_name_of_a_key() -> None:
    with pytest.raises(ConfigError, match="name: must be"):
        decode(encode(Client(name=OTHER, tenant="t"), hash_of("k")).encode(), "keys.toml")
