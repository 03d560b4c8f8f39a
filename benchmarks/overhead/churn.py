"""Opens and closes streams for as long as asked, and looks at what the proxy keeps: memory, open files, turns."""

from __future__ import annotations

import http.client
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ppd.offline.experiment.statistics import Slope, slope

from .backend import LoadGenerator, TrialError, exchange, finished, running_backend
from .bodies import ChatShape
from .records import LoadResult
from .rows import LoadMode, Row
from .subjects import PPD, FleetKind, Subject
from .trials import MeasuredEndpoint, OverheadBench, opened
from .usage import open_files

# Tables that are full within the first minute, so that filling them is not taken for growth.
PPD_ARGS = ("--session-limit", "2000", "--receipts-kept", "1000")
_BURN_IN = 0.2  # of the samples
_LOG_LINES_SHOWN = 5
# What is 0 where nothing has failed, and where nothing is under way.
_TELLING = re.compile(
    r"ppd_(refused|rejected_requests|leg_failures|connections_refused|bodies_refused|receipts_lost|log_lines_lost)_total"
    r"|ppd_(inflight|queued)_\w+|ppd_(handoffs_outstanding|body_memory_bytes|bodies_waiting|breakers_open)"
)

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
    """Counts are of all rounds so far. faults: by row and by what came in place of a right answer, such as `503`."""

    at_s: float
    rss_kib: int
    open_files: int
    requests: int
    faults: Mapping[tuple[str, str], int]
    told: Sequence[str] = ()  # by PPD itself, of what failed and of what it still holds


def churn(subject: Subject, minutes: float, bench: OverheadBench) -> Iterator[ChurnSample]:
    """One sample after each round of a few seconds, when no stream is open."""
    requests, faults = 0, Counter[tuple[str, str]]()
    with running_backend(bench.tools, bench.cores.mock, bench.folder) as backend:
        with opened(subject, FleetKind.PLAIN, backend, bench) as endpoint:
            clients = LoadGenerator(bench.tools, bench.cores, bench.folder)
            begun_s = time.monotonic()  # not before: all may take longer to start than is asked for
            while time.monotonic() < begun_s + 60 * minutes:
                for row in _ROUND:
                    load = _asked(row, endpoint, clients)
                    requests += load.asked
                    faults.update({(row.name, what): count for what, count in load.faults.items()})
                backend.wait_quiet()
                yield _sample(endpoint, time.monotonic() - begun_s, requests, dict(faults))


def _asked(row: Row, endpoint: MeasuredEndpoint, clients: LoadGenerator) -> LoadResult:
    with clients.asking(row, endpoint.port, clients.new_conversations(), 1.0) as program:
        return finished(program)


def _sample(
    endpoint: MeasuredEndpoint, at_s: float, requests: int, faults: Mapping[tuple[str, str], int]
) -> ChurnSample:
    now, pid, log = endpoint.usage(), endpoint.pid, endpoint.log
    assert now is not None and pid is not None and log is not None, "a proxy is measured, not a direct connection"
    told: Sequence[str] = ()
    if endpoint.subject == PPD:
        try:
            metrics = exchange(endpoint.port, "GET", "/metrics")[1].decode()
        except (OSError, http.client.HTTPException) as exc:
            raise TrialError(f"{PPD} does not tell its metrics: {exc}") from exc
        told = telling(metrics, log.read_text(errors="replace"))
    return ChurnSample(at_s, now.rss_kib, open_files(pid), requests, faults, told)


def telling(metrics: str, log: str) -> list[str]:
    """What of its own metrics tells of failures or of turns that it still holds, and what it found worth a warning."""
    samples = (line.rpartition(" ") for line in metrics.splitlines())
    found = [f"{name} {value}" for name, _, value in samples if _TELLING.match(name) and float(value)]
    lines = log.splitlines()
    found += [f"log: {line}" for line in lines[:_LOG_LINES_SHOWN]]
    return [*found, f"log: {len(lines):,} lines in all"] if len(lines) > _LOG_LINES_SHOWN else found


def growth(samples: list[ChurnSample], value: Callable[[ChurnSample], float]) -> Slope | None:
    """Per minute, after the burn-in; None for too few samples."""
    steady = samples[int(len(samples) * _BURN_IN) :]
    return slope([sample.at_s / 60 for sample in steady], [value(sample) for sample in steady])


def shown(sample: ChurnSample) -> str:
    """One line."""
    size = f"{sample.rss_kib / 1024:8.1f} MiB {sample.open_files:6,} files {sample.requests:11,} requests"
    faults = "; ".join(f"{row}: {what} x {count:,}" for (row, what), count in sample.faults.items())
    return f"{sample.at_s / 60:7.1f} min  {size}  {sum(sample.faults.values()):,} faults{faults and f' ({faults})'}"


def verdict(samples: list[ChurnSample]) -> str:
    memory = growth(samples, lambda sample: sample.rss_kib)
    files = growth(samples, lambda sample: sample.open_files)
    lines = ["too few samples for a slope: let it run for longer"]
    if memory is not None and files is not None:
        lines = [
            f"RSS grows by {memory.value:+.1f} KiB a minute (95 %: {memory.low:+.1f} to {memory.high:+.1f})",
            f"open files grow by {files.value:+.2f} a minute (95 %: {files.low:+.2f} to {files.high:+.2f})",
        ]
    return "\n".join([*lines, *(samples[-1].told if samples else ())])
