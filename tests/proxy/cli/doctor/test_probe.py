"""The probe conversation: its text, its model, and what is read from an answer and its receipt."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from ppd.proxy.cli.doctor.gather import Said
from ppd.proxy.cli.doctor.probe import FIRST_CHARS, MAX_TOKENS, NEXT_CHARS, choose_model, probe_text, turn_fact
from ppd.proxy.cli.doctor.values import Facts, TurnFact, WorkerFact
from ppd.proxy.failures import Leg
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.telemetry.receipts import LegRecord, Receipt

CHARS_PER_TOKEN = 5  # about, of English words; a tiny model may have one


def test_text_fills_several_blocks_and_fits_a_small_context() -> None:
    first, following = probe_text(FIRST_CHARS, Random(1)), probe_text(NEXT_CHARS, Random(2))
    assert len(first) / CHARS_PER_TOKEN > 2 * 128
    assert len(following) / CHARS_PER_TOKEN > 128
    assert len(first) + len(following) + 2 * MAX_TOKENS + 200 < 4096


def test_texts_differ_from_the_first_words_on() -> None:
    assert len({probe_text(400, Random(seed))[:16] for seed in range(50)}) == 50
    assert probe_text(400, Random(7)) == probe_text(400, Random(7))


def facts(**models: str) -> Facts:
    return Facts(
        workers=tuple(
            WorkerFact(name=name, worker=Worker(role=Role(name[0]), address=name, models=tuple(names.split())))
            for name, names in models.items()
        )
    )


@pytest.mark.parametrize(
    ("fleet", "model"),
    [
        (facts(P1="a b", D1="c b"), "b"),
        (facts(P1="a", D1="c"), "c"),
        (facts(R1="r"), "r"),
        (facts(P1="a"), ""),
        (facts(D1=""), ""),
    ],
)
def test_a_model_that_can_be_handed_over_is_preferred(fleet: Facts, model: str) -> None:
    assert choose_model(fleet) == model


HEADERS = {"x-ppd-route": "SPLIT", "x-ppd-reason": "first_turn", "x-ppd-decode": "D1", "x-ppd-prefill": "P1"}
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}


def receipt(**changes: Any) -> Receipt:
    blank = Receipt(id="1", at="", endpoint="", model="m", stream=False, session="s", turn=2, kind="next")
    return msgspec.structs.replace(blank, **changes)


def said(body: object, status: int = 200) -> Said:
    return Said(status, msgspec.json.encode(body), HEADERS)


def test_a_turn_without_a_receipt() -> None:
    turn = turn_fact(said({"usage": USAGE}), None)
    assert turn == TurnFact(
        route="SPLIT", reason="first_turn", decode="D1", prefill="P1", prompt_tokens=9, cached_tokens=3
    )


def test_a_receipt_knows_the_turns_number_and_a_missing_handoff() -> None:
    known = receipt(handoff_missing="params_missing", prompt_tokens=9, cached_tokens=0)
    turn = turn_fact(said({"usage": USAGE}), known)
    assert (turn.number, turn.handoff_missing, turn.cached_tokens) == (2, "params_missing", 0)


@pytest.mark.parametrize(
    ("answer", "known", "error"),
    [
        (said({"error": {"message": "no worker"}}, 503), None, "no worker"),
        (said(["odd"], 500), None, "no message"),
        (Said(0, error="no answer in 120 s"), None, "no answer in 120 s"),
        (
            said({"error": {"message": "gone"}}, 502),
            receipt(legs=[LegRecord(kind=Leg.PREFILL, worker="P1", address="a", started_s=0.0, error="timeout")]),
            "gone; prefill on P1: timeout",
        ),
    ],
)
def test_an_error_says_which_legs_failed(answer: Said, known: Receipt | None, error: str) -> None:
    assert turn_fact(answer, known).error == error


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": "9"}, {"prompt_tokens": True}, "odd"])
def test_a_usage_that_tells_nothing(usage: object) -> None:
    turn = turn_fact(said({"usage": usage}), None)
    assert (turn.prompt_tokens, turn.cached_tokens) == (0, None)
