"""TraceLab's rounds of coding agents: one row a model call, with the times of its messages.

How much of a prompt the provider had cached does not show what the client kept, so a round is a continuation unless its
prompt shrinks. A pause lasts from the last event of the round before to the last message that the client sent.
"""

from __future__ import annotations

import itertools

import msgspec

from .prefixes import added_tokens
from .rows import Count, Rows
from .turns import Blocks, TracedConversation, TracedTurn, fresh_turn

_SENT = frozenset(("user_message", "tool_result"))


class _Event(msgspec.Struct):
    event_type: str
    timestamp: str


class _Round(msgspec.Struct):
    session_id: str
    round_index: int
    input_tokens_total: Count
    output_tokens: Count
    timing_events: list[_Event] = []


class _Timed(msgspec.Struct):
    round: _Round
    sent_s: float | None
    ended_s: float | None


def read_tracelab(rows: Rows) -> list[TracedConversation]:
    sessions: dict[str, list[_Timed]] = {}
    for where, one in rows.json(_Round):
        sent = itertools.takewhile(lambda event: event.event_type in _SENT, one.timing_events)
        timed = _Timed(one, _last_s(rows, where, [*sent]), _last_s(rows, where, one.timing_events))
        sessions.setdefault(one.session_id, []).append(timed)
    for rounds in sessions.values():
        rounds.sort(key=lambda timed: timed.round.round_index)
    began = [rounds[0].sent_s for rounds in sessions.values()]
    zero_s = min((at_s for at_s in began if at_s is not None), default=0.0)
    return [
        TracedConversation(name, None if at_s is None else at_s - zero_s, _turns(rounds))
        for at_s, (name, rounds) in zip(began, sessions.items(), strict=True)
    ]


def _turns(rounds: list[_Timed]) -> tuple[TracedTurn, ...]:
    turns: list[TracedTurn] = []
    for before, one in zip((None, *rounds), rounds, strict=False):
        tokens, output = one.round.input_tokens_total, one.round.output_tokens
        new, think_s = None, 0.0
        if before is not None:
            held = before.round.input_tokens_total
            new = added_tokens(min(held, tokens), held, before.round.output_tokens, tokens)
            if one.sent_s is not None and before.ended_s is not None:
                think_s = max(0.0, one.sent_s - before.ended_s)
        if new is None:
            turns.append(fresh_turn(tokens, output, Blocks((), 1), think_s=think_s, restarts=before is not None))
        else:
            turns.append(TracedTurn(new_tokens=new, output_tokens=max(1, output), think_s=think_s))
    return tuple(turns)


def _last_s(rows: Rows, where: str, events: list[_Event]) -> float | None:
    return rows.time_s(where, "timestamp", events[-1].timestamp) if events else None
