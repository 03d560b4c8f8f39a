from __future__ import annotations

import pytest

from ppd.proxy.admission.arrival_rate import RateMeter


@pytest.mark.parametrize(
    ("events_s", "at_s", "rate"),
    [
        ([], 100.0, 0.0),
        ([0.0] * 5, 0.5, 5.0),  # a young meter does not divide by next to nothing
        ([float(n) for n in range(20)], 20.0, 1.0),
        ([float(n) for n in range(100)], 99.5, 1.0),
        ([0.0] * 90, 29.0, 90 / 29),
        ([0.0] * 90, 31.0, 0.0),  # a burst is forgotten after the window, not averaged for ever
    ],
)
def test_the_rate_is_that_of_the_window(events_s: list[float], at_s: float, rate: float) -> None:
    meter = RateMeter(30.0, 0.0)
    for event_s in events_s:
        meter.count(event_s)
    assert meter.rate_rps(at_s) == pytest.approx(rate, rel=0.05)
