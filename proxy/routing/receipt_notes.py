"""What a turn's receipt says of it before it is answered: what was asked, what was decided, and why."""

from __future__ import annotations

from ..policy import Decision, Rules, Turn
from ..sessions.table import SessionMatch
from ..telemetry.receipts import CellRecord, Receipt
from ..tokenizer.count_checks import CountedPrompt


def decision_headers(receipt: Receipt) -> dict[str, str]:
    """The response headers that explain a turn. Workers by name: clients never see addresses."""
    headers = {"X-Request-Id": receipt.id}
    if receipt.route:
        headers["X-PPD-Route"] = receipt.route
        headers["X-PPD-Reason"] = receipt.reason
        headers["X-PPD-Decode"] = receipt.decode
    if receipt.prefill:
        headers["X-PPD-Prefill"] = receipt.prefill
    if receipt.cell is not None:
        headers["X-PPD-Evidence"] = receipt.cell.evidence
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
    receipt.mode = rules.mode
    receipt.route, receipt.reason, receipt.wanted = decision.route, decision.reason, decision.wanted
    receipt.vetoes = list(decision.vetoes)
    receipt.decode = decision.decode.name
    receipt.prefill = decision.prefill.name if decision.prefill else ""
    receipt.qps = round(decision.qps, 3)
    receipt.estimated_cached_tokens = decision.cached_tokens
    receipt.cached_evidence = "" if decision.held is None else decision.held.evidence
    receipt.estimated_new_tokens = max(1, turn.prompt_tokens - decision.cached_tokens)
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
