"""Which format a file has, recognised by its first row, and its conversations."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from ppd.proxy.errors import FormatError

from .aiperf import read_multi_turn, read_sessions
from .chained import read_bailian, read_mooncake
from .dialogues import read_dialogues
from .rows import Rows
from .tabular import AZURE_HEADERS, BURSTGPT_HEADER, read_azure, read_burstgpt
from .tracelab import read_tracelab
from .turns import TracedConversation
from .weka import read_weka


class UnknownFormat(FormatError):
    """The file's first row is one of no format that is known."""


class Format(StrEnum):
    MOONCAKE = "mooncake"
    BAILIAN = "qwen-bailian"
    WEKA = "weka"
    TRACELAB = "tracelab"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    AIPERF_SESSIONS = "aiperf mooncake_trace with sessions"
    AIPERF_MULTI_TURN = "aiperf multi_turn"
    DIALOGUES = "messages or ShareGPT conversations"


# The JSON members that identify a format, the most specific first.
_MEMBERS = (
    (Format.BAILIAN, {"chat_id", "input_length"}),
    (Format.TRACELAB, {"session_id", "round_index", "input_tokens_total"}),
    (Format.AIPERF_MULTI_TURN, {"session_id", "turns"}),
    (Format.AIPERF_SESSIONS, {"session_id", "input_length"}),
    (Format.AIPERF_SESSIONS, {"session_id", "text_input"}),
    (Format.WEKA, {"requests", "block_size"}),
    (Format.MOONCAKE, {"timestamp", "input_length"}),
    (Format.DIALOGUES, {"messages"}),
    (Format.DIALOGUES, {"conversations"}),
)
_HEADERS = (*((Format.AZURE, set(header)) for header in AZURE_HEADERS), (Format.BURSTGPT, set(BURSTGPT_HEADER)))

_READERS: dict[Format, Callable[[Rows], list[TracedConversation]]] = {
    Format.MOONCAKE: read_mooncake,
    Format.BAILIAN: read_bailian,
    Format.WEKA: read_weka,
    Format.TRACELAB: read_tracelab,
    Format.AZURE: read_azure,
    Format.BURSTGPT: read_burstgpt,
    Format.AIPERF_SESSIONS: read_sessions,
    Format.AIPERF_MULTI_TURN: read_multi_turn,
    Format.DIALOGUES: read_dialogues,
}


def detect(path: Path) -> Format:
    return _format(Rows.load(path))


def read(path: Path) -> list[TracedConversation]:
    """In the file's order, without those that have no turn; FormatError where none is left."""
    rows = Rows.load(path)
    conversations = [one for one in _READERS[_format(rows)](rows) if one.turns]
    if not conversations:
        raise FormatError(f"{path}: holds no conversation")
    return conversations


def arrival_times(path: Path) -> list[float]:
    """In s and in order; FormatError where a conversation has no arrival time."""
    times = [conversation.arrival_s for conversation in read(path)]
    known = sorted(at_s for at_s in times if at_s is not None)
    if len(known) < len(times):
        raise FormatError(f"{path}: does not say when its conversations arrive")
    return known


def _format(rows: Rows) -> Format:
    if rows.is_empty:
        raise FormatError(f"{rows.name}: is empty")
    members, columns = rows.members(), frozenset(rows.header())
    for kinds, names in ((_MEMBERS, members), (_HEADERS, columns)):
        for kind, telling in kinds:
            if telling <= names:
                return kind
    raise UnknownFormat(f"{rows.name}: is in none of the known formats: {', '.join(Format)}")
