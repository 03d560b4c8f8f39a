"""A whole run over HTTP: a player with its session, client and clock, and the records of what it played."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from ..experiment.records import Record, in_order
from ..experiment.run import Run
from .client import LoadClient, allow_connections, open_session
from .dialogue import author_for, check_lengths
from .player import LEAD_S, Player, Progress, Stage
from .script import Script, scripts_of
from .target import Target

log = logging.getLogger(__name__)


class Clock:
    """Seconds since the run began; below 0 before that."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._began_s = self._time()

    def start(self, in_s: float) -> None:
        self._began_s = self._time() + in_s

    def __call__(self) -> float:
        return self._time() - self._began_s


async def measure(
    run: Run,
    target: Target,
    trace: Sequence[float] | None = None,
    progress: Callable[[Progress], None] | None = None,
    record: Callable[[Record], None] | None = None,
) -> tuple[Record, ...]:
    """Every turn of the run's plan, failed ones included, in order of conversation and turn.

    trace: arrival times in s, for a run that follows one. `record` is called with each record as its request ends.
    ConfigError where the target cannot be sent such prompts.
    """
    scripts = scripts_of(run, trace, forced=target.forces_routes)
    records: list[Record] = []

    def note(ended: Record) -> None:
        records.append(ended)
        if record is not None:
            record(ended)

    async with playing(scripts, target, note, progress=progress, seed=run.seed) as player:
        check_lengths(scripts, player.author)
        await player.open_loop(scripts)
    return in_order(records)


@asynccontextmanager
async def playing(
    scripts: Sequence[Script],
    target: Target,
    record: Callable[[Record], None],
    *,
    progress: Callable[[Progress], None] | None = None,
    seed: int = 0,
    until_s: float = math.inf,
) -> AsyncIterator[Player]:
    """A player whose run begins as the block is entered. ConfigError where the target's prompts cannot be made.

    The words of the prompts are new each time: otherwise a second run on the same servers would find the first run's
    prompts in their caches.
    """
    if short := allow_connections(min(len(scripts), target.connections or len(scripts))):
        log.warning("%s", short)
    nonce = secrets.randbits(48)
    clock = Clock()
    async with open_session(target) as session:
        author = await author_for(session, target, scripts, nonce)
        stage = Stage(
            target=target,
            author=author,
            caller=LoadClient(session, target, clock),
            now=clock,
            sleep=asyncio.sleep,
            record=record,
            progress=progress,
            name=f"{target.name_prefix}-{nonce:x}",
            seed=seed,
            until_s=until_s,
        )
        player = Player(stage, sum(len(script.turns) for script in scripts))
        clock.start(in_s=LEAD_S)
        yield player
