"""`ppd advise`: the fleet and the mode that serve a receipt log's traffic best."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from ppd.proxy.cli import NumberRange
from ppd.proxy.cli.table_view import columns, show
from ppd.proxy.errors import PPDError

from ..advice.advise import Advice, Plan, advise, modes_of
from ..advice.contenders import Setting, workers_for
from ..advice.interval import Interval, rounded
from ..advice.processes import TryingProcesses
from ..advice.search import Standing
from ..advice.traffic import traffic_of
from ..advice.trying import Conditions, Figures
from ..goodput.highest_rate import LEAST_RPS, MOST_RPS
from ..goodput.modes import SIMULATED
from ..replay.past_turns import PastLog
from ..simulation.setup import MOST_WORKERS
from .receipt_log import opened
from .slo_flags import SloFlags, slo_flags, target_text

INTERRUPTED = 130  # what a shell reports after Ctrl-C
RATES = NumberRange(LEAST_RPS, MOST_RPS)
OTHERS = 6  # that were tried coarsely, are shown


@click.command("advise")
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="LOG")
@click.option("--gpus", type=click.IntRange(1, MOST_WORKERS), required=True, help="At most so many.")
@slo_flags
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(SIMULATED),
    help="Only these; may be given several times.",
)
@click.option("--model", help="Of several in the log; default: the one with most turns.")
@click.option("--rate", type=RATES, help="Sessions a second; default: as in the log.")
@click.option(
    "--budget",
    type=NumberRange(0),
    default=10.0,
    show_default=True,
    help="Minutes, after which nothing more is begun.",
)
@click.option("--processes", type=click.IntRange(1, 256), help="Default: one a processor.")
@click.option("--json", "wants_json", is_flag=True, help="Print the advice as JSON.")
def command(
    log: Path,
    gpus: int,
    modes: tuple[str, ...],
    model: str | None,
    rate: float | None,
    budget: float,
    processes: int | None,
    wants_json: bool,
    **given: Any,
) -> None:
    """Advise which fleet of at most so many GPUs, and which mode, serves the traffic of the receipt log LOG best.

    By simulation: the highest rate of sessions at which first turns and later turns each meet the targets.
    """
    try:
        past = opened(log)
        conditions = _conditions(past, SloFlags(**given), modes, model)
        plan = Plan(
            workers=workers_for(gpus, conditions.profile.gpu_count),
            modes=modes_of(modes, has_table=SloFlags(**given).has_table),
            rate=rate or conditions.traffic.rate,
            budget_s=60.0 * budget,
            processors=processes or os.cpu_count() or 1,
        )
    except PPDError as exc:
        raise click.ClickException(exc.message) from exc
    if not wants_json:
        show(_traffic_told(conditions, plan))
    found = _advised(past, conditions, plan)
    if wants_json:
        click.echo(msgspec.json.encode(document(found, conditions)))
        return
    show(told(found, conditions))


def _conditions(past: PastLog, flags: SloFlags, modes: Sequence[str], model: str | None) -> Conditions:
    flags.check_table(modes)
    return Conditions(
        traffic=traffic_of(past.turns, model),
        profile=flags.engines(),
        slo=flags.slo,
        scored=flags.scored(),
        most_pause_s=flags.longest_pause,
        seed=flags.seed,
    )


def _advised(past: PastLog, conditions: Conditions, plan: Plan) -> Advice:
    """Progress is told on standard error."""
    pool = TryingProcesses(conditions, plan.processors)
    try:
        return advise(past, conditions, plan, pool, lambda text: click.echo(text, err=True))
    except KeyboardInterrupt:
        raise click.exceptions.Exit(INTERRUPTED) from None
    except PPDError as exc:
        raise click.ClickException(exc.message) from exc
    except BrokenProcessPool as exc:
        raise click.ClickException("a process that simulates has died: is there memory for --processes?") from exc
    finally:
        pool.close()


# -- for a terminal


def _traffic_told(conditions: Conditions, plan: Plan) -> Iterator[Text]:
    traffic = conditions.traffic
    turns = traffic.turns
    yield Text(
        f"{len(turns)} turns of {len(traffic.sessions)} sessions of model {traffic.model}, "
        f"{traffic.rate:.3g} sessions a second over {traffic.span_s:,.0f} s",
        "bold",
    )
    prompts, answers = (
        sorted(values) for values in zip(*((t.prompt_tokens, t.output_tokens) for t in turns), strict=True)
    )
    yield Text(
        f"prompts of {prompts[len(prompts) // 2]:,} tokens (median; the longest {prompts[-1]:,}), answers of "
        f"{answers[len(answers) // 2]:,}; {traffic.later_turns / len(traffic.sessions):.1f} later turns a session"
    )
    yield Text(f"{plan.workers} engines of profile {conditions.profile.name}; {target_text(conditions.slo)}")


def told(found: Advice, conditions: Conditions) -> Iterator[Text]:
    yield Text("")
    yield Text(verdict(found), "bold")
    yield from _runner_up(found)
    yield Text("")
    yield _standings_table(found)
    if found.draws > 1:
        yield Text(f"(by {found.draws} draws of the log's sessions, with 95 % intervals)")
    elif not found.draws:
        yield Text("(in short windows only, for want of time: --budget)")
    yield Text("")
    yield from _improvements(found)
    if found.coarse:
        others = ", ".join(f"{one} {rate:.3g}" for one, rate in found.coarse[:OTHERS])
        yield Text(f"in short windows only, about: {others}")
    if found.below:
        yield Text(f"behind these in one short window: {', '.join(map(str, found.below))}")
    if found.cut:
        yield Text(f"searches that --budget has ended, so that their rates may be higher: {found.cut}")
    if found.untried:
        yield Text(f"not tried, for want of time (--budget): {', '.join(map(str, found.untried))}")
    yield Text("\nWhat neither the profile nor the log can tell", "bold")
    for fit in found.fits:
        if fit.is_stale:  # a caveat says so
            continue
        yield Text(
            f"- measured {fit.figure} of {fit.turns} turns against the profile's prediction: "
            f"median error {fit.median:+.0%}, median absolute error {fit.absolute:.0%}"
        )
    for caveat in found.caveats:
        yield Text(f"- {caveat}")


def verdict(found: Advice) -> str:
    if found.meets_none:
        return "No fleet and mode meets the targets at any rate: ask for less, or for a smaller share of the turns."
    best = found.best
    topology, mode = best.contender
    what = (
        f"mode {mode} on {topology}"
        if best.contender.is_disaggregated
        else f"do not disaggregate: {topology}, mode {mode}"
    )
    return (
        f"Recommended: {what}. It serves up to {best.goodput.text()} sessions a second, "
        f"{rounded(best.goodput.value / found.rate, 2)} x the rate asked for."
    )


def _runner_up(found: Advice) -> Iterator[Text]:
    other = found.runner_up
    if other is None or found.meets_none:
        return
    beside = other.beside(found.best)
    clear = beside.high is not None and beside.high < 1.0
    yield Text(f"Runner-up: {other.contender}, {_distance(beside)}" + ("" if clear else "; no clear difference"))
    plain = next((one for one in found.standings if not one.contender.is_disaggregated), None)
    if plain is not None and plain not in (found.best, other):
        yield Text(f"Without disaggregation: {plain.contender}, {_distance(plain.beside(found.best))}")


def _improvements(found: Advice) -> Iterator[Text]:
    if not found.improvements:
        return
    yield Text("The recommended fleet and mode with another setting", "bold")
    for one in found.improvements:
        beside = _distance(one.standing.beside(found.best))
        yield Text(f"- {one.setting}{_flag(one.setting)}: {one.standing.goodput.text()} sessions a second, {beside}")
    yield Text("")


def _flag(setting: Setting) -> str:
    cap = setting.long_prefill_tokens
    return f", engines started with --long-prefill-token-threshold {cap}" if cap else ""


def _distance(beside: Interval) -> str:
    text = f"{beside.value - 1:+.1%}"
    return (
        text
        if beside.low is None or beside.high is None
        else f"{text} ({beside.low - 1:+.0%} to {beside.high - 1:+.0%})"
    )


def _standings_table(found: Advice) -> Text:
    heading = (
        *("fleet", "mode", "sessions/s", "beside best", f"at {found.rate:.3g}/s within targets: first", "later"),
        *("TTFT first p50 / p99, ms", "later", "TPOT, ms"),
    )
    return columns([heading, *(_row(one, found.best) for one in found.standings)], right=range(2, 9))


def _row(one: Standing, best: Standing) -> tuple[str, ...]:
    at = one.at_log
    shown = ("-",) * 5
    if at is not None and at.turns:
        shown = (f"{at.first_share:.1%}", f"{at.later_share:.1%}", *_times(at))
    beside = "" if one is best else _distance(one.beside(best)) if best.goodput.value else "-"
    return (*one.contender, one.goodput.text(), beside, *shown)


def _times(at: Figures) -> tuple[str, str, str]:
    first, later, tpot = (
        "-" if pair is None else f"{pair[0] * 1000:,.0f} / {pair[1] * 1000:,.0f}"
        for pair in (at.ttft_first, at.ttft_later, at.tpot)
    )
    return first, later, tpot


# -- for a program


def document(found: Advice, conditions: Conditions) -> dict[str, Any]:
    traffic, best = conditions.traffic, found.best
    return {
        "recommended": None if found.meets_none else best.contender._asdict(),
        "disaggregate": None if found.meets_none else best.contender.is_disaggregated,
        "rate": found.rate,
        "traffic": {
            "model": traffic.model,
            "sessions": len(traffic.sessions),
            "turns": len(traffic.turns),
            "rate": traffic.rate,
            "span_s": traffic.span_s,
        },
        "profile": conditions.profile.name,
        "slo": conditions.slo,
        "standings": [
            {
                **one.contender._asdict(),
                "goodput": one.goodput,
                "goodputs": one.rates,
                "beside_best": one.beside(best),
                "at_rate": one.at_log,
            }
            for one in found.standings
        ],
        "improvements": [
            {**one.setting._asdict(), "goodput": one.standing.goodput, "beside_best": one.standing.beside(best)}
            for one in found.improvements
        ],
        "coarse": [{**one._asdict(), "goodput": rate} for one, rate in found.coarse],
        "below": [one._asdict() for one in found.below],
        "untried": [one._asdict() for one in found.untried],
        "draws": found.draws,
        "cut": found.cut,
        "fits": found.fits,
        "caveats": found.caveats,
    }
