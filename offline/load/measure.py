"""A run over HTTP: its conversations played against a target, one record a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..experiment.records import Record, in_order
from ..experiment.run import Run
from .dialogue import check_lengths
from .open_player import playing
from .player import Progress
from .script import scripts_of
from .target import Target


async def measure(
    run: Run,
    target: Target,
    trace: Sequence[float] | None = None,
    progress: Callable[[Progress], None] | None = None,
    record: Callable[[Record], None] | None = None,
) -> tuple[Record, ...]:
    """Every turn of the run's plan, in order of conversation and turn; failures are among them.

    trace: arrival times in s, for a run that follows one. `record` is called with each as it ends, for one who may
    not wait for the last. ConfigError where the target cannot be sent such prompts.
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
