"""What a cell takes from its runs, and when it is evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ppd.offline.experiment.cells import MeasuredCell, gather, is_evidence, why_no_evidence
from ppd.offline.experiment.records import Origin, Outcome, Record, RunResult
from ppd.offline.experiment.run import Profile, Run, Workload

CHAT = Profile(name="chat", new_tokens=64, output_tokens=64)
SHAPE = Workload(first=CHAT, later=CHAT)
Change = Callable[[int], dict[str, Any]]


def turns(number: int, change: Change = lambda _: {}, *, turn: int = 2) -> list[Record]:
    """Each 0.1 s to the first token; `change` says what is different about the turn of a number."""
    usual: dict[str, Any] = {
        "turn": turn,
        "measured": True,
        "scheduled_s": 1.0,
        "sent_s": 1.0,
        "first_token_s": 1.1,
        "last_token_s": 1.2,
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 11,
        "route": "LOCAL",
        "prefill": "",
        "decode": "D1",
        "status": 200,
    }
    return [Record(conversation=index, **usual | change(index)) for index in range(number)]


def cell(*groups: Sequence[Record], x: float = 1.0, own_way: bool = False, failed: Sequence[str] = ()) -> MeasuredCell:
    """Of a run for each group of records, and one for each reason."""
    results = [_result(x, seed, group) for seed, group in enumerate(groups)]
    results += [_result(x, seed, (), reason) for seed, reason in enumerate(failed, len(groups))]
    (made,) = gather(results, own_way=own_way)
    return made


def _result(x: float, seed: int, records: Sequence[Record], reason: str | None = None) -> RunResult:
    return RunResult(
        run=Run(topology="2P_2D", workload=SHAPE, qps=1.0, x=x, seed=seed),
        outcome=Outcome.FINISHED if reason is None else Outcome.FAILED,
        origin=Origin(backend="target", engine="vllm 1"),
        started="2026-03-01T10:00:00Z",
        wall_s=1.0,
        records=tuple(records),
        reason=reason or "",
    )


def first(number: int, change: Change) -> Change:
    return lambda index: change(index) if index < number else {}


SPLIT = {"route": "SPLIT", "first_token_s": 1.9, "last_token_s": 2.0}
REPLICA = {"route": "REPLICA"}
FAILED = {"error": "gone", "first_token_s": None, "last_token_s": None}
ONE_TOKEN = {"output_tokens": 1}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (cell(turns(40)), ""),
        (cell(turns(40), failed=["P1 died"]), "P1 died"),
        (cell(turns(40), failed=["P1 died", "no D", "P1 died"]), "P1 died; no D"),
        (cell(failed=[""]), "a run failed"),
        (cell(turns(40, first(2, lambda _: FAILED))), ""),
        (cell(turns(40, first(3, lambda _: FAILED))), "3 of 40 requests failed"),
        (
            cell([*turns(40, turn=1), *turns(40, first(3, lambda _: FAILED))]),
            "3 of 40 later turns failed",
        ),
        (cell(turns(40, first(4, lambda _: SPLIT))), ""),
        (cell(turns(40, first(37, lambda _: SPLIT))), "37 of 40 later turns went SPLIT"),
        (cell(turns(40, first(37, lambda _: SPLIT)), x=0.0), ""),
        (cell(turns(40, first(35, lambda _: SPLIT)), x=0.0), "5 of 40 later turns went LOCAL"),
        (cell(turns(40, first(20, lambda _: SPLIT)), x=0.9), ""),
        (cell(turns(40, first(30, lambda _: REPLICA))), ""),
        (cell(turns(40, lambda _: REPLICA), own_way=True), "no later turn of this arm finished"),
        (cell(turns(40, turn=1)), "no later turn of this arm finished"),
        (cell(turns(40, lambda _: ONE_TOKEN)), "answers of one token have no TPOT"),
    ],
)
def test_a_cell_is_evidence_unless_something_speaks_against_it(made: MeasuredCell, reason: str) -> None:
    assert why_no_evidence(made) == reason
    assert is_evidence(made) is not bool(reason)


def test_the_share_of_local_turns_is_of_those_that_finished_and_had_the_choice() -> None:
    changes: list[dict[str, Any]] = [SPLIT, REPLICA, FAILED, {"measured": False}, *[{}] * 4]
    made = cell(turns(8, lambda index: changes[index]), turns(3, turn=1))
    assert (made.local_turns, made.split_turns, made.local_share) == (4, 1, 0.8)
    assert cell(turns(3, turn=1)).local_share is None


def test_of_an_arm_only_the_later_turns_that_went_its_way_are_in_its_figures() -> None:
    records = [*turns(2, turn=1), *turns(20, first(2, lambda _: SPLIT))]
    whole, own = cell(records), cell(records, own_way=True)
    assert whole.later_ttft_s is not None and own.later_ttft_s is not None
    assert (whole.later_ttft_s.n, own.later_ttft_s.n) == (20, 18)
    assert own.later_ttft_s.mean == pytest.approx(0.1)
    assert (own.requests, own.later_requests, own.split_turns) == (22, 20, 2)


def test_lateness_is_how_long_after_its_time_a_request_was_sent() -> None:
    made = cell(turns(50, lambda index: {"sent_s": 1.0 + index / 100}), turns(51, lambda i: {"sent_s": 1.5 + i / 100}))
    assert made.lateness_p99_s == pytest.approx(0.99)
    assert cell(turns(3, lambda _: {"measured": False, "sent_s": 9.0})).lateness_p99_s is None
