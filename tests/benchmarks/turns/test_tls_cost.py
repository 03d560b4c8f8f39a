"""The program that measures what TLS costs: both proxies answer every request, and each is measured."""

from __future__ import annotations

import pytest

from benchmarks.turns.tls_cost import PLAIN, WITH_TLS, measure


@pytest.mark.slow
def test_each_proxy_answers_and_is_measured() -> None:
    found = measure(repetitions=2, requests=400, connections=4)
    assert {name: len(costs) for name, costs in found.items()} == {PLAIN: 2, WITH_TLS: 2}
    assert all(cost > 0 for costs in found.values() for cost in costs)
