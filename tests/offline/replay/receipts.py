"""Receipts as the proxy logs them, made from a few words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from ppd.offline.replay.past_turns import PastLog, PastTurn, read_log
from ppd.proxy.failures import Leg
from ppd.proxy.fleet.ledger import LegEstimates
from ppd.proxy.telemetry.receipts import LegRecord, Receipt

BEGAN_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
ROUTES = {"D": ("LOCAL", Leg.LOCAL), "R": ("REPLICA", Leg.REPLICA)}


def leg(kind: Leg, worker: str, began_s: float, first_s: float | None, ended_s: float) -> LegRecord:
    return LegRecord(
        kind=kind, worker=worker, address=f"{worker}:1", started_s=began_s, first_event_s=first_s, ended_s=ended_s
    )


def receipt(workers: str, at_s: float = 0.0, *, session: str = "s", turn: int = 1, **fields: Any) -> Receipt:
    """workers: "D1", or "P1 D1" of a SPLIT. It computes for 0.1 s a leg, and answers for a second."""
    *prefill, decode = workers.split()
    route, kind = ("SPLIT", Leg.DECODE) if prefill else ROUTES[decode[0]]
    legs = [leg(Leg.PREFILL, prefill[0], 0.0, 0.1, 0.1)] if prefill else []
    began_s = 0.1 if prefill else 0.0
    legs.append(leg(kind, decode, began_s, began_s + 0.1, began_s + 1.1))
    plain: dict[str, Any] = {
        "endpoint": "/v1/chat/completions",
        "model": "m",
        "stream": True,
        "kind": "next" if turn > 1 else "first",
        "route": route,
        "reason": "table_local",
        "wanted": route,
        "mode": "table",
        "decode": decode,
        "prefill": prefill[0] if prefill else "",
        "qps": 1.0,
        "estimated_prompt_tokens": 1000 * turn,
        "estimated_cached_tokens": 1000 * (turn - 1),
        "cached_evidence": "own_turns" if turn > 1 else "",
        "estimated_output_tokens": 50,
        "legs": legs,
        "status": 200,
        "outcome": "completed",
        "prompt_tokens": 1000 * turn,
        "completion_tokens": 50,
        "ttft_s": began_s + 0.1,
        "tpot_s": 0.02,
        "ended_s": began_s + 1.1,
    }
    at = datetime.fromtimestamp(BEGAN_S + at_s, UTC).isoformat(timespec="milliseconds")
    return Receipt(id=f"{session}-{turn}", at=at, session=session, turn=turn, **plain | fields)


def log_of(*receipts: Receipt) -> PastLog:
    return read_log(enumerate(map(line_of, receipts), start=1))


def line_of(one: Receipt) -> bytes:
    return msgspec.json.encode(one) + b"\n"


def taken(turn: PastTurn) -> LegEstimates:
    """Of the turn's workers, if nothing of its prompt was held."""
    tokens, answering = turn.prompt_tokens, turn.answering
    return LegEstimates(
        prompt_tokens=tokens,
        new_tokens=tokens,
        new_on_prefill_tokens=tokens,
        output_tokens=turn.output_tokens,
        prefill_s=0.1,
        shows_first_token=answering.first_s is not None and answering.first_s < answering.ended_s,
    )
