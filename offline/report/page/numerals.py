"""Figures as text, in ms and percent. Everywhere else they are seconds and ratios."""

from __future__ import annotations

from ...experiment.statistics import Estimate

NONE = "–"
MINUS = "−"


def signed(value: float, digits: int) -> str:
    # A real minus sign lines up with plus and is read out.
    return f"{value:+.{digits}f}".replace("-", MINUS)


def ms(seconds: float | None) -> str:
    """Three significant digits or more: 8.12, 67.1, 955."""
    if seconds is None:
        return NONE
    value = seconds * 1e3
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def mean_ms(estimate: Estimate | None) -> str:
    if estimate is None:
        return NONE
    half = "" if estimate.half_width is None else f" ± {ms(estimate.half_width)}"
    return ms(estimate.mean) + half


def percent(share: float | None, digits: int = 1) -> str:
    return NONE if share is None else f"{share * 100:.{digits}f} %".replace("-", MINUS)


def signed_percent(change: float | None) -> str:
    return NONE if change is None else f"{signed(change * 100, 1)} %"


def percent_around(mean: float, half: float | None) -> str:
    return percent(mean) if half is None else f"{mean * 100:.1f} ± {half * 100:.1f} %".replace("-", MINUS)


def interval_percent(low: float | None, high: float | None) -> str:
    # In words: a dash could be taken for a minus.
    if low is None or high is None:
        return "no interval"
    return f"{signed(low * 100, 1)} to {signed(high * 100, 1)} %"


def count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
