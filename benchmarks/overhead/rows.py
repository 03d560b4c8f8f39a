"""The measurements of every subject (`ROWS`), and the lines of the table that show them (`LINES`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from .bodies import ChatShape
from .records import Durations, RowRecord
from .subjects import FleetKind


class LoadMode(StrEnum):
    """The load generator's modes."""

    CLOSED = "closed"
    OPEN = "open"
    ONCE = "once"
    HOLD = "hold"


_CHAT = ChatShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement. `fresh`: every request begins a conversation; else first turns are asked before it."""

    name: str
    connections: int
    load: LoadMode = LoadMode.CLOSED
    conversation: ChatShape = _CHAT
    fleet: FleetKind = FleetKind.PLAIN
    fresh: bool = False
    rate: float = 0.0
    ramp_ms: int = 200
    after: str = ""  # a row whose streams stay open for this one; its own connections come on top

    @property
    def has_direct(self) -> bool:
        """Rows of the proxy's memory and of two legs have no direct connection to compare with."""
        return self.load is not LoadMode.HOLD and self.fleet is FleetKind.PLAIN


class Better(StrEnum):
    MORE = "more"
    LESS = "less"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLine:
    """One line of the table: `target` is the ratio to the best peer, `limit` in the line's own unit."""

    row: str
    title: str
    value: Callable[[RowRecord], float | None]
    digits: int = 2
    better: Better = Better.LESS
    is_added: bool = False  # the direct connection's value is subtracted
    target: float | None = None
    limit: float | None = None


def _streams(words: int, every_us: int) -> ChatShape:
    return ChatShape(turns=4, words=words, streams=True, every_us=every_us)


def _prompts(size: int) -> ChatShape:
    return ChatShape(turns=3, opening_bytes=size, message_bytes=size // 20)


# Their second word comes after an hour.
_IDLE = ChatShape(turns=2, words=16, streams=True, every_us=3_600_000_000)

# Memory comes first: streams would reuse what other rows leave free in the allocator, and seem to cost nothing.
ROWS: tuple[Row, ...] = (
    Row(name="idle 1000", load=LoadMode.HOLD, connections=1000, conversation=_IDLE, ramp_ms=1000),
    Row(name="idle 5000", load=LoadMode.HOLD, connections=4000, conversation=_IDLE, ramp_ms=4000, after="idle 1000"),
    Row(name="c=1", connections=1),
    *(Row(name=f"c={count}", connections=count) for count in (16, 64, 256)),
    Row(name="130 KB", connections=16, conversation=_prompts(130_000)),
    Row(name="600 KB", connections=16, conversation=_prompts(600_000)),
    Row(name="400 streams", connections=400, conversation=_streams(300, 10_000), ramp_ms=1000),
    Row(name="100 streams", connections=100, conversation=_streams(150, 20_000), ramp_ms=500),
    Row(name="200 req/s", load=LoadMode.OPEN, connections=256, conversation=_streams(32, 10_000), rate=200.0),
    Row(name="200 answers/s", load=LoadMode.OPEN, connections=256, rate=200.0),
    Row(name="burst", load=LoadMode.ONCE, connections=1000, conversation=_streams(8, 0), ramp_ms=0),
    *(Row(name=f"P then D c={count}", connections=count, fleet=FleetKind.PAIR, fresh=True) for count in (16, 64)),
)


def request_rate(record: RowRecord) -> float | None:
    return record.load.right / record.load.seconds if record.load else None


def cpu_us(record: RowRecord) -> float | None:
    load = record.load
    return record.cpu_s / load.right * 1e6 if load and load.right and record.cpu_s is not None else None


def _chunk_us(record: RowRecord) -> float | None:
    load = record.load
    return record.cpu_s / load.chunks * 1e6 if load and load.chunks and record.cpu_s is not None else None


def _chunk_rate(record: RowRecord) -> float | None:
    return record.load.chunks / record.load.seconds if record.load else None


def _ms(spread: str, quantile: str) -> Callable[[RowRecord], float | None]:
    def value(record: RowRecord) -> float | None:
        found: Durations | None = getattr(record.load, spread, None)
        return getattr(found, f"{quantile}_us") / 1e3 if found else None

    return value


def _refused(record: RowRecord) -> float | None:
    return float(record.faults + record.load.unanswered) if record.load else None


def _stream_kib(record: RowRecord) -> float | None:
    """Over the streams of all HOLD rows so far, which `holding` counts."""
    load = record.load
    if load is None or not load.holding or record.rss_kib is None or record.rss_kib_before is None:
        return None
    return (record.rss_kib - record.rss_kib_before) / load.holding


def _throughput(row: str, target: float) -> tuple[ReportLine, ReportLine]:
    return (
        ReportLine(
            row=row, title=f"{row}, requests/s", value=request_rate, digits=0, better=Better.MORE, target=target
        ),
        ReportLine(row=row, title=f"{row}, CPU us a request", value=cpu_us, digits=0),
    )


def _prompt_lines(row: str, target: float) -> tuple[ReportLine, ReportLine]:
    return (
        ReportLine(
            row=row, title=f"{row} prompts, requests/s", value=request_rate, digits=0, better=Better.MORE, target=target
        ),
        ReportLine(row=row, title=f"{row} prompts, p99 ms", value=_ms("whole", "p99")),
    )


def _chunk_lines(row: str, every: str, target: float) -> tuple[ReportLine, ReportLine]:
    return (
        ReportLine(row=row, title=f"{row} x {every}, CPU us a chunk", value=_chunk_us, digits=1, target=target),
        ReportLine(row=row, title=f"{row} x {every}, chunks/s", value=_chunk_rate, digits=0, better=Better.MORE),
    )


def _added(row: str, title: str, spread: str, quantile: str, limit: float | None = None) -> ReportLine:
    value, target = _ms(spread, quantile), 0.8 if quantile == "p50" else 1.0
    return ReportLine(row=row, title=title, value=value, digits=3, is_added=True, target=target, limit=limit)


LINES: tuple[ReportLine, ...] = (
    *(line for count, target in ((16, 1.5), (64, 1.5), (256, 1.8)) for line in _throughput(f"c={count}", target)),
    *(line for count in (16, 64) for line in _throughput(f"P then D c={count}", 2.0)),
    _added("c=1", "c=1, added latency p50, ms", "whole", "p50"),
    _added("c=1", "c=1, added latency p99, ms", "whole", "p99"),
    *_chunk_lines("400 streams", "10 ms", 0.8),
    *_chunk_lines("100 streams", "20 ms", 0.9),
    _added("200 req/s", "200 req/s, added TTFT p50, ms", "first", "p50", limit=0.4),
    _added("200 req/s", "200 req/s, added TTFT p99, ms", "first", "p99"),
    _added("200 answers/s", "200 whole answers/s, added latency p50, ms", "whole", "p50"),
    _added("200 answers/s", "200 whole answers/s, added latency p99, ms", "whole", "p99"),
    ReportLine(row="idle 1000", title="1,000 idle streams, KiB each", value=_stream_kib, digits=1, limit=6.0),
    ReportLine(row="idle 5000", title="5,000 idle streams, KiB each", value=_stream_kib, digits=1, limit=6.0),
    *_prompt_lines("130 KB", 1.6),
    *_prompt_lines("600 KB", 1.4),
    ReportLine(row="burst", title="1,000 connections at once, refused", value=_refused, digits=0, limit=0.0),
    ReportLine(
        row="burst",
        title="1,000 connections at once, slowest first byte, ms",
        value=_ms("first", "max"),
        digits=0,
        target=0.5,
    ),
)
