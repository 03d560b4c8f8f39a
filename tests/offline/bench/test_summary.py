from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from ppd.offline.bench.summary import reasons, results_table, span_s, summarize
from ppd.offline.experiment.records import Record


def record(conversation: int, turn: int, **fields: Any) -> Record:
    usual: dict[str, Any] = {
        "conversation": conversation,
        "turn": turn,
        "measured": True,
        "scheduled_s": 1.0,
        "sent_s": 1.01,
        "first_token_s": 1.2,
        "last_token_s": 2.2,
        "prompt_tokens": 100,
        "cached_tokens": 50,
        "output_tokens": 11,
        "route": "LOCAL",
        "prefill": "",
        "decode": "D1",
        "status": 200,
    }
    return Record(**(usual | fields))


FAILED: dict[str, Any] = {"error": "broke", "first_token_s": None, "last_token_s": None, "status": 0, "route": ""}
FOUR = [
    record(0, 1, route="SPLIT", cached_tokens=0),
    record(0, 2, scheduled_s=2.0, sent_s=2.0, first_token_s=2.1, last_token_s=3.0),
    record(1, 1, route="SPLIT", cached_tokens=None, first_token_s=1.4, last_token_s=3.4),
    record(1, 2, **FAILED),
]


def test_figures_leave_failures_out_but_count_them() -> None:
    one = summarize(FOUR, span_s(FOUR))
    assert (one.requests, one.failures) == (4, 1)
    assert one.ttft_s is not None
    assert one.ttft_s.n == 3
    assert one.ttft_s.mean == pytest.approx((0.2 + 0.1 + 0.4) / 3)
    assert one.tpot_s is not None
    assert one.tpot_s.mean == pytest.approx((0.1 + 0.09 + 0.2) / 3)
    assert one.routes == pytest.approx({"LOCAL": 1 / 3, "SPLIT": 2 / 3})
    assert one.cached_share == 50 / 200  # of the two that tell
    assert one.late_s == pytest.approx(0.01)


def test_rates_are_over_the_whole_run() -> None:
    assert span_s(FOUR) == pytest.approx(2.4)
    later = [one for one in FOUR if one.turn > 1]
    assert summarize(later, span_s(FOUR)).requests_per_s == pytest.approx(1 / 2.4)
    assert summarize(FOUR, span_s(FOUR)).tokens_per_s == pytest.approx(33 / 2.4)


def test_nothing_is_made_up_where_every_request_failed() -> None:
    one = summarize([record(0, 1, **FAILED)], span_s([record(0, 1, **FAILED)]))
    assert (one.failures, one.ttft_s, one.requests_per_s, one.cached_share, one.routes) == (1, None, None, None, {})


def test_the_most_frequent_reasons_come_first() -> None:
    failed = [record(0, 1, **(FAILED | {"error": error})) for error in ("a", "b", "b")]
    assert reasons(failed) == ["2 x b", "1 x a"]
    assert reasons(failed, limit=1) == ["2 x b"]


def test_the_table_has_a_column_for_first_and_later_turns_and_fits_a_terminal() -> None:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(results_table(FOUR))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["requests", "2", "2", "4"] in lines
    assert ["failures", "0", "1", "1"] in lines
    assert ["TTFT", "p50,", "ms", "300.0", "100.0", "200.0"] in lines
    assert max(map(len, out.getvalue().splitlines())) <= 80
