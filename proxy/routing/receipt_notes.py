"""What a turn's receipt says of it: what was asked, what was decided and why, and what it failed of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import floor, inf, isfinite, log10

import msgspec

from ..beliefs.held import Held
from ..decision_table.score import Verdict, Weights
from ..errors import LegError, PPDError, Refused
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
    receipt.vetoes = decision.vetoes
    receipt.decode, receipt.prefill = decision.decode.name, "" if prefill is None else prefill.name
    receipt.qps = round(decision.qps, 3)
    receipt.estimated_cached_tokens, receipt.cached_evidence = held_tokens, "" if held is None else held.evidence
    receipt.estimated_new_tokens = max(1, turn.prompt_tokens - held_tokens)
    receipt.predicted_ttft_s = receipt.predicted_tpot_s = None
    receipt.laws = ""
    if prediction is not None:
        receipt.predicted_ttft_s, receipt.predicted_tpot_s = _rounded(prediction.ttft_s), _rounded(prediction.tpot_s)
        if rules.laws is not None:
            receipt.laws = rules.laws.version
    receipt.cell = receipt.handoff_missing = None  # of an attempt before this one
    verdict, scored = decision.verdict, rules.scored
    if verdict is not None and scored is not None:
        receipt.cell = _cell(verdict, scored.table.name, scored.rule, scored.weights)


@contextmanager
def noting_wait(receipt: Receipt, now: Callable[[], float]) -> Iterator[None]:
    """Of a turn that goes back into the queue."""
    since_s = now()
    try:
        yield
    finally:
        receipt.waited_s += now() - since_s


@lru_cache(maxsize=1024)
def _cell(verdict: Verdict, table: str, rule: str, weights: Weights) -> CellRecord:
    """One object for all receipts that say the same: most turns fall into few cells."""
    return CellRecord(
        table=table,
        lookup=rule,
        cell=str(verdict.cell),
        evidence=verdict.evidence,
        score=verdict.score,
        d_ttft=verdict.d_ttft,
        d_tpot=verdict.d_tpot,
        w_ttft=weights.ttft,
        w_tpot=weights.tpot,
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


class JudgedWay(msgspec.Struct, frozen=True, gc=False):
    """A `Candidate`, as a receipt knows it: workers by name, so that none is kept for it."""

    route: str
    decode: str
    prefill: str
    source: str
    fetched_tokens: int
    ttft_s: float | None  # predicted
    tpot_s: float | None
    terms: Mapping[str, float]
    excluded: str


class JudgedWays(msgspec.Struct, frozen=True, gc=False):
    """The best ones, and the one that was chosen: what a receipt says of them is made once somebody reads it."""

    ways: tuple[JudgedWay, ...]
    chosen: int | None  # which of them; None: another
    held: Mapping[str, Held]  # of the prompt, by the names of their workers

    @classmethod
    def of(cls, turn: Turn, decision: Decision) -> JudgedWays:
        judged = decision.candidates
        ways = list(judged[:CANDIDATES])
        chosen = next((number for number, way in enumerate(judged) if _is_chosen(way, decision)), None)
        if chosen is not None and chosen >= len(ways):
            ways[-1], chosen = judged[chosen], len(ways) - 1
        held = {
            view.name: turn.held[view.id]
            for way in (ways if turn.held else ())
            for view in (way.decode, way.prefill, way.source)
            if view is not None and view.id in turn.held
        }
        return cls(tuple([_named(way) for way in ways]), chosen, held)

    def record(self) -> CandidatesRecord:
        """As many as there is room for: with terms that are long, in fewer digits; then fewer ways."""
        ways, chosen = list(self.ways), self.chosen
        record = self._columns(ways, chosen, DIGITS)
        while len(_encode(record)) > ROOM_BYTES:
            record = self._columns(ways, chosen, FEWER_DIGITS)
            if len(ways) == 1 or len(_encode(record)) <= ROOM_BYTES:
                break
            del ways[-2 if chosen == len(ways) - 1 else -1]
            chosen = chosen if chosen is None else min(chosen, len(ways) - 1)
        return record

    def _columns(self, ways: Sequence[JudgedWay], chosen: int | None, digits: int) -> CandidatesRecord:
        record = CandidatesRecord(
            route=[way.route for way in ways],
            decode=[way.decode for way in ways],
            terms=_terms(ways, digits),
            chosen=chosen,
            held=self._held_by(ways),
        )
        if any(way.ttft_s is not None for way in ways):
            record.ttft_s = [None if way.ttft_s is None else _rounded(way.ttft_s) for way in ways]
            record.tpot_s = [None if way.tpot_s is None else _rounded(way.tpot_s) for way in ways]
        if any(way.prefill for way in ways):
            record.prefill = [way.prefill for way in ways]
        if any(way.source for way in ways):
            record.source = [way.source for way in ways]
            record.fetched_tokens = [way.fetched_tokens for way in ways]
        if any(way.excluded for way in ways):
            record.excluded = [way.excluded for way in ways]
        return record

    def _held_by(self, ways: Sequence[JudgedWay]) -> dict[str, dict[str, int]]:
        found = dict[str, dict[str, int]]()
        for name in dict.fromkeys(name for way in ways for name in (way.decode, way.prefill, way.source)):
            held = self.held.get(name)
            if held is not None and held.tokens:
                found.setdefault(held.evidence, {})[name] = held.tokens
        return found


_encode = msgspec.json.Encoder().encode


def _named(way: Candidate) -> JudgedWay:
    prefill, source, prediction = way.prefill, way.source, way.prediction
    return JudgedWay(
        way.route,
        way.decode.name,
        "" if prefill is None else prefill.name,
        "" if source is None else source.name,
        way.fetched_tokens,
        None if prediction is None else prediction.ttft_s,
        None if prediction is None else prediction.tpot_s,
        way.terms,
        way.excluded,
    )


def _is_chosen(way: Candidate, decision: Decision) -> bool:
    return (
        way.decode is decision.decode
        and way.prefill is decision.prefill
        and way.source is decision.source
        and way.route is decision.route
    )


def _terms(ways: Sequence[JudgedWay], digits: int) -> dict[str, list[float | None]]:
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


def note_errors(receipt: Receipt, predicted: Prediction, ttft_s: float) -> None:
    """ttft_s: measured from when the workers were asked, as predicted: not from the turn's arrival."""
    receipt.ttft_error = _error(ttft_s, predicted.ttft_s)
    if receipt.tpot_s is not None:
        receipt.tpot_error = _error(receipt.tpot_s, predicted.tpot_s)


def _error(measured: float, predicted: float) -> float | None:
    return round(measured / predicted - 1.0, 3) if 0.0 < predicted < inf else None


def error_name(exc: PPDError) -> str:
    """As a receipt has it."""
    if isinstance(exc, LegError):
        return exc.code or f"{exc.phase}: {exc.cause}"
    return exc.reason if isinstance(exc, Refused) else type(exc).__name__
