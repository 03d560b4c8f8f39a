"""Opens and closes streams for as long as asked, and samples the proxy's memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ppd.offline.experiment.statistics import Slope, slope

from .backend import LoadGenerator, finished, running_backend
from .bodies import ChatShape
from .rows import LoadMode, Row
from .subjects import FleetKind, Subject
from .trials import OverheadBench, opened

# Tables that are full within the first minute, so that filling them is not taken for growth.
PPD_ARGS = ("--session-limit", "2000", "--receipts-kept", "1000")
_BURN_IN = 0.2  # of the samples

_SHORT = ChatShape(turns=3, words=20, streams=True, every_us=10_000)
_ROUND = (
    Row(name="connections that come and go", load=LoadMode.ONCE, connections=400, conversation=_SHORT, ramp_ms=1000),
    Row(name="streams that clients leave", connections=200, conversation=replace(_SHORT, words=500), ramp_ms=500),
    Row(name="whole answers", connections=32, fresh=True),
    Row(name="long prompts", connections=16, fresh=True, conversation=ChatShape(turns=1, opening_bytes=130_000)),
    Row(name="longer prompts", connections=4, fresh=True, conversation=ChatShape(turns=1, opening_bytes=600_000)),
)


@dataclass(frozen=True, slots=True)
class ChurnSample:
    at_s: float
    rss_kib: int
    requests: int  # so far
    faults: int


def churn(subject: Subject, minutes: float, bench: OverheadBench) -> Iterator[ChurnSample]:
    """One sample after each round of a few seconds, when no stream is open."""
    begun_s, requests, faults = time.monotonic(), 0, 0
    with running_backend(bench.tools, bench.cores.mock, bench.folder) as backend:
        with opened(subject, FleetKind.PLAIN, backend, bench) as endpoint:
            clients = LoadGenerator(bench.tools, bench.cores, bench.folder)
            while time.monotonic() < begun_s + 60 * minutes:
                for row in _ROUND:
                    with clients.asking(row, endpoint.port, clients.new_conversations(), 1.0) as program:
                        load = finished(program)
                    requests += load.asked
                    faults += load.refused + load.broken + load.refusals + load.wrong
                backend.wait_quiet()
                now = endpoint.usage()
                assert now is not None, "a proxy is measured, not a direct connection"
                yield ChurnSample(time.monotonic() - begun_s, now.rss_kib, requests, faults)


def growth(samples: list[ChurnSample]) -> Slope | None:
    """In KiB per minute, after the burn-in; None for too few samples."""
    steady = samples[int(len(samples) * _BURN_IN) :]
    return slope([sample.at_s / 60 for sample in steady], [float(sample.rss_kib) for sample in steady])


def verdict(samples: list[ChurnSample]) -> str:
    found = growth(samples)
    if found is None:
        return "too few samples for a slope: let it run for longer"
    return f"RSS grows by {found.value:+.1f} KiB a minute (95 %: {found.low:+.1f} to {found.high:+.1f})"
