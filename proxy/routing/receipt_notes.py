"""What a turn's receipt says of it before it is answered: what was asked, what was decided, and why."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, inf, isfinite, log10

import msgspec

from ..laws.prediction import Prediction
from ..policy import Decision, Rules, Turn
from ..policy.decision import Candidate
from ..sessions.table import SessionMatch
from ..telemetry.receipts import CandidatesRecord, CellRecord, Receipt, ShadowRecord
from ..tokenizer.count_checks import CountedPrompt


def decision_headers(receipt: Receipt) -> dict[str, str]:
    """The response headers that explain a turn. Workers by name: clients never see addresses."""
    headers = {"X-Request-Id": receipt.id}
    if route := receipt.route:
        headers["X-PPD-Route"] = route
        headers["X-PPD-Reason"] = receipt.reason
    if decode := receipt.decode:
        headers["X-PPD-Decode"] = decode
    if prefill := receipt.prefill:
        headers["X-PPD-Prefill"] = prefill
    if (cell := receipt.cell) is not None:
        headers["X-PPD-Evidence"] = cell.evidence
    return headers


def note_turn(receipt: Receipt, match: SessionMatch, turn: Turn, counted: CountedPrompt | None) -> None:
    receipt.session, receipt.turn, receipt.kind = match.session_id, match.turn, match.kind
    receipt.forced = turn.forced or ""
    receipt.slo = turn.slo
    receipt.estimated_prompt_tokens = turn.prompt_tokens
    if counted is not None and counted.is_proven:
        receipt.prompt_evidence = "tokenizer"
    receipt.estimated_output_tokens = turn.output_tokens


def note_decision(receipt: Receipt, turn: Turn, decision: Decision, rules: Rules) -> None:
    held, prefill, prediction = decision.held, decision.prefill, decision.prediction
    held_tokens = 0 if held is None else held.tokens
    receipt.mode, receipt.order = rules.mode, decision.order
    receipt.route, receipt.reason, receipt.wanted = decision.route, decision.reason, decision.wanted
    receipt.vetoes = list(decision.vetoes)
    receipt.decode, receipt.prefill = decision.decode.name, "" if prefill is None else prefill.name
    receipt.qps = round(decision.qps, 3)
    receipt.estimated_cached_tokens, receipt.cached_evidence = held_tokens, "" if held is None else held.evidence
    receipt.estimated_new_tokens = max(1, turn.prompt_tokens - held_tokens)
    receipt.candidates = _candidates(turn, decision) if decision.candidates else None
    receipt.predicted_ttft_s = receipt.predicted_tpot_s = None
    receipt.laws = ""
    if prediction is not None:
        receipt.predicted_ttft_s, receipt.predicted_tpot_s = _rounded(prediction.ttft_s), _rounded(prediction.tpot_s)
        if rules.laws is not None:
            receipt.laws = rules.laws.version
    verdict, scored = decision.verdict, rules.scored
    if verdict is not None and scored is not None:
        receipt.cell = CellRecord(
            table=scored.table.name,
            lookup=scored.rule,
            cell=str(verdict.cell),
            evidence=verdict.evidence,
            score=verdict.score,
            d_ttft=verdict.d_ttft,
            d_tpot=verdict.d_tpot,
            w_ttft=scored.weights.ttft,
            w_tpot=scored.weights.tpot,
        )


def as_shadow(receipt: Receipt) -> ShadowRecord:
    """The decision that was noted last."""
    return ShadowRecord(
        route=receipt.route,
        reason=receipt.reason,
        decode=receipt.decode,
        prefill=receipt.prefill,
        order=receipt.order,
        predicted_ttft_s=receipt.predicted_ttft_s,
        predicted_tpot_s=receipt.predicted_tpot_s,
    )


CANDIDATES = 8  # in one receipt
ROOM_BYTES = 1024 - 185  # for them; the rest is for what was predicted, the laws' version and the errors
DIGITS, FEWER_DIGITS = 4, 3
MOST_DECIMALS = 6


def _candidates(turn: Turn, decision: Decision) -> CandidatesRecord:
    """As many as there is room for: with terms that are long, in fewer digits; then fewer ways."""
    ways = list(decision.candidates[:CANDIDATES])
    chosen = next((number for number, way in enumerate(decision.candidates) if _is_chosen(way, decision)), None)
    if chosen is not None and chosen >= len(ways):
        ways[-1], chosen = decision.candidates[chosen], len(ways) - 1
    record = _columns(turn, ways, chosen, DIGITS)
    while len(_encode(record)) > ROOM_BYTES:
        record = _columns(turn, ways, chosen, FEWER_DIGITS)
        if len(ways) == 1 or len(_encode(record)) <= ROOM_BYTES:
            break
        del ways[-2 if chosen == len(ways) - 1 else -1]
        chosen = chosen if chosen is None else min(chosen, len(ways) - 1)
    return record


_encode = msgspec.json.Encoder().encode


def _is_chosen(way: Candidate, decision: Decision) -> bool:
    return (
        way.decode is decision.decode
        and way.prefill is decision.prefill
        and way.source is decision.source
        and way.route is decision.route
    )


def _columns(turn: Turn, ways: Sequence[Candidate], chosen: int | None, digits: int) -> CandidatesRecord:
    record = CandidatesRecord(
        route=[way.route for way in ways],
        decode=[way.decode.name for way in ways],
        terms=_terms(ways, digits),
        chosen=chosen,
        held=_held(turn, ways),
    )
    predictions = [way.prediction for way in ways]
    if any(predictions):
        record.ttft_s = [None if one is None else _rounded(one.ttft_s) for one in predictions]
        record.tpot_s = [None if one is None else _rounded(one.tpot_s) for one in predictions]
    if any(way.prefill for way in ways):
        record.prefill = ["" if way.prefill is None else way.prefill.name for way in ways]
    if any(way.source for way in ways):
        record.source = ["" if way.source is None else way.source.name for way in ways]
        record.fetched_tokens = [way.fetched_tokens for way in ways]
    if any(way.excluded for way in ways):
        record.excluded = [way.excluded for way in ways]
    return record


def _terms(ways: Sequence[Candidate], digits: int) -> dict[str, list[float | None]]:
    """A way's terms are rounded alike, so that their sum is the score to so many digits. Terms of 0 are left out."""
    columns: dict[str, list[float | None]] = {}
    for number, way in enumerate(ways):
        terms = way.terms
        decimals = _decimals(max(map(abs, terms.values()), default=0.0), digits)
        for name, value in terms.items():
            if not value:
                continue
            if name not in columns:
                columns[name] = [0] * len(ways)
            columns[name][number] = round(value, decimals) or 0 if isfinite(value) else None
    return {name: values for name, values in columns.items() if any(value != 0 for value in values)}


def _decimals(value: float, digits: int = DIGITS) -> int:
    """With which a number has so many digits."""
    if not 0.0 < value < inf:
        return digits
    return min(MOST_DECIMALS, digits - 1 - floor(log10(value)))


def _rounded(value: float) -> float | None:
    return round(value, _decimals(abs(value))) if isfinite(value) else None


def _held(turn: Turn, ways: Sequence[Candidate]) -> dict[str, dict[str, int]]:
    found = dict[str, dict[str, int]]()
    workers = {view.id: view for way in ways for view in (way.decode, way.prefill, way.source) if view is not None}
    for view in workers.values():
        held = turn.held.get(view.id)
        if held is not None and held.tokens:
            found.setdefault(held.evidence, {})[view.name] = held.tokens
    return found


def note_errors(receipt: Receipt, predicted: Prediction, ttft_s: float) -> None:
    """ttft_s: measured from when the workers were asked, as predicted: not from the turn's arrival."""
    receipt.ttft_error = _error(ttft_s, predicted.ttft_s)
    if receipt.tpot_s is not None:
        receipt.tpot_error = _error(receipt.tpot_s, predicted.tpot_s)


def _error(measured: float, predicted: float) -> float | None:
    return round(measured / predicted - 1.0, 3) if 0.0 < predicted < inf else None
