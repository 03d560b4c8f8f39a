"""What is read of a receipt log, and what of it is damaged."""

from __future__ import annotations

import msgspec
import pytest

from ppd.offline.replay.past_turns import read_log
from ppd.proxy.cli.receipt_damage import LINES_TOLD
from ppd.proxy.failures import Leg
from ppd.proxy.laws.targets import SloTargets

from .receipts import BEGAN_S, leg, line_of, log_of, receipt


def test_turns_come_in_the_order_of_their_decisions() -> None:
    log = log_of(receipt("D1", 5.0, session="late"), receipt("P1 D1", 1.0, session="early"))
    assert [turn.session for turn in log.turns] == ["early", "late"]
    early, late = log.turns
    assert early.decided_s == pytest.approx(BEGAN_S + 1.0)
    assert early.prefill is not None
    assert (early.prefill.address, early.answering.address, late.prefill) == ("P1:1", "D1:1", None)
    assert [early.ttft_s, late.ttft_s] == pytest.approx([0.2, 0.1])


def test_time_in_the_queue_and_in_failed_attempts_is_not_the_decisions() -> None:
    tried = receipt("D2", ttft_s=3.1, ended_s=4.0)
    tried.legs = [leg(Leg.LOCAL, "D1", 1.0, None, 2.9), leg(Leg.LOCAL, "D2", 3.0, 3.1, 4.0)]
    (turn,) = log_of(tried).turns
    assert turn.answering.worker == "D2"
    assert turn.ttft_s == pytest.approx(0.1)


def test_a_turn_that_reached_no_worker_is_counted() -> None:
    refused = receipt("D1", route="", legs=[], outcome="failed")
    lost = receipt("P1 D1")
    lost.legs = lost.legs[:1]
    log = log_of(refused, lost, receipt("D1"))
    assert (len(log.turns), log.undecided, log.damage.count) == (1, 2, 0)


@pytest.mark.parametrize("workers", ["D1", "P1 D1"])
def test_what_a_worker_refused_for_what_it_asked_is_no_work(workers: str) -> None:
    """Such as a prompt beyond the model's context, of any length: nobody computed it."""
    too_long = receipt(workers, outcome="rejected", status=400, estimated_prompt_tokens=5_000_000, prompt_tokens=None)
    log = log_of(too_long, receipt("D1"))
    assert [turn.prompt_tokens for turn in log.turns] == [1000]
    assert log.undecided == 1


def test_what_was_in_force_and_what_was_predicted_is_read() -> None:
    slo = SloTargets(tpot_s=0.1)
    (turn,) = log_of(receipt("D1", slo=slo, predicted_ttft_s=0.5)).turns
    assert (turn.slo, turn.recorded_ttft_s) == (slo, 0.5)


def test_a_receipt_that_is_there_twice_is_one_turn() -> None:
    chat = [receipt("D1"), receipt("D1", 2.0, turn=2)]
    others = [receipt("D1", session="other"), receipt("D1", session="")]
    log = log_of(*chat, *others, receipt("D1", session=""), *chat)
    assert (len(log.turns), log.repeated) == (5, 2)
    assert [turn.decided_s for turn in log.turns] == sorted(turn.decided_s for turn in log.turns)


GOOD = line_of(receipt("D1"))


@pytest.mark.parametrize(
    "line",
    [
        GOOD[: len(GOOD) // 2] + b"\n",
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b"{}\n",
        b"null\n",
        GOOD.replace(b'"estimated_prompt_tokens":1000', b'"estimated_prompt_tokens":-1'),
        GOOD.replace(b'"estimated_prompt_tokens":1000', b'"estimated_prompt_tokens":1e400'),
        GOOD.replace(b'"estimated_prompt_tokens":1000', b'"estimated_prompt_tokens":' + b"9" * 5000),
        GOOD.replace(b'"ttft_s":0.1', b'"ttft_s":NaN'),
        GOOD.replace(b'"started_s":0.0', b'"started_s":-1.0'),
        GOOD.replace(b'"tpot_s":0.025', b'"tpot_s":0'),
        GOOD.replace(b'"ttft_s":0.25', b'"ttft_s":-1.0'),
        GOOD.replace(b'"ttft_factor":3.0', b'"ttft_factor":1e9'),
        GOOD.replace(b"2026-01-01T", b"yesterday "),
        GOOD.replace(b"2026-01-01T", b"0001-01-01T"),
        GOOD.replace(b"+00:00", b""),
        GOOD.replace(b'"route":"LOCAL"', b'"route":"SIDEWAYS"'),
        GOOD.replace(b'"session":"s"', b'"session":"' + b"s" * 1000 + b'"'),
        GOOD + GOOD,
    ],
)
def test_a_damaged_line_is_skipped_and_named(line: bytes) -> None:
    log = read_log(enumerate([GOOD, line, b"\n", line_of(receipt("D1", session="another"))], start=1))
    assert (len(log.turns), log.damage.count) == (2, 1)
    ((number, why),) = log.damage.first
    assert number == 2
    assert why


def test_of_many_damaged_lines_the_first_are_named() -> None:
    log = read_log(enumerate([b"{}\n"] * 100, start=1))
    assert ([number for number, _ in log.damage.first], log.damage.count) == ([*range(1, LINES_TOLD + 1)], 100)


def test_a_receipt_of_a_version_to_come_is_read() -> None:
    more = msgspec.json.decode(GOOD) | {"colour": "red"}
    assert len(read_log([(1, msgspec.json.encode(more))]).turns) == 1


def test_no_models_name_can_steer_a_terminal() -> None:
    (turn,) = log_of(receipt("D1", model="\x1b[2Jm")).turns
    assert turn.model == "\ufffd[2Jm"
