"""Tells the picker how turns went. Sending never waits, and a picker that is away costs nothing but what it misses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq
from prometheus_client.core import CounterMetricFamily, Metric

from ppd.proxy.config import is_ipv6
from ppd.proxy.discovery.heartbeat import MESSAGE_LIMIT_BYTES
from ppd.proxy.discovery.turn_report import LEGS_LIMIT, LONGEST_NAME, FailedLeg, TurnReport
from ppd.proxy.encoders.answers import LABEL
from ppd.proxy.failures import Leg
from ppd.proxy.telemetry.receipts import Receipt

log = logging.getLogger(__name__)

HELD_REPORTS = 1000  # for a picker that is away; it gets the oldest of them when it is back
COMPLAIN_EVERY_S = 60.0
LINGER_MS = 500  # at the end, for the last reports


class Reporter:
    """A DEALER socket to the picker's heartbeat port."""

    def __init__(
        self,
        picker: str,
        curve: tuple[bytes, bytes, bytes] | None = None,
        *,
        held: int = HELD_REPORTS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """picker: host:port; curve: this sidecar's public and secret key, and the picker's public one."""
        self.lost = 0  # reports, ever
        self._picker = picker
        self._now = now
        self._complained_s, self._complained_of = now() - COMPLAIN_EVERY_S, 0
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IPV6, is_ipv6(picker))
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, 1)  # a picker sends nothing, and nobody would read it
        self._socket.setsockopt(zmq.SNDHWM, held)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        if curve is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey, self._socket.curve_serverkey = curve
        self._socket.connect(f"tcp://{picker}")

    def send(self, report: TurnReport) -> None:
        try:
            self._socket.send(report.encode(), zmq.NOBLOCK)
        except zmq.ZMQError:  # there is no room, or the socket is closed
            self._note_loss()

    def counter(self) -> Metric:
        lost = CounterMetricFamily("ppd_reports_lost", "Turn reports that the picker did not take in time")
        lost.add_metric((), self.lost)
        return lost

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)

    def _note_loss(self) -> None:
        self.lost += 1
        if self._now() - self._complained_s >= COMPLAIN_EVERY_S:
            log.warning("picker %s takes no reports: %d are lost", self._picker, self.lost - self._complained_of)
            self._complained_s, self._complained_of = self._now(), self.lost


def report_of(
    receipt: Receipt,
    *,
    last_token_s: float | None = None,
    prefill_cached_tokens: int | None = None,
    decode_cached_tokens: int | None = None,
) -> TurnReport:
    """Of a receipt that is closed."""
    failed = list[FailedLeg]()
    for asked in () if receipt.encoder is None else receipt.encoder.legs:
        if asked.error is not None:
            phase, _, cause = asked.error.partition(": ")
            failed.append(FailedLeg(LABEL, asked.address, phase, cause))
    failed += (
        FailedLeg(leg.kind, leg.address, leg.phase or "", leg.error) for leg in receipt.legs if leg.error is not None
    )
    return TurnReport(
        request_id=receipt.id,
        route=receipt.route,
        prefill=next((leg.address for leg in reversed(receipt.legs) if leg.kind is Leg.PREFILL), ""),
        outcome=receipt.outcome,
        status=receipt.status,
        failure=(receipt.error or "")[:LONGEST_NAME],
        failed_legs=failed[-LEGS_LIMIT:],
        prompt_tokens=receipt.prompt_tokens,
        completion_tokens=receipt.completion_tokens,
        prefill_cached_tokens=prefill_cached_tokens,
        decode_cached_tokens=decode_cached_tokens,
        first_token_s=receipt.ttft_s,
        last_token_s=last_token_s,
        ended_s=receipt.ended_s or 0.0,
    )
