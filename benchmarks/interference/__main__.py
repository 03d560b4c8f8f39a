"""What a prefill costs the sequences that decode beside it, and what one engine step costs.

    python -m benchmarks.interference --url http://HOST:8000 --model NAME --out DIR
    python -m benchmarks.interference --records DIR/interference.jsonl.gz --out DIR
    python -m benchmarks.interference --published interference.csv.gz --out DIR
    python -m benchmarks.interference --torch --out DIR

`--url` measures a decode batch alone, beside full prefills and beside appends. The endpoint needs prefix caching, and
must report cached tokens (vLLM's --enable-prompt-tokens-details). The records are written first, then figures and a
table from them; `--records` writes only the latter. `--published` draws the published rows with the same code.
`--torch` needs PyTorch and measures the steps of a network with a model's shapes, without an engine around it. It
writes records, a table of the fit, and an engine profile for the simulator. `slowdowns.py` and
`engine_step/measure.py` explain what is measured, and why.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ppd.offline.experiment.files import write_whole
from ppd.offline.load.client import open_session
from ppd.offline.load.target import Target
from ppd.proxy.errors import ConfigError, PPDError

from . import published, records
from .engine_step import commands as engine_step
from .figures import draw
from .measuring import TrialBench
from .records import Experiment, TrialHead, TrialResult
from .slowdowns import SlowdownPoint, gather, measure
from .table import markdown
from .trials import Setting, plan

_RECORDS = "interference.jsonl.gz"
_DEFAULT = Setting()
_LISTS = {
    "batch_sizes": "sequences in the decode batch",
    "prefills": "prefills at once",
    "contexts": "context of the decode batch, for `context`",
    "append_sizes": "new tokens, for `append`",
}
_NUMBERS = {
    "repeats": "of each trial",
    "decode_context_tokens": "cached before a decoding sequence begins",
    "decode_new_tokens": "that it adds to them",
    "output_tokens": "that it generates",
    "new_tokens": "of a prefill",
    "cached_tokens": "before an append",
    "sensitivity_batch": "decode batch for `context` and `append`",
    "token_id_limit": "prompts are ids below this",
    "seed": "of the prompts",
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.interference",
        description="Interference of prefills with decoding, and the cost of engine steps.",
        allow_abbrev=False,
    )
    source = top.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="an endpoint with OpenAI's API, without /v1")
    source.add_argument("--records", type=Path, help="records of an earlier run: draw them again")
    source.add_argument("--published", type=Path, help="the published interference.csv.gz")
    source.add_argument("--torch", action="store_true", help="measure engine steps with PyTorch")
    top.add_argument(
        "--out", "--output", dest="output", type=Path, required=True, help="folder for records, figures and tables"
    )
    endpoint = top.add_argument_group("with --url")
    endpoint.add_argument("--model", default="", help="the name that the endpoint serves")
    endpoint.add_argument("--api-key-file", type=Path, help="the endpoint's key; else PPD_CLIENT_KEY is sent")
    endpoint.add_argument("--timeout-s", type=float, default=600.0, help="of an answer")
    endpoint.add_argument("--note", default="", help="what the endpoint is (engine, GPU): kept with the records")
    names = ", ".join(Experiment)
    given: dict[str, Any] = {"nargs": "+", "type": Experiment, "default": _DEFAULT.experiments, "metavar": "NAME"}
    endpoint.add_argument("--experiments", help=f"any of {names}; default: batch", **given)
    for name, meaning in _LISTS.items():
        default = getattr(_DEFAULT, name)
        endpoint.add_argument(
            _flag(name), nargs="+", type=int, default=default, metavar="N", help=_usual(meaning, *default)
        )
    for name, meaning in _NUMBERS.items():
        number = getattr(_DEFAULT, name)
        endpoint.add_argument(_flag(name), type=int, default=number, metavar="N", help=_usual(meaning, number))
    endpoint.add_argument("--shared-context", action="store_true", help="one context for all, as published")
    engine_step.add_arguments(top.add_argument_group("with --torch"))
    return top


def _usual(meaning: str, *defaults: int) -> str:
    return f"{meaning}; default: {' '.join(map(str, defaults))}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def setting_of(args: argparse.Namespace) -> Setting:
    given: dict[str, Any] = {name: tuple(getattr(args, name)) for name in ("experiments", *_LISTS)}
    return Setting(**given, **{name: getattr(args, name) for name in (*_NUMBERS, "shared_context")})


def _api_key(file: Path | None) -> str:
    """Never from the command line, which other users can read."""
    if file is None:
        return os.environ.get("PPD_CLIENT_KEY", "")
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"api_key_file = {str(file)!r}: must be a readable file", param="api_key_file") from exc


async def measure_endpoint(args: argparse.Namespace, setting: Setting) -> None:
    """Runs every trial of the plan. The finished ones are saved even if a later one fails or is interrupted."""
    trials = plan(setting)
    target = Target(url=args.url, model=args.model, api_key=_api_key(args.api_key_file), timeout_s=args.timeout_s)
    head = TrialHead(
        model=args.model,
        note=args.note,
        output_tokens=setting.output_tokens,
        shared_context=setting.shared_context,
        seed=setting.seed,
        nonce=secrets.token_hex(8),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    results: list[TrialResult] = []

    def progress(index: int, result: TrialResult) -> None:
        trial, problem = result.trial, measure(result, setting.output_tokens).problem
        place = f"{trial.experiment} {trial.at}, batch {trial.batch}, {trial.prefills} {trial.kind}"
        print(f"{index + 1}/{len(trials)} {place}{': ' + problem if problem else ''}", file=sys.stderr, flush=True)

    try:
        async with open_session(target) as session:
            await TrialBench(session, target, setting, head.nonce).run(trials, results, progress)
    finally:
        if results:
            records.save(args.output / _RECORDS, head, results)


def report_records(path: Path, output: Path) -> None:
    head, results = records.load(path)
    points = gather(measure(result, head.output_tokens) for result in results)
    shared = "one context for all sequences" if head.shared_context else "a context of its own for each sequence"
    about = f"{head.model}, {shared}, {head.output_tokens} tokens an answer, measured {head.started}."
    report(points, f"Interference: {head.note or head.model}", [about], output, "interference")


def report(points: Sequence[SlowdownPoint], title: str, notes: Sequence[str], output: Path, stem: str) -> None:
    for experiment in Experiment:
        if image := draw(points, experiment, title):
            write_whole(output / f"{stem}-{experiment}.png", image)
    write_whole(output / f"{stem}.md", markdown(points, title, notes).encode())
    print(f"{output / stem}.md")


def run(args: argparse.Namespace) -> None:
    if args.torch:
        engine_step.run(args)
    elif args.published:
        title = "Interference: published rows, one H100, Llama-3.1-8B"
        report(gather(published.load(args.published)), title, [published.NOTE], args.output, "published")
    else:
        if args.url:
            asyncio.run(measure_endpoint(args, setting_of(args)))
        report_records(args.records or args.output / _RECORDS, args.output)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    try:
        run(args)
    except PPDError as exc:
        raise SystemExit(f"error: {exc.message}") from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
