"""Traces as CSV: Azure's of 2023 and 2024, and BurstGPT's.

Azure's have no sessions: each row is a conversation of one turn. BurstGPT's rows without an answer failed and are left
out. Rows with a `Session ID` are the turns of that session, and their prompts include the history.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .prefixes import added_tokens
from .rows import Rows
from .turns import Blocks, TracedConversation, TracedTurn, fresh_turn

AZURE_HEADERS = (
    ("arrival_s", "context_tokens", "generated_tokens"),
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
)
BURSTGPT_HEADER = ("Timestamp", "Request tokens", "Response tokens")
_SESSION = "Session ID"

_NO_BLOCKS = Blocks((), 1)


@dataclass(slots=True)
class _Session:
    began_s: float
    sent_s: float = 0.0
    held_tokens: int = 0
    held_output: int = 0
    turns: list[TracedTurn] = field(default_factory=list)


def read_azure(rows: Rows) -> list[TracedConversation]:
    columns = next(header for header in AZURE_HEADERS if set(header) <= set(rows.header()))
    requests = []
    for where, (at, prompt, answer) in rows.csv(columns):
        at_s = rows.time_s(where, columns[0], at)
        tokens, output = int(rows.number(where, columns[1], prompt)), int(rows.number(where, columns[2], answer))
        requests.append((at_s, fresh_turn(tokens, output, _NO_BLOCKS)))
    zero_s = requests[0][0] if requests else 0.0
    return [TracedConversation(str(number), at_s - zero_s, (turn,)) for number, (at_s, turn) in enumerate(requests)]


def read_burstgpt(rows: Rows) -> list[TracedConversation]:
    sessions: dict[str, _Session] = {}
    for where, (at, prompt, answer, name) in rows.csv(BURSTGPT_HEADER, (_SESSION,)):
        at_s = rows.time_s(where, BURSTGPT_HEADER[0], at)
        tokens = int(rows.number(where, BURSTGPT_HEADER[1], prompt))
        output = int(rows.number(where, BURSTGPT_HEADER[2], answer))
        if output:
            _add(sessions.setdefault(name or where, _Session(at_s)), at_s, tokens, output)
    zero_s = min((session.began_s for session in sessions.values()), default=0.0)
    return [TracedConversation(name, one.began_s - zero_s, tuple(one.turns)) for name, one in sessions.items()]


def _add(session: _Session, at_s: float, tokens: int, output: int) -> None:
    gap_s = max(0.0, at_s - session.sent_s) if session.turns else 0.0
    shared = min(session.held_tokens, tokens)
    new = added_tokens(shared, session.held_tokens, session.held_output, tokens) if session.turns else None
    if new is None:
        turn = fresh_turn(tokens, output, _NO_BLOCKS, gap_s=gap_s, restarts=bool(session.turns))
    else:
        turn = TracedTurn(new_tokens=new, output_tokens=output, gap_s=gap_s)
    session.turns.append(turn)
    session.sent_s, session.held_tokens, session.held_output = at_s, tokens, output
