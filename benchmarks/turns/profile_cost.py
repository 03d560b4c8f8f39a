"""What mode `profiles` costs a turn, and its index of what was sent: microseconds of a thread, and bytes.

    python -m benchmarks.turns.profile_cost EPP_CONFIG

The file is decided by for turns of conversations whose prompts have more blocks than are looked at, on fleets of half P
and half D, by label and by role. The rules are the proxy's own; workers, sessions and HTTP are left out.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import click
from msgspec.structs import replace

from ppd.offline.experiment.statistics import percentile
from ppd.proxy.beliefs.held import BeliefEvidence, Held
from ppd.proxy.config import Mode, ZeroMeans
from ppd.proxy.config.yaml_document import read_yaml
from ppd.proxy.fleet.view import Fleet, WorkerView, taking_turns
from ppd.proxy.fleet.worker import Load, Role, Worker
from ppd.proxy.policy import Rules, Turn, decide
from ppd.proxy.policy.profiles.endpoint_config import schedule_of
from ppd.proxy.policy.profiles.filters import OF_ROLES, ROLE_LABEL
from ppd.proxy.policy.profiles.prefix_index import PrefixIndex
from ppd.proxy.policy.profiles.prompt_blocks import NO_BLOCKS, BlockRule, PromptBlocks, blocks_of
from ppd.proxy.policy.profiles.schedule import Schedule

MODEL = "m"
FLEETS = (4, 16, 64)
UNIT_BYTES = 400  # of a message
UNITS = 40
CAPACITY = 31_250  # blocks, of llm-d's default
LOOKED_AT = 256


def schedule(path: Path) -> Schedule:
    document, text = read_yaml("epp_config", path)
    return schedule_of(document, text, ZeroMeans.API_VERSION)


def fleet_of(workers: int, chance: Random) -> Fleet:
    views = {}
    for number in range(workers):
        role = Role.PREFILL if number % 2 else Role.DECODE
        labels = {"role": OF_ROLES[role], ROLE_LABEL: OF_ROLES[role], "zone": f"z{number % 3}"}
        worker = Worker(role=role, address=f"10.0.0.{number}:80", models=(MODEL,), labels=labels)
        load = Load(chance.randrange(64), chance.randrange(8), chance.random(), 500_000)
        view = WorkerView(worker=worker, name=f"{role}{number}", incarnation="i", load=load)
        views[view.id] = replace(view, inflight=chance.randrange(32), reserved_tokens=1000)
    return Fleet.of(views, taking_turns(views.values(), MODEL))


def turns(rule: BlockRule | None, fleet: Fleet, chance: Random) -> Iterator[Turn]:
    """Of one conversation, each by two messages longer; its D and its P hold what came before."""
    keys, ends = [chance.getrandbits(64)], [0]
    session, places = f"{chance.getrandbits(64):016x}", (chance.choice(fleet.decodes), chance.choice(fleet.prefills))
    for number in range(1, UNITS // 2 + 1):
        for _ in range(2):
            keys.append(chance.getrandbits(64))
            ends.append(ends[-1] + UNIT_BYTES)
        before = max(0, ends[-3] // 4) if number > 1 else 0
        yield Turn(
            model=MODEL,
            session_id=session,
            number=number,
            prompt_tokens=ends[-1] // 4,
            held_tokens=before,
            output_tokens=100,
            held={view.id: Held(before, BeliefEvidence.OWN_TURNS) for view in places} if before else {},
            decode=places[0].id if before else None,
            blocks=NO_BLOCKS if rule is None else blocks_of(keys, ends, ends[-1], rule),
        )


def decisions_us(path: Path, workers: int, count: int) -> tuple[list[float], list[float], dict[str, int]]:
    """Of `decide`, and of what is remembered after it."""
    chance, known = Random(workers), schedule(path)
    fleet, rules = fleet_of(workers, chance), Rules(mode=Mode.PROFILES, schedule=known)
    spent, after, routes = list[float](), list[float](), dict[str, int]()
    while len(spent) < count:
        for turn in turns(known.memory.rule, fleet, chance):
            began_ns = time.thread_time_ns()
            decision = decide(turn, fleet, rules, qps=1.0, now_s=0.0)
            spent.append((time.thread_time_ns() - began_ns) / 1000)
            began_ns = time.thread_time_ns()
            known.memory.sent(turn, filter(None, (decision.prefill, decision.decode)))
            after.append((time.thread_time_ns() - began_ns) / 1000)
            routes[decision.route] = routes.get(decision.route, 0) + 1
    return spent, after, routes


def index_figures(block_tokens: int, unit_bytes: int) -> tuple[float, float, float, int]:
    """Bytes of a full index of one server; microseconds to match, and to use, a prompt of 256 blocks; its names."""
    chance, rule = Random(1), BlockRule(block_tokens, LOOKED_AT)
    view = fleet_of(2, chance).decodes[0]
    prompt_bytes = rule.block_bytes * LOOKED_AT
    ends = list(range(0, prompt_bytes + 1, unit_bytes))

    def prompt() -> PromptBlocks:
        return blocks_of([chance.getrandbits(64) for _ in ends], ends, ends[-1], rule)

    index = PrefixIndex(CAPACITY)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(3 * CAPACITY // LOOKED_AT):
        index.sent(prompt(), view)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    known = blocks_of([chance.getrandbits(64) for _ in ends], ends, ends[-1], rule)
    index.sent(known, view)
    matched = timed(lambda: index.matched(known, (view,)))
    assert index.matched(known, (view,)) == [known.count]
    return taken, matched, timed(lambda: index.sent(known, view)), len(known.keys)


def timed(work: Callable[[], object], rounds: int = 2000) -> float:
    """Median microseconds."""
    spent = []
    for _ in range(rounds):
        began_ns = time.perf_counter_ns()
        work()
        spent.append((time.perf_counter_ns() - began_ns) / 1000)
    return percentile(spent, 0.5)


@click.command(help=__doc__)
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="EPP_CONFIG")
@click.option("--decisions", default=2000, show_default=True, help="Timed ones, on each fleet.")
def main(path: Path, decisions: int) -> None:
    gc.freeze()
    click.echo("| workers | decision, median us | p99 us | remembering it, median us | routes |\n|---|---|---|---|---|")
    for workers in FLEETS:
        spent, after, routes = decisions_us(path, workers, decisions)
        told = ", ".join(f"{route} {count}" for route, count in sorted(routes.items()))
        figures = (percentile(spent, 0.5), percentile(spent, 0.99), percentile(after, 0.5))
        click.echo(f"| {workers} | {' | '.join(f'{figure:.0f}' for figure in figures)} | {told} |")
    click.echo("\n| a message | names of 256 blocks | 31,250 blocks, KB | match, us | use, us |\n|---|---|---|---|---|")
    for block_tokens, unit_bytes in ((5, 20), (5, UNIT_BYTES), (16, UNIT_BYTES), (64, UNIT_BYTES)):
        taken, matched, used, names = index_figures(block_tokens, unit_bytes)
        what = f"{unit_bytes} bytes, blocks of {block_tokens * 4}"
        click.echo(f"| {what} | {names} | {taken / 1000:.0f} | {matched:.1f} | {used:.1f} |")


if __name__ == "__main__":
    main()
