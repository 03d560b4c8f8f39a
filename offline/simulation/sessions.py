"""What a simulated client sends, turn by turn: the tokens that engines compute, and the units that the proxy hashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from ppd.proxy.media.items import MediaItem, MediaKind
from ppd.proxy.policy import Route
from ppd.proxy.sessions.hasher import KEY_BITS

from ..experiment.plan import Conversation
from .workers.encoder import PlacedItem
from .workers.kv_cache import Span

BYTES_PER_TOKEN = 4  # of the prompts that the simulated clients send
COMMON_SPAN = 0  # what all conversations of a plan begin with; other ids count up from 1
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << KEY_BITS) - 1


class Asked(msgspec.Struct, frozen=True):
    """One request. The answer's length is not known to the proxy, unless an oracle tells it."""

    prompt: tuple[Span, ...]
    prompt_tokens: int
    reply: tuple[Span, ...]  # behind the prompt; where the next prompt repeats the answer, its spans
    output_tokens: int
    known_tokens: int  # of the prompt, that the session's turn before left in an engine, its answer's included
    keys: tuple[int, ...]  # of the prompt's units, with the seed's before them, as the proxy's chain has them
    ends: tuple[int, ...]  # in bytes
    reply_key: int
    forced: Route | None = None
    head: int = 0  # of the units, how many are a system prompt
    media: tuple[PlacedItem, ...] = ()  # of the whole prompt
    images: int = 0  # of them, those that came with this turn


class SimulatedSession(Protocol):
    """A conversation that a client plays. It may be asked for each of its turns once, in order."""

    @property
    def number(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def turns(self) -> int: ...

    def ask(self, turn: int) -> Asked:
        """turn: from 1."""
        ...

    def pauses_s(self, turn: int) -> tuple[float, float]:
        """How long a turn waits after the answer before it, and after the sending of the turn before; for both."""
        ...

    def measures(self, scheduled_s: float) -> bool: ...
    def wants(self, turn: int) -> str:
        """The route that a turn which was never sent would have been forced to; empty for none."""
        ...


class PlannedSession:
    """A conversation of a run's plan: prompts only grow."""

    def __init__(
        self, conversation: Conversation, ids: Iterator[int], *, is_retokenised: Callable[[], bool], forced: bool
    ) -> None:
        """is_retokenised: asked for each answer, whether it comes back as other tokens, which no cache has."""
        self.number = conversation.number
        self.arrival_s = conversation.arrival_s
        self.turns = len(conversation.turns)
        self._plan = conversation
        self._ids = ids
        self._is_retokenised = is_retokenised
        self._forced = forced
        shared = conversation.shared_prefix_tokens
        self._history: tuple[Span, ...] = (Span(COMMON_SPAN, shared),) if shared else ()
        self._history_tokens = self._known_tokens = 0
        self._media: tuple[PlacedItem, ...] = ()
        self._keys, self._ends = [self._key(0)], [0]

    def ask(self, turn: int) -> Asked:
        planned = self._plan.turns[turn - 1]
        shared = self._plan.shared_prefix_tokens if turn == 1 else 0
        prompt = (*self._history, self._span(planned.new_tokens - shared))
        reply = self._span(planned.output_tokens)
        is_retokenised = self._is_retokenised()
        self._history = (*prompt, self._span(planned.output_tokens) if is_retokenised else reply)
        self._add_unit(2 * turn - 1, planned.new_tokens)
        begins = self._history_tokens + shared
        self._media += tuple(self._image(begins, turn, number) for number in range(planned.images))
        asked = Asked(
            prompt=prompt,
            prompt_tokens=(tokens := self._history_tokens + planned.new_tokens),
            reply=(reply,),
            output_tokens=planned.output_tokens,
            known_tokens=self._known_tokens,
            keys=tuple(self._keys),
            ends=tuple(self._ends),
            reply_key=self._key(2 * turn),
            forced=planned.route if self._forced else None,
            media=self._media,
            images=planned.images,
        )
        self._history_tokens = tokens + planned.output_tokens
        self._known_tokens = tokens if is_retokenised else self._history_tokens
        self._add_unit(2 * turn, planned.output_tokens)
        return asked

    def pauses_s(self, turn: int) -> tuple[float, float]:
        return self._plan.turns[turn - 1].think_s, 0.0

    def measures(self, scheduled_s: float) -> bool:
        return self._plan.measured

    def wants(self, turn: int) -> str:
        return (self._plan.turns[turn - 1].route or "") if self._forced else ""

    def _add_unit(self, place: int, tokens: int) -> None:
        self._keys.append(self._key(place))
        self._ends.append(self._ends[-1] + tokens * BYTES_PER_TOKEN)

    def _image(self, at: int, turn: int, number: int) -> PlacedItem:
        return PlacedItem(at, MediaItem(MediaKind.IMAGE, f"{self.number}-{turn}-{number}", 2 * turn - 2, 0, 0))

    def _key(self, place: int) -> int:
        return spread(self.number << 16 | place)

    def _span(self, tokens: int) -> Span:
        return Span(next(self._ids), tokens)


def spread(number: int) -> int:
    """A chain's key: unique in a simulation, spread as hashes are."""
    return (number * _SPREAD) & _MASK


def planned_sessions(
    conversations: Sequence[Conversation], ids: Iterator[int], *, is_retokenised: Callable[[], bool], forced: bool
) -> list[SimulatedSession]:
    return [PlannedSession(one, ids, is_retokenised=is_retokenised, forced=forced) for one in conversations]
