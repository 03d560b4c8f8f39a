"""The files of NVIDIA's aiperf: `mooncake_trace` with sessions, and `multi_turn`.

`input_length` is what a turn adds to its session, and `delay` (ms) the pause before it. A session's first row has its
arrival time (`timestamp`, ms). Text may take the place of a length.
"""

from __future__ import annotations

import msgspec

from .rows import Count, Rows, Seconds
from .turns import Blocks, Message, TracedConversation, TracedTurn

_BLOCK = 512


class _Row(msgspec.Struct):
    session_id: str | int
    timestamp: Seconds | None = None  # milliseconds
    delay: Seconds | None = None  # milliseconds
    input_length: Count | None = None
    output_length: Count | None = None
    text_input: str | None = None
    hash_ids: list[int] | None = None


class _Said(msgspec.Struct):
    text: str
    delay: Seconds | None = None  # milliseconds
    role: str = "user"


class _Session(msgspec.Struct):
    session_id: str | int
    turns: list[_Said]


def read_sessions(rows: Rows) -> list[TracedConversation]:
    sessions: dict[str, list[_Row]] = {}
    for where, row in rows.json(_Row):
        if row.input_length is None and row.text_input is None:
            raise rows.error(where, "must have input_length or text_input")
        sessions.setdefault(str(row.session_id), []).append(row)
    return [
        TracedConversation(
            name,
            None if turns[0].timestamp is None else turns[0].timestamp / 1000,
            tuple(_turn(row, at) for at, row in enumerate(turns)),
        )
        for name, turns in sessions.items()
    ]


def read_multi_turn(rows: Rows) -> list[TracedConversation]:
    return [
        TracedConversation(
            str(session.session_id),
            None,
            tuple(
                TracedTurn(messages=(Message(said.role, said.text),), think_s=(said.delay or 0.0) / 1000 if at else 0.0)
                for at, said in enumerate(session.turns)
            ),
        )
        for _, session in rows.json(_Session)
    ]


def _turn(row: _Row, at: int) -> TracedTurn:
    is_text = row.text_input is not None
    return TracedTurn(
        new_tokens=None if is_text else max(1, row.input_length or 0),
        output_tokens=row.output_length or None,
        think_s=(row.delay or 0.0) / 1000 if at else 0.0,
        messages=(Message("user", row.text_input or ""),) if is_text else (),
        blocks=Blocks(tuple(row.hash_ids), _BLOCK) if row.hash_ids and not at and not is_text else None,
    )
