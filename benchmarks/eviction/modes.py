"""The turns of one mode, and what each engine counted meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce

import msgspec

from .conversations import AskedTurn
from .engine_counts import EngineCounts, engine_counts
from .play import PlayedTurn, Player

ANSWERING = ("D", "R")


class ModeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One mode in one round, or in all: its turns, and what each engine counted meanwhile."""

    mode: str
    round: int = 0  # from 0
    seconds: float
    turns: list[PlayedTurn]
    engines: dict[str, EngineCounts]

    def of(self, *roles: str) -> EngineCounts:
        """All engines of these roles together."""
        counts = (counts for name, counts in self.engines.items() if name.startswith(roles))
        return reduce(EngineCounts.__add__, counts, EngineCounts())

    @property
    def routes(self) -> Counter[str]:
        return Counter(turn.route for turn in self.turns)

    @property
    def failed(self) -> int:
        return sum(turn.status != 200 for turn in self.turns)

    @property
    def wrong(self) -> int:
        """Answers with status 200 that were not the right text to the end."""
        return sum(turn.status == 200 and not turn.is_right for turn in self.turns)

    @property
    def refuted(self) -> int:
        return sum(turn.is_refuted for turn in self.turns)

    @property
    def claimed_tokens(self) -> int:
        return sum(turn.claimed_tokens for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def new_tokens(self) -> int:
        """Of the prompts, what neither the conversation's turn before had nor its answer."""
        lengths = {(turn.conversation, turn.number): turn.prompt_tokens + turn.answer_tokens for turn in self.turns}
        before = (lengths.get((turn.conversation, turn.number - 1), 0) for turn in self.turns)
        return self.prompt_tokens - sum(before)

    @property
    def hit_share(self) -> float:
        """Of the prompts on D and R, what these had themselves."""
        counts = self.of(*ANSWERING)
        return counts.hit / max(1, counts.prompts)


async def play_mode(
    mode: str, player: Player, turns: Sequence[AskedTurn], at_once: int, urls: Mapping[str, str]
) -> ModeRecord:
    """urls: of the engines, by name, as "D1"."""

    async def counts() -> dict[str, EngineCounts]:
        return {name: await engine_counts(player.session, url) for name, url in urls.items()}

    before, begun_s = await counts(), time.perf_counter()
    played = await player.play(turns, at_once)
    seconds, after = time.perf_counter() - begun_s, await counts()
    found = {name: after[name].since(before[name]) for name in urls}
    return ModeRecord(mode=mode, seconds=round(seconds, 3), turns=played, engines=found)


def together(rounds: Sequence[ModeRecord]) -> ModeRecord:
    """All rounds of one mode as one; conversations of different rounds have different numbers."""
    turns = [
        msgspec.structs.replace(turn, conversation=turn.conversation + 1_000_000 * record.round)
        for record in rounds
        for turn in record.turns
    ]
    engines = {
        name: reduce(EngineCounts.__add__, (record.engines[name] for record in rounds)) for name in rounds[0].engines
    }
    return ModeRecord(
        mode=rounds[0].mode, seconds=sum(record.seconds for record in rounds), turns=turns, engines=engines
    )
