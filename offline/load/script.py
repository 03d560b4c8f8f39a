"""What is to be played: the turns of a conversation, when it begins, and which routes are forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..experiment.plan import Conversation, plan
from ..experiment.run import Run
from ..traces.turns import Blocks, TracedTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Each turn has output_tokens, and either new_tokens or messages."""

    number: int  # in order of arrival, from 0
    arrival_s: float = 0.0  # since the run began; not used in a closed loop
    measured: bool = True  # False: part of the warm-up
    turns: tuple[TracedTurn, ...]
    routes: tuple[str, ...] = ()  # to be forced, one a turn; empty, of a turn or of all: not forced

    def route(self, index: int) -> str:
        """Empty where the endpoint is free to choose."""
        return self.routes[index] if self.routes else ""


def scripts_of(run: Run, trace: Sequence[float] | None, *, forced: bool) -> list[Script]:
    return [_script(conversation, forced) for conversation in plan(run, trace)]


def _script(conversation: Conversation, forced: bool) -> Script:
    # A prefix that all conversations share is one block of that size; the rest is each conversation's own.
    shared = conversation.shared_prefix_tokens
    blocks = Blocks((0,), shared) if shared else None
    turns = tuple(
        TracedTurn(
            new_tokens=turn.new_tokens,
            output_tokens=turn.output_tokens,
            think_s=turn.think_s,
            blocks=None if index else blocks,
            images=turn.images,
        )
        for index, turn in enumerate(conversation.turns)
    )
    return Script(
        number=conversation.number,
        arrival_s=conversation.arrival_s,
        measured=conversation.measured,
        turns=turns,
        routes=tuple(turn.route.value if turn.route else "" for turn in conversation.turns) if forced else (),
    )
