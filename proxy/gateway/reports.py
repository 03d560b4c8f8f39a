"""What sidecars tell of the turns that this picker has decided: found by request id and turn id, once each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, Metric

from ..discovery.turn_report import TurnReport, decode
from ..fleet.worker import WorkerId

KNOWN_LIMIT = 20_000  # workers whose sidecars have reported
LATE_LIMIT = 1_000  # turns that ended without a report: one may still come


class ReportTaker(Protocol):
    """A turn that is not over yet."""

    @property
    def worker(self) -> WorkerId: ...

    @property
    def turn_id(self) -> str: ...

    def reported(self, report: TurnReport) -> None: ...


@dataclass(slots=True)
class _SameId:
    turns: list[ReportTaker]
    shared: frozenset[str] = frozenset()  # turn ids of several turns, at once at some time; empty: named none


class Reports:
    """Turns that a report may come for.

    A client may give turns that run at once the same request id, so the turn's own says whose a report is. Where a
    sidecar names none it could be of any of them, and counts for none.
    """

    def __init__(self, elsewhere: Callable[[bytes], None] | None = None) -> None:
        """elsewhere: tells the other processes; None: this is the only one."""
        self._elsewhere = elsewhere
        self._open: dict[str, _SameId] = {}  # by request id
        self._known: dict[WorkerId, None] = {}  # the longest unheard first
        self._ended: OrderedDict[str, tuple[str, WorkerId]] = OrderedDict()  # without a report, the oldest first
        self._taken = self._late = self._unknown = self._passed_on = 0

    def open(self, request_id: str, turn: ReportTaker) -> None:
        same = self._open.get(request_id)
        if same is None:
            self._open[request_id] = _SameId([turn])
            return
        same.shared |= {"", *(other.turn_id for other in same.turns if other.turn_id == turn.turn_id)}
        same.turns.append(turn)

    def close(self, request_id: str, turn: ReportTaker) -> None:
        """May be called again."""
        same = self._open.get(request_id)
        if same is not None and turn in same.turns:
            same.turns.remove(turn)
            if not same.turns:
                del self._open[request_id]

    def comes_from(self, worker: WorkerId) -> bool:
        """Whether this worker's sidecar reports: it has before."""
        return worker in self._known

    def missed(self, request_id: str, turn_id: str, worker: WorkerId) -> None:
        """The turn is over, and none has come."""
        self._ended[request_id] = turn_id, worker
        if len(self._ended) > LATE_LIMIT:
            self._ended.popitem(last=False)

    def taken(self, report: TurnReport) -> None:
        """It has come here. One sidecar's reports all come to one process, whichever has decided the turn."""
        if self._taken_here(report):
            return
        if self._elsewhere is None:
            self._unknown += 1
        else:
            self._passed_on += 1
            self._elsewhere(report.encode())

    def told(self, encoded: bytes) -> None:
        """By another process, which asks them all."""
        self._taken_here(decode(encoded))

    def _taken_here(self, report: TurnReport) -> bool:
        same, turn_id = self._open.get(report.request_id), report.turn_id
        if same is not None and turn_id in same.shared:
            self._unknown += 1
            return True
        turns = () if same is None else same.turns
        turn = next((one for one in turns if turn_id in ("", one.turn_id)), None)
        worker = self._late_of(report) if turn is None else turn.worker
        if worker is None:
            return False
        self._known.pop(worker, None)
        self._known[worker] = None
        if len(self._known) > KNOWN_LIMIT:
            del self._known[next(iter(self._known))]
        if turn is None:  # what the turn took is an estimate already; the worker's next one is waited for
            self._late += 1
            return True
        self._taken += 1
        turn.reported(report)
        return True

    def _late_of(self, report: TurnReport) -> WorkerId | None:
        """The worker of a turn that has ended without it."""
        turn_id, worker = self._ended.get(report.request_id, ("", None))
        if worker is None or report.turn_id not in ("", turn_id):
            return None
        del self._ended[report.request_id]
        return worker

    def gauges(self) -> tuple[Metric, ...]:
        counter = CounterMetricFamily("ppd_turn_reports", "Reports by sidecars", labels=("result",))
        counter.add_metric(("taken",), self._taken)
        counter.add_metric(("late",), self._late)
        counter.add_metric(("unknown",), self._unknown)
        counter.add_metric(("passed_on",), self._passed_on)
        return (counter,)
