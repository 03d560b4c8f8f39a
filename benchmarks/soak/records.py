"""The records of a soak: a head, then a row for each request, disturbance and sample, and one `Ending`.

Times are seconds since the load began. No row holds text of a prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from ppd.offline.experiment import files
from ppd.offline.experiment.files import decode_rows, encode_rows
from ppd.proxy.errors import FormatError

VERSION: Final = 1
KIND: Final = "ppd-soak"


class ClientOutcome(StrEnum):
    """How a request ended, as its client saw it."""

    COMPLETED = "completed"  # with all of the right text
    REJECTED = "rejected"  # rightly: no engine could serve it
    LEFT = "left"  # the client left; the text until then was right
    BROKEN = "broken"  # incomplete, and says so; the text until then was right
    TIMED_OUT = "timed_out"  # 504
    FAILED = "failed"  # another error status
    WRONG = "wrong"  # not the text of an engine without faults
    UNMARKED = "unmarked"  # incomplete, and nothing says so
    UNANSWERED = "unanswered"  # no answer at all, or the connection ended in the middle of one


FINE: Final = frozenset({ClientOutcome.COMPLETED, ClientOutcome.REJECTED, ClientOutcome.LEFT})


class FleetFault(StrEnum):
    KILL = "kill"  # SIGKILL; some seconds later a new process at the same address
    RESTART = "restart"  # drained, ended by SIGTERM, started again
    DRAIN = "drain"
    REMOVE = "remove"  # from the proxy, with requests under way on it
    FLIP = "flip"  # a P serves as D, or a D as P
    JOIN = "join"  # one more D
    REFUSE = "refuse"  # with 429, 500 or 503
    PAGE = "page"  # answers with HTML
    HANG = "hang"
    SLOW = "slow"
    GARBAGE = "garbage"
    CUT = "cut"  # resets connections before the answer, or in the middle of it
    EVENT = "event"  # ends streams by an error event
    ABORT = "abort"  # gives up before the first token
    HANDOFF = "handoff"  # a P does not say where its KV is
    LOAD = "load"  # a D cannot load KV
    WEDGE = "wedge"  # it neither sends nor receives KV, but reports good health
    DEAF = "deaf"  # refuses connections
    PAUSE = "pause"  # the proxy stands still, for longer than P keeps a handoff
    POISON = "poison"  # a prompt kills each engine that reads it, and its client asks again and again
    CONFIG = "config"  # the proxy's config file is half written, then empty, then changed
    CLOCK = "clock"  # the proxy's wall clock is an hour off


class SoakHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = VERSION
    kind: str = KIND
    seed: int
    seconds: float
    warm_up_s: float
    clients: int
    processes: int = 1  # of the proxy
    connector: str = "nixl"  # of the engines
    tls: bool = False  # between clients, the proxy and engines
    machine: str
    started: str  # ISO 8601, UTC


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    id: str  # the proxy's X-Request-ID
    conversation: int = msgspec.field(name="talk")
    endpoint: str
    move: str
    stream: bool
    sent_s: float
    first_text_s: float | None
    ended_s: float
    status: int  # 0: no response
    outcome: ClientOutcome
    route: str
    detail: str  # the error's code or type, or where the text departs from the right one


class Disturbance(msgspec.Struct, frozen=True, kw_only=True, tag="disturbance"):
    """One fault. `at_s` and `lasts_s` are first as planned, then as measured, until the fleet was whole again."""

    kind: FleetFault
    worker: str
    at_s: float
    lasts_s: float
    detail: int = 0  # the status of REFUSE, the number of events before CUT or EVENT
    problem: str = ""


class ProcessSample(msgspec.Struct, frozen=True, kw_only=True, tag="sample"):
    """Of the proxy's processes together."""

    at_s: float
    rss_kib: int
    descriptors: int
    sessions: int


class Ending(msgspec.Struct, frozen=True, kw_only=True, tag="ending"):
    """The state after the load, once everything had time to end. `leaked`: gauges that should be 0 and are not."""

    leaked: dict[str, float]
    quiet_after_s: float  # from the last request's end until all gauges were 0
    descriptors_before: int  # before the load
    descriptors_after: int
    log_defects: list[str]  # lines that a healthy proxy never logs, each once
    engine_counts: dict[str, float]  # summed over all engine processes


Row = RequestRecord | Disturbance | ProcessSample | Ending
_ROW = msgspec.json.Decoder(Row)


@dataclass(frozen=True, slots=True)
class Records:
    head: SoakHead
    requests: Sequence[RequestRecord]
    disturbances: Sequence[Disturbance]
    samples: Sequence[ProcessSample]
    ending: Ending

    def encode(self) -> bytes:
        return encode_rows(self.head, [*self.requests, *self.disturbances, *self.samples, self.ending])


def decode(data: bytes) -> Records:
    head, rows = decode_rows(data, SoakHead, _ROW.decode, kind=KIND, version=VERSION)
    endings = [row for row in rows if isinstance(row, Ending)]
    if len(endings) != 1:
        raise FormatError(f"not a {KIND} file: {len(endings)} endings")
    return Records(
        head,
        [row for row in rows if isinstance(row, RequestRecord)],
        [row for row in rows if isinstance(row, Disturbance)],
        [row for row in rows if isinstance(row, ProcessSample)],
        endings[0],
    )


def load(path: Path) -> Records:
    return files.load(path, decode)
