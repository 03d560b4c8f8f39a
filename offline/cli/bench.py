"""`ppd bench`: one workload against any OpenAI-compatible endpoint, with a table of results and the records."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ppd.proxy.cli import NumberRange
from ppd.proxy.errors import ConfigError, PPDError

from ..bench.results import BenchResult, save
from ..bench.run import Bench, play, prepared
from ..bench.summary import NOTE, reasons, results_table
from ..bench.workloads import ConversationShape, Pace, with_pauses_of
from ..experiment.files import check_writable
from ..experiment.records import Origin, Record, in_order
from ..load.player import Progress
from ..load.target import Api, Target
from ..traces.formats import read
from ..traces.turns import TracedConversation

USUAL_CONVERSATIONS = 100
INTERRUPTED = 130  # what a shell reports after Ctrl-C
_REFRESH_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The flags as given; None for one that was not."""

    url: str
    model: str | None
    endpoint: str | None
    plain: bool
    api_key: str = field(repr=False)
    session_header: str
    tokenizer: Path | None
    connections: int | None
    timeout_s: float
    first: tuple[int, int]
    later: tuple[int, int]
    turns: int
    think_s: float
    shared_prefix: int
    image_every: int
    conversations: Path | None
    trace: Path | None
    output_tokens: int | None
    qps: float | None
    speed: float
    concurrency: int | None
    max_conversations: int | None
    max_seconds: float | None
    max_think_s: float | None
    max_context: int | None
    seed: int
    output: Path | None

    def __post_init__(self) -> None:
        if self.conversations is not None and self.trace is not None:
            raise ConfigError("conversations, trace: give one of them")
        if self.qps is not None and self.concurrency is not None:
            raise ConfigError("qps, concurrency: give one of them, for an open or a closed loop")
        if self.file is None and self.qps is None and self.concurrency is None:
            raise ConfigError("qps, concurrency: one of them is needed for a synthetic workload")

        if self.plain and self.endpoint == Api.COMPLETIONS:
            raise ConfigError("plain: goes with the chat endpoint only, as OpenAI's takes text")

    @property
    def api(self) -> Api | None:
        return Api.CHAT if self.plain else None if self.endpoint is None else Api(self.endpoint)

    @property
    def file(self) -> Path | None:
        return self.trace or self.conversations

    def workload(self) -> tuple[str, list[TracedConversation]]:
        if self.file is not None:
            conversations = read(self.file)[: self.max_conversations]
            if self.max_think_s is not None:
                conversations = with_pauses_of(conversations, self.max_think_s)
            return self.file.name, conversations
        shape = ConversationShape(
            first=self.first,
            later=self.later,
            turns=self.turns,
            think_s=self.think_s,
            shared_prefix_tokens=self.shared_prefix,
            image_every=self.image_every,
        )
        return str(shape), shape.conversations(self.max_conversations or USUAL_CONVERSATIONS)

    def bench(self, conversations: list[TracedConversation]) -> Bench:
        target = Target(
            url=self.url.rstrip("/").removesuffix("/v1"),
            model=self.model or "",
            api_key=self.api_key,
            plain=self.plain,
            timeout_s=self.timeout_s,
            tokenizer=self.tokenizer,
            session_header=self.session_header,
            name_prefix="bench",
            connections=self.connections,
        )
        return Bench(
            target=target,
            api=self.api,
            conversations=conversations,
            recorded=self.file is not None,
            pace=Pace(qps=self.qps, speed=self.speed, concurrency=self.concurrency),
            seed=self.seed,
            until_s=math.inf if self.max_seconds is None else self.max_seconds,
            most_context=self.max_context,
            output_tokens=None if self.file is None else self.output_tokens,
        )


DIGITS = 9


def _tokens(_: click.Context, __: click.Parameter, text: str) -> tuple[int, int]:
    new, _colon, answer = text.partition(":")
    if not all(count.isdecimal() and len(count) <= DIGITS and int(count) for count in (new, answer)):
        raise click.BadParameter(f"{text!r}: must be two counts of tokens such as 128:64")
    return int(new), int(answer)


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_POSITIVE = NumberRange(min=0, min_open=True)
_SECONDS = NumberRange(min=0)
_COUNT = click.IntRange(min=1)
_ENDPOINTS = click.Choice([api.value for api in Api])
_HOW = "chat sends text; completions sends token ids, in exact numbers.  [default: chat for text, else completions]"

_PLAIN = "Chat for any server: without vLLM's min_tokens and ignore_eos, so answers may be shorter than asked for."
_IMAGES = "Requests, of which the last has an image; all are chat, so --later must have room for its template."


@click.command("bench")
@click.option("--url", required=True, help="Of the endpoint: the proxy's or any server's, without /v1.")
@click.option("--model", help="Default: the only one that the endpoint serves.")
@click.option("--endpoint", type=_ENDPOINTS, help=_HOW)
@click.option("--plain", is_flag=True, help=_PLAIN)
@click.option("--api-key", envvar="PPD_CLIENT_KEY", default="", help="A client's API key; default: PPD_CLIENT_KEY.")
@click.option("--session-header", default="", help="Header that names the conversation, such as X-Session-ID.")
@click.option("--tokenizer", type=_FOLDER, help="Of the model, for endpoints without /tokenize.")
@click.option("--connections", type=_COUNT, help="At most so many at once; requests then wait in the client.")
@click.option("--timeout", "timeout_s", type=_POSITIVE, default=600.0, show_default=True, help="Seconds for an answer.")
@click.option("--first", callback=_tokens, default="128:128", show_default=True, help="IN:OUT tokens of first turns.")
@click.option("--later", callback=_tokens, default="16:32", show_default=True, help="IN:OUT tokens of later turns.")
@click.option("--turns", type=_COUNT, default=2, show_default=True)
@click.option("--think", "think_s", type=_SECONDS, default=0.0, show_default=True, help="Pause, in s.")
@click.option("--shared-prefix", type=click.IntRange(min=0), default=0, help="Tokens that all first turns begin with.")
@click.option("--image-every", type=click.IntRange(min=0), default=0, help=_IMAGES)
@click.option("--conversations", type=_FILE, help="Play a file of conversations instead: messages or ShareGPT.")
@click.option("--trace", type=_FILE, help="Play a trace instead, at its own times unless told otherwise.")
@click.option("--output-tokens", type=_COUNT, help="Of every answer to a file's turn, in place of those recorded.")
@click.option("--qps", type=_POSITIVE, help="Open loop: conversations a second, Poisson.")
@click.option("--speed", type=_POSITIVE, default=1.0, show_default=True, help="Of recorded arrivals and pauses.")
@click.option("--concurrency", type=_COUNT, help="Closed loop: conversations at a time.")
@click.option("--max-conversations", type=_COUNT, help="[default: 100, or all of a file]")
@click.option("--max-seconds", type=_POSITIVE, help="No turn that is due later is sent.")
@click.option("--max-think", "max_think_s", type=_SECONDS, help="Longest pause of a file, in s.")
@click.option("--max-context", type=_COUNT, help="Tokens; a file's turns above are left out.  [default: the model's]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--out", "--output", "output", type=click.Path(dir_okay=False, path_type=Path), help="Records, as .jsonl.gz."
)
def command(**flags: Any) -> None:
    """Measure one workload against an endpoint.

    Synthetic conversations, or those of a file: messages, ShareGPT, Mooncake, Qwen-Bailian, WEKA, TraceLab, Azure,
    BurstGPT, aiperf. Ends with 1 if every request failed.
    """
    try:
        result = _run(Options(**flags))
    except PPDError as exc:
        raise click.ClickException(exc.message) from exc
    if result.interrupted:
        raise SystemExit(INTERRUPTED)
    if all(record.error for record in result.records):
        raise SystemExit(1)


def _run(options: Options) -> BenchResult:
    # After Ctrl-C it shows and saves what was measured until then.
    name, conversations = options.workload()
    if options.output is not None:
        check_writable(options.output)
    records, interrupted, notes = list[Record](), False, Console(stderr=True)
    note = partial(_note, notes)
    bench = asyncio.run(prepared(options.bench(conversations), note))
    started, began_s = datetime.now(UTC), time.perf_counter()
    with _shown(notes) as progress:
        try:
            asyncio.run(play(bench, records.append, progress, note))
        except KeyboardInterrupt:
            interrupted = True
    if not records:
        raise ConfigError("nothing was sent: no turn was due in time")
    result = BenchResult(
        workload=name,
        pace=str(bench.pace),
        api=f"{bench.target.api}{', plain' if bench.target.plain else ''}",
        seed=bench.seed,
        origin=Origin(backend="target", engine="", model=bench.target.model),
        started=started.isoformat(timespec="seconds"),
        wall_s=time.perf_counter() - began_s,
        records=in_order(records),
        interrupted=interrupted,
    )
    _show(result)
    if options.output is not None:
        save(options.output, result)
        note(f"records: {options.output}")
    return result


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A progress line, drawn at most four times a second and without a thread of its own."""
    form = "{task.completed}/{task.total} requests, {task.fields[waiting]} in flight, {task.fields[failed]} failed"
    drawn_s = -math.inf
    with Bar(
        BarColumn(), TextColumn(form), TimeElapsedColumn(), console=console, transient=True, auto_refresh=False
    ) as bar:
        task = bar.add_task("", total=None, waiting=0, failed=0)

        def show(progress: Progress) -> None:
            nonlocal drawn_s
            if progress.at_s - drawn_s < _REFRESH_S:
                return
            drawn_s = progress.at_s
            waiting, failed = progress.in_flight, progress.failed
            bar.update(task, total=progress.requests, completed=progress.done, waiting=waiting, failed=failed)
            bar.refresh()

        yield show


def _note(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)


def _show(result: BenchResult) -> None:
    console = Console()
    head = f"{result.workload}; {result.pace}; {result.origin.model} by {result.api}"
    _note(console, head + ("; interrupted" if result.interrupted else ""))
    console.print(results_table(result.records))
    console.print(NOTE, style="dim", highlight=False)
    for reason in reasons(result.records):
        _note(console, f"failed: {reason}")
