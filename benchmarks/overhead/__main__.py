"""What a proxy costs: PPD beside other routers that speak vLLM's protocol, and beside no proxy at all.

    python -m benchmarks.overhead install               # the peers' newest releases
    python -m benchmarks.overhead run                   # everything, three times: about ten minutes
    python -m benchmarks.overhead run --rows c=16 --subjects ppd --repetitions 1
    python -m benchmarks.overhead run --subjects direct,ppd,vllm-router:cache_aware   # a peer that knows sessions
    python -m benchmarks.overhead run --subjects ppd --before ../older/.venv/bin/ppd   # slower than another build?
    python -m benchmarks.overhead scale --processes 2   # what does a second process add?
    python -m benchmarks.overhead churn --minutes 60    # is PPD's memory stable? is anything lost?

The proxy has one core. The mock backend and the load generator are written in C and have the other cores; the column
of the direct connection shows that they are not the limit. Subjects take turns, and each is restarted in every
repetition. Every answer is checked: its status, its end, its length, and that it belongs to its conversation. PPD runs
with its defaults, so with sessions, receipts, metrics and decisions: timed requests are follow-up turns of known
conversations, or first turns in the rows "P then D". Needs Linux and a C compiler; all traffic is on loopback.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path

import click

from ppd.offline.experiment.files import write_whole
from ppd.proxy.errors import PPDError

from . import churn as churning
from . import peers, scaling
from .native import build, cache_folder
from .peers import PEERS
from .processes import assign_cores, raise_descriptor_limit
from .records import OverheadRun, RowRecord, encode, this_machine
from .report import markdown
from .rows import ROWS, Row
from .subjects import DIRECT, PPD, SUBJECTS, Subject, earlier, subject
from .trials import OverheadBench, measure, select

RESULTS = Path(__file__).parents[1] / "results"


@contextmanager
def running_bench(seconds: float) -> Iterator[OverheadBench]:
    """Builds the tools and owns the folder of logs, which is deleted at the end. SIGTERM acts as Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise_descriptor_limit()
    tools, cores = build(cache_folder()), assign_cores(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="ppd-overhead-") as folder:
        yield OverheadBench(tools=tools, cores=cores, folder=Path(folder), seconds=seconds, progress=_say)


def versions(names: Collection[str]) -> dict[str, str]:
    found = {PPD: metadata.version("ppd-router")} if PPD in names else {}
    for name in PEERS:
        if any(one.partition(":")[0] == name for one in names):
            try:
                found[name] = peers.version(cache_folder(), name)
            except PPDError:
                found[name] = "not installed"
    return found


def trials(
    chosen: Sequence[Subject | None], rows: Sequence[Row], repetitions: int, bench: OverheadBench
) -> Iterator[RowRecord]:
    for repetition in range(repetitions):
        for one in chosen:
            yield from measure(one, rows, bench, repetition)


def save(run: OverheadRun, out: Path, table: str) -> None:
    write_whole(out, encode(run))
    write_whole(out.with_suffix(".md"), table.encode())


@contextmanager
def one_line_errors() -> Iterator[None]:
    try:
        yield
    except PPDError as exc:
        raise click.ClickException(exc.message) from exc


_ppd_args = click.option("--ppd-args", default="", help='more flags of `ppd serve`, e.g. "--data-plane asgi"')


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """What a proxy costs, beside other routers and beside none."""


@main.command()
@click.argument("names", nargs=-1, type=click.Choice(PEERS))
def install(names: tuple[str, ...]) -> None:
    """Install the newest release of the peers, all of them or those named, from PyPI."""
    failed = False
    for name in names or PEERS:
        try:
            print(f"{name} {peers.install(cache_folder(), name)}")
        except PPDError as exc:
            failed = True
            _say(f"error: {exc.message}")
    raise SystemExit(failed)


@main.command()
@click.option("--subjects", default=",".join(SUBJECTS), show_default=True, help="which, with commas between")
@click.option("--rows", default="", help=f"with commas between, any of: {', '.join(row.name for row in ROWS)}")
@click.option("--repetitions", type=click.IntRange(1), default=3, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.1), default=2.0, show_default=True, help="of a row")
@_ppd_args
@click.option(
    "--before", type=click.Path(path_type=Path), help="the command ppd of another environment: a build to compare with"
)
@click.option("--out", type=click.Path(path_type=Path), help="default: results/proxy_overhead-DATE.json, .md beside it")
def run(
    subjects: str,
    rows: str,
    repetitions: int,
    seconds: float,
    ppd_args: str,
    before: Path | None,
    out: Path | None,
) -> None:
    """Measure, print the table, and save it with its records."""
    names = listed(subjects, SUBJECTS, "subjects")
    wanted = select(listed(rows, [row.name for row in ROWS], "rows"))
    more = tuple(shlex.split(ppd_args))
    subject_of = partial(subject, cache=cache_folder(), ppd_args=more)
    chosen = [None if name == DIRECT else subject_of(name) for name in SUBJECTS if name in names]
    started_s, date = time.monotonic(), datetime.now(UTC).date().isoformat()
    with one_line_errors(), running_bench(seconds) as bench:
        chosen += [earlier(before, more)] if before else []
        records = tuple(trials(chosen, wanted, repetitions, bench))
    found = OverheadRun(
        date=date,
        seconds=seconds,
        repetitions=repetitions,
        machine=this_machine(),
        versions=versions(names),
        ppd_args=more,
        took_s=round(time.monotonic() - started_s, 1),
        records=records,
    )
    table = markdown(found)
    save(found, out or RESULTS / f"proxy_overhead-{date}.json", table)
    print(table)


@main.command()
@click.option("--minutes", type=click.FloatRange(0.1), default=60.0, show_default=True)
@click.option("--subject", "name", type=click.Choice([PPD, *PEERS]), default=PPD, show_default=True)
@_ppd_args
def churn(minutes: float, name: str, ppd_args: str) -> None:
    """Open and close streams; print how the proxy's memory grows, what failed, and what it still holds."""
    one = subject(name, cache_folder(), (*churning.PPD_ARGS, *shlex.split(ppd_args)))
    samples = []
    with one_line_errors(), running_bench(1.0) as bench:
        for sample in churning.churn(one, minutes, bench):
            samples.append(sample)
            print(churning.shown(sample), flush=True)
    print(churning.verdict(samples))


@main.command()
@click.option("--processes", type=click.IntRange(2), default=2, show_default=True)
@click.option("--repetitions", type=click.IntRange(1), default=5, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.1), default=3.0, show_default=True, help="of a trial")
@_ppd_args
@click.option("--out", type=click.Path(path_type=Path), help="default: results/proxy_scaling-DATE.json, .md beside it")
def scale(processes: int, repetitions: int, seconds: float, ppd_args: str, out: Path | None) -> None:
    """Measure one proxy of several processes beside as many separate proxies; print and save the comparison."""
    cores = len(os.sched_getaffinity(0))
    if processes > cores:
        raise click.UsageError(f"--processes: {processes} need a core each, this machine has {cores}")
    more = tuple(shlex.split(ppd_args))
    started_s, date = time.monotonic(), datetime.now(UTC).date().isoformat()
    with one_line_errors(), running_bench(seconds) as bench:
        records = tuple(scaling.measure(processes, repetitions, more, bench))
    found = OverheadRun(
        date=date,
        seconds=seconds,
        repetitions=repetitions,
        machine=this_machine(),
        versions=versions((PPD,)),
        ppd_args=more,
        took_s=round(time.monotonic() - started_s, 1),
        records=records,
    )
    table = scaling.markdown(found, processes)
    save(found, out or RESULTS / f"proxy_scaling-{date}.json", table)
    print(table)


def listed(text: str, known: Sequence[str], option: str) -> tuple[str, ...]:
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"--{option}: no {', '.join(unknown)}; known are {', '.join(known)}")
    return names


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
