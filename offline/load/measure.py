"""A run over HTTP: its conversations played against a target, one record a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..records import Record
from ..runs import Run
from .dialogues import check_lengths
from .player import Progress
from .playing import playing
from .scripts import scripts_of
from .target import Target


async def measure(
    run: Run,
    target: Target,
    trace: Sequence[float] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Record, ...]:
    """Every turn of the run's plan, in order of conversation and turn; failures are among them.

    trace: arrival times in s, for a run that follows one. ConfigError where the target cannot be sent such prompts.
    """
    scripts = scripts_of(run, trace, forced=target.forces_routes)
    records: list[Record] = []
    async with playing(scripts, target, records.append, progress=progress, seed=run.seed) as player:
        check_lengths(scripts, player.author)
        await player.open_loop(scripts)
    return tuple(sorted(records, key=lambda record: (record.conversation, record.turn)))
