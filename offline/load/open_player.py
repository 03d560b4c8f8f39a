"""All that a player needs, opened together and closed together."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from ..experiment.records import Record
from .client import LoadClient, open_session
from .dialogue import author_for
from .open_files import allow_connections
from .player import LEAD_S, Player, Progress, Stage
from .script import Script
from .target import Target

log = logging.getLogger(__name__)


class Clock:
    """Seconds since the run began."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._began_s = self._time()

    def start(self, in_s: float) -> None:
        """The run begins in so many seconds; until then it shows less than 0."""
        self._began_s = self._time() + in_s

    def __call__(self) -> float:
        return self._time() - self._began_s


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

    The words of the prompts are new each time: else a second run on the same servers would find the first one's in
    their caches.
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
