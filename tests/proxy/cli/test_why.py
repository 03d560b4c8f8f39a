"""`ppd why`: which receipt it finds, and what it prints of one."""

from __future__ import annotations

import gzip
import io
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from ppd.proxy.cli import why, why_view
from ppd.proxy.config import Mode
from ppd.proxy.failures import Cause, Leg, Phase
from ppd.proxy.telemetry.receipts import (
    LINE_LIMIT_BYTES,
    CandidatesRecord,
    CellRecord,
    EncoderLegRecord,
    EncoderRecord,
    LegRecord,
    Receipt,
)
from tests.support.decisions import EVICTED, FIRST, NEXT, P1, R1, by_table, rules, run


def receipt(request_id: str = "abc-1", **fields: Any) -> Receipt:
    plain: dict[str, Any] = {
        "at": "2026-01-31T23:59:59.123+00:00",
        "endpoint": "/v1/chat/completions",
        "model": "llama",
        "stream": True,
        "session": "5e55",
        "turn": 2,
        "kind": "next",
        "route": "LOCAL",
        "reason": "table_local",
        "wanted": "LOCAL",
        "mode": "table",
        "decode": "D2",
        "status": 200,
        "outcome": "completed",
    }
    return Receipt(id=request_id, **plain | fields)


def printed(shown: Receipt, width: int = 80) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False)
    for part in why_view.told(shown, width):
        console.print(part)
    return out.getvalue()


@pytest.mark.parametrize(("evidence", "words"), [("usage", ""), ("report", "sidecar"), ("estimate", "by nobody")])
def test_it_says_who_has_counted_unless_the_answer_did(evidence: str, words: str) -> None:
    (line,) = [line for line in printed(receipt(counts_evidence=evidence)).splitlines() if "counted" in line] or [""]
    assert words in line
    assert bool(line) == bool(words)


TERMS = ("ttft", "tpot", "streams", "batch", "queue", "work", "moved")
JUDGED = CandidatesRecord(
    route=["SPLIT", "LOCAL", "REPLICA"],
    decode=["D12", "D2", "R1"],
    prefill=["P11", "", ""],
    source=["D2", "", ""],
    fetched_tokens=[12_000, 0, 0],
    ttft_s=[0.1234, 1.5, None],
    tpot_s=[0.01234, 0.02, None],
    terms={name: [0.1111, 0.2222, 0] for name in TERMS},
    excluded=["", "", "evicts_live"],
    held={"own_turns": {"D2": 30_000}, "kv_events": {"P11": 512}},
)


@pytest.mark.parametrize("width", [80, 200])
def test_the_ways_that_were_judged_are_a_table_that_fits(width: int) -> None:
    told: dict[str, Any] = {
        "laws": "7",
        "predicted_ttft_s": 0.1234,
        "ttft_s": 0.18,
        "ttft_error": 0.5,
        "tpot_error": -0.1,
    }
    text = printed(receipt(route="SPLIT", decode="D12", prefill="P11", candidates=JUDGED, **told), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    assert "SPLIT P11 > D12" in flat
    assert "12000 tokens from D2" in flat
    assert "laws 7" in text
    assert "evicts_live" in text
    (chosen,) = (line for line in text.splitlines() if line.startswith(">"))
    assert "0.1234" in chosen
    assert "512" in chosen, "what P holds, where the prompt is computed"
    for name in TERMS:
        assert name in text
    assert "+50%" in text
    assert "-10%" in text


def test_where_there_is_room_each_term_has_a_column() -> None:
    plain = msgspec.structs.replace(JUDGED, excluded=[])
    (heading,) = (line for line in printed(receipt(candidates=plain), 200).splitlines() if line.startswith("   way"))
    assert heading.split()[-len(TERMS) :] == [*TERMS]
    assert "streams 0.1111" in " ".join(printed(receipt(candidates=plain), 80).split())


def test_the_cell_and_its_score_are_told_in_words() -> None:
    cell = CellRecord(
        table="h100",
        lookup="nearest",
        cell="small/tiny/2",
        evidence="inside",
        score=0.09,
        d_ttft=0.12,
        d_tpot=-0.03,
        w_ttft=1.0,
        w_tpot=3.0,
    )
    text = " ".join(printed(receipt(cell=cell, estimated_cached_tokens=900, cached_evidence="kv_events")).split())
    assert "LOCAL saves 12.0% of TTFT (weight 1) and saves 3.0% of TPOT (weight 3)" in text
    assert "+0.090: above 0, so LOCAL" in text
    assert "the engine itself told it" in text
    none = msgspec.structs.replace(cell, score=None, evidence="none")
    assert "was not measured" in printed(receipt(cell=none))


def test_vetoes_and_failed_legs_are_told() -> None:
    legs = [
        LegRecord(
            kind=Leg.PREFILL, worker="P1", address="p:1", started_s=0.01, phase=Phase.CONNECT, error=Cause.REFUSED
        ),
        LegRecord(kind=Leg.DECODE, worker="D2", address="d:1", started_s=0.02, first_event_s=0.1, status=200),
    ]
    text = printed(receipt(reason="evicted", vetoes=("evicted",), legs=legs))
    assert "too little of the conversation" in text
    (failed,) = (line for line in text.splitlines() if line.startswith("prefill"))
    assert "refused at connect" in failed


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"route": "", "error": "queue_timeout", "outcome": "failed", "status": 503}, "failed, status 503: queue_time"),
        ({"route": "", "session": ""}, "none: the turn ended before it was decided"),
        ({"outcome": "running", "status": 0}, "running"),
        ({"forced": "LOCAL"}, "LOCAL, by the request itself"),
        ({"candidates": CandidatesRecord(route=["LOCAL"], decode=[])}, "LOCAL"),
        ({"candidates": CandidatesRecord(route=[], decode=[], chosen=None)}, "judged"),
        ({"candidates": CandidatesRecord(route=["LOCAL"] * 3, decode=["D1"], ttft_s=[0.1], chosen=9)}, "0.1"),
    ],
)
def test_what_a_receipt_lacks_is_not_told(fields: dict[str, Any], said: str) -> None:
    assert said in printed(receipt(**fields))


def test_what_encoders_did_is_told() -> None:
    leg = EncoderLegRecord(
        id="x", worker="E1", address="e:1", items=2, started_s=0.01, ended_s=0.5, error="sent: reset"
    )
    record = EncoderRecord(
        began_s=0.01, waited_s=0.5, on_encoder_s=0.15, items=["image: failed", "audio: small"], legs=[leg]
    )
    text = " ".join(printed(receipt(encoder=record)).split())
    assert "image: failed, audio: small (below the least size)" in text
    assert "E1 0.010 to 0.500, 2 items: sent: reset" in text
    assert "0.1500 s at an encoder, - s in place" in text


def test_an_item_that_costs_less_in_place_is_not_said_to_have_met_a_busy_encoder() -> None:
    record = EncoderRecord(began_s=0.01, waited_s=0.0, items=["image: busy"], legs=[])
    text = " ".join(printed(receipt(encoder=record)).split())
    assert "image: busy (an encoder would take longer than its worker)" in text
    assert "an item takes" not in text, "nobody knows yet"


def test_nothing_that_a_client_chose_steers_the_terminal() -> None:
    text = printed(receipt("a\x1b[2Jb", model="m\x1b]0;x\x07\r\n[red]\u202e", session="\x9b1m"))
    assert not set(text) & set("\x1b\x07\r\x9b\u202e")
    assert "[red]" in text


def test_nothing_that_a_log_was_made_to_say_does_either() -> None:
    ways = CandidatesRecord(route=["LOCAL"], decode=["D1\x1b"], terms={"\x1b[2J": [1.0]})
    leg = EncoderLegRecord(id="x", worker="E1\x1b[2J", address="a", items=1, started_s=0.0)
    record = EncoderRecord(began_s=0.0, legs=[leg])
    text = printed(receipt(laws="1\x1b[2J", candidates=ways, encoder=record))
    assert "\x1b" not in text
    assert text.count("\ufffd") >= 4


def test_every_reason_and_veto_of_decisions_has_words() -> None:
    made = [
        run(turn, fleet, by)
        for turn in (FIRST, NEXT, EVICTED)
        for fleet in ((P1, *(run(NEXT).decode,)), (R1,), (run(NEXT).decode,))
        for by in (by_table(1, 1), by_table(0, 1), rules(), rules(Mode.PROFILES))
    ]
    said = {text for decision in made for text in (decision.reason, *decision.vetoes)}
    assert {text for text in said if not text.startswith("mode_")} <= why_view.REASONS.keys()


# -- which receipt


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(why.command, [*map(str, arguments)], env={"COLUMNS": "100"})


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "receipts.jsonl"
    receipts = [receipt("abc-1", decode="D7"), receipt("abc-2"), receipt("b-1"), receipt("abc-1", decode="D8")]
    file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in receipts))
    return file


def test_of_turns_with_one_id_the_newest_is_told(log: Path) -> None:
    result = ask("abc-1", "--log", log)
    assert result.exit_code == 0
    assert "LOCAL D8" in result.output


def test_the_beginning_of_an_id_is_enough_where_only_one_has_it(log: Path) -> None:
    assert "b-1" in ask("b", "--log", log).output
    result = ask("abc", "--log", log)
    assert (result.exit_code, result.output) == (1, "Error: 2 requests begin with 'abc': abc-1, abc-2\n")


def test_an_id_that_nobody_had_is_told(log: Path) -> None:
    result = ask("zz", "--log", log)
    assert (result.exit_code, result.output) == (1, f"Error: no receipt of request 'zz' in {log}\n")


def test_damaged_lines_are_skipped_and_named(log: Path) -> None:
    good = log.read_bytes()
    long = b'{"id":"b-1' + b"x" * 2 * LINE_LIMIT_BYTES + b"\n"
    log.write_bytes(b'{"id":"b-1"\n' + good + b"\xff b-1\n" + long + b'["b-1"]\n' + b"[" * 100_000 + b"b-1\n")
    result = ask("b-1", "--log", log)
    assert result.exit_code == 0
    skipped = re.findall(r"line (\d+) is skipped: \S", result.stderr)
    assert skipped == ["1", "6", "7", "8", "9"]


def test_a_compressed_log_is_read_and_half_of_one_refused(log: Path) -> None:
    packed = gzip.compress(log.read_bytes())
    log.write_bytes(packed)
    assert "LOCAL D8" in ask("abc-1", "--log", log).output
    log.write_bytes(packed[: len(packed) // 2])
    result = ask("abc-1", "--log", log)
    assert (result.exit_code, result.output.partition("file:")[0]) == (
        1,
        f"Error: {log}: cannot be read: it is no whole gzip ",
    )


def test_the_receipt_can_be_had_as_it_is(log: Path) -> None:
    result = ask("b-1", "--log", log, "--json")
    assert msgspec.json.decode(result.stdout.encode(), type=Receipt) == receipt("b-1")


@pytest.mark.parametrize("request_id", ["", "a/../b", "a b", "\x1b", "a" * 129])
def test_what_can_be_no_id_is_not_looked_for(log: Path, request_id: str) -> None:
    result = ask(request_id, "--log", log)
    assert (result.exit_code, result.output.partition(":")[2][:25]) == (1, " no request has such an i")


@pytest.mark.parametrize("arguments", [("a", "--proxy", "x:1", "--log", __file__), ("a", "--proxy", "ftp://x")])
def test_what_cannot_be_asked_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert ask(*arguments).exit_code == 2


def test_a_proxy_that_does_not_answer_is_one_clear_error() -> None:
    result = ask("a", "--proxy", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert result.output.startswith("Error: 127.0.0.1:1: ")


@pytest.mark.parametrize(("order", "told"), [("", ""), ("mode", ""), ("decode_first", ", order decode_first")])
def test_an_order_that_somebody_has_asked_for_is_told(order: str, told: str) -> None:
    assert f"(mode table{told})" in printed(receipt(order=order), width=200)


def test_a_leg_that_a_sidecar_ran_is_told_by_whom() -> None:
    legs = [
        LegRecord(kind=Leg.PREFILL, worker="P1", address="p:1", started_s=0.0, told_by="D2"),
        LegRecord(kind=Leg.DECODE, worker="D2", address="d:1", started_s=0.0),
    ]
    told = printed(receipt(legs=legs), width=200)
    assert re.search(r"prefill +P1, by D2 ", told) and re.search(r"decode +D2 ", told)
