"""The access log: one line for each request that was answered, refused or left. Never text of a prompt, nor a key."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..runtime.line_writer import DescriptorSink, Lines, LineWriter
from ..runtime.log_output import json_line
from .receipts import Receipt, now_text

RECORD = "access_record"  # in the `state` of an ASGI scope
STDOUT = 1
CLOSE_S = 1.0
LEFT = 499  # the client left before an answer began
SHOWN_CHARACTERS = 200  # of what a client chose
_PLAIN = re.compile(r"[!#-<>-~]+")  # printable, without spaces, quotes and "="


@dataclass(slots=True)
class AccessRecord:
    """One request while it is under way."""

    method: str
    path: str  # without its query, which may hold anything; empty: it asked for no path
    started_s: float
    status: int = 0  # 0: no answer has begun
    client: str = ""  # the name of its key
    model: str = ""
    worker: str = ""
    is_broken: bool = False  # its worker broke its answer off; a turn's receipt says that itself
    receipt: Receipt | None = None  # of a turn, which knows better


class AccessLog:
    """Writes off the event loop, and loses lines rather than wait."""

    def __init__(
        self,
        *,
        as_json: bool,
        lines: Lines | None = None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], str] = now_text,
    ) -> None:
        """lines: None: standard output."""
        self._encode = json_line if as_json else as_text
        self._now = now
        self._wall = wall
        self._lines = lines or LineWriter(DescriptorSink(STDOUT), self._lost_line)

    @property
    def lost(self) -> int:
        return self._lines.lost

    def opened(self, method: str, path: str) -> AccessRecord:
        shown = path[:SHOWN_CHARACTERS] if path[:1] == "/" else ""  # a whole URL may hold a password
        return AccessRecord(method, shown, self._now())

    def closed(self, record: AccessRecord, ended: str, at_s: float | None = None) -> None:
        """ended: completed, left or cut. at_s: when, by this log's clock, if not just now."""
        line = fields_of(record, ended, (self._now() if at_s is None else at_s) - record.started_s)
        self._lines.put(self._encode({"at": self._wall(), **line}) + b"\n")

    async def close(self) -> None:
        await asyncio.to_thread(self._lines.flush, CLOSE_S)

    def _lost_line(self, count: int) -> bytes:
        return self._encode({"at": self._wall(), "lost_lines": count}) + b"\n"


def fields_of(record: AccessRecord, ended: str, duration_s: float) -> dict[str, object]:
    """What is not known is left out."""
    if record.is_broken:
        ended = "broken"
    outcome = outcome_of(record.status) if ended == "completed" else ended
    line: dict[str, object] = {
        "status": record.status or LEFT,
        "method": record.method,
        "path": record.path,
        "client": record.client,
        "model": record.model,
        "workers": [record.worker] if record.worker else None,
    }
    if (receipt := record.receipt) is not None:
        line |= {
            "id": receipt.id,
            "client": receipt.client,
            "model": receipt.model,
            "route": receipt.route,
            "reason": receipt.reason,
            "workers": [leg.worker for leg in receipt.legs],
            "prompt_tokens": receipt.prompt_tokens,
            "cached_tokens": receipt.cached_tokens,
            "completion_tokens": receipt.completion_tokens,
            "ttft_s": _rounded(receipt.ttft_s),
        }
        # Who has a whole answer may leave before the end of the message.
        if receipt.outcome == "completed" or (ended == "completed" and receipt.outcome != "running"):
            outcome = receipt.outcome
    line |= {"duration_s": _rounded(duration_s), "outcome": outcome}
    return {
        name: value[:SHOWN_CHARACTERS] if isinstance(value, str) else value
        for name, value in line.items()
        if value is not None and value not in ("", [])
    }


def outcome_of(status: int) -> str:
    """Of an answer that the client has whole."""
    return "failed" if status >= 500 else "rejected" if status >= 400 else "completed"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def as_text(line: Mapping[str, object]) -> bytes:
    """`name=value`, quoted as JSON where a value is not plain."""
    parts = []
    for name, value in line.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(f"{name}={text if _PLAIN.fullmatch(text) else json.dumps(text)}")
    return " ".join(parts).encode()
