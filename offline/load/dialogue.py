"""What a conversation sends, turn by turn: the whole history each time, with the answers that the server gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp

from ppd.proxy.errors import ConfigError

from ..traces.turns import TracedTurn
from .local_tokenizer import LocalTokenizer
from .picture import data_url
from .prompt_text import draw
from .script import Script
from .server_tokenizer import ServerTokenizer, Tokenizer
from .target import Api, Target
from .vocabulary import ORDINARY_IDS, Vocabulary, learn_ids, learn_vocabulary

_ROLES = frozenset(("system", "user", "assistant"))


class Dialogue(Protocol):
    def ask(self, index: int) -> dict[str, Any]:
        """The body's members that hold the prompt of a turn. Called once for each turn, in order."""

    def answered(self, text: str, token_ids: list[int]) -> None: ...


class Author(Protocol):
    """Writes the prompts of a run."""

    def begin(self, script: Script) -> Dialogue: ...

    def shortest(self, *, later: bool) -> int:
        """The fewest tokens that a turn can add to the prompt."""


async def author_for(session: aiohttp.ClientSession, target: Target, scripts: Sequence[Script], seed: int) -> Author:
    """ConfigError where the prompts cannot be made for this target. Another seed gives other words."""
    turns = [turn for script in scripts for turn in script.turns]
    if target.api is not Api.CHAT and any(turn.messages or turn.images for turn in turns):
        raise ConfigError("endpoint: conversations with text or images need chat", param="endpoint")
    if all(turn.messages for turn in turns):
        return ChatAuthor(None, seed)
    tokenizer: Tokenizer = ServerTokenizer(session, target)
    if target.tokenizer is not None:
        tokenizer = LocalTokenizer.load(target.tokenizer)
    if target.api is Api.CHAT:
        try:
            return ChatAuthor(await learn_vocabulary(tokenizer), seed)
        except ConfigError as exc:
            raise ConfigError(
                f"texts of exact lengths cannot be made for {Api.CHAT.path}: {exc.message}; give a tokenizer"
                + _or_completions(turns),
                param="endpoint",
            ) from exc
    try:
        return TokenAuthor(await learn_ids(tokenizer), seed)
    except ConfigError:
        if target.tokenizer is not None:
            raise
        return TokenAuthor(ORDINARY_IDS, seed)


def too_short(scripts: Sequence[Script], author: Author) -> list[int]:
    """New tokens of the turns that will be sent longer than asked."""
    return [
        turn.new_tokens
        for script in scripts
        for index, turn in enumerate(script.turns)
        if turn.new_tokens is not None and turn.new_tokens < author.shortest(later=index > 0)
    ]


def check_lengths(scripts: Sequence[Script], author: Author) -> None:
    """ConfigError for a turn that is too short to be sent."""
    if short := too_short(scripts, author):
        least = (author.shortest(later=False), author.shortest(later=True))
        instead = _or_completions([turn for script in scripts for turn in script.turns])
        raise ConfigError(
            f"a turn of {min(short)} new tokens cannot be sent as chat: the template alone takes {least[0]} in a first "
            f"turn and {least[1]} in a later one; ask for as many at least{instead}",
            param="endpoint",
        )


def _or_completions(turns: Sequence[TracedTurn]) -> str:
    """What helps as well, unless there are images."""
    return "" if any(turn.images for turn in turns) else ", or use the completions endpoint"


class ChatAuthor:
    """`vocabulary`: None where every turn has its own messages."""

    def __init__(self, vocabulary: Vocabulary | None, seed: int) -> None:
        self.vocabulary = vocabulary
        self.seed = seed

    def begin(self, script: Script) -> Dialogue:
        return _Chat(self, script)

    def shortest(self, *, later: bool) -> int:
        if self.vocabulary is None:
            return 0
        return self.vocabulary.later_overhead if later else self.vocabulary.first_overhead

    def text(self, turn: TracedTurn, place: tuple[int, int], *, later: bool) -> str:
        """Text that makes the prompt longer by the turn's new tokens, which include the template's own.

        Nothing is drawn for the places of the template's head, so that blocks end where they should.
        """
        assert self.vocabulary is not None, "a turn without messages has its text made"
        units, head = self.vocabulary.units, 0 if later else self.vocabulary.head
        count = max(0, (turn.new_tokens or 0) - self.shortest(later=later))
        drawn = draw(turn, place, seed=self.seed, count=head + count, choices=len(units))
        return self.vocabulary.opening + "".join([units[at] for at in drawn[head:]])


class _Chat:
    def __init__(self, author: ChatAuthor, script: Script) -> None:
        self._author = author
        self._script = script
        self._messages: list[dict[str, Any]] = []

    def ask(self, index: int) -> dict[str, Any]:
        turn = self._script.turns[index]
        if turn.restarts:
            self._messages = []
        for message in turn.messages:
            # A tool's result answers a call that this server did not make, so templates accept it only as the user's.
            role = message.role if message.role in _ROLES else "user"
            self._messages.append({"role": role, "content": message.content})
        if not turn.messages:
            text = self._author.text(turn, (self._script.number, index), later=bool(self._messages))
            self._messages.append({"role": "user", "content": text})
        if turn.images:
            self._add_images(turn.images, index)
        return {"messages": self._messages}

    def _add_images(self, count: int, index: int) -> None:
        last = self._messages[-1]
        parts: list[dict[str, Any]] = [{"type": "text", "text": last["content"]}]
        for number in range(count):
            url = data_url((self._script.number, index * count + number), seed=self._author.seed)
            parts.append({"type": "image_url", "image_url": {"url": url}})
        self._messages[-1] = {**last, "content": parts}

    def answered(self, text: str, token_ids: list[int]) -> None:
        self._messages.append({"role": "assistant", "content": text})


class TokenAuthor:
    """`ids`: token ids of plain text, of which prompts are made."""

    def __init__(self, ids: tuple[int, ...], seed: int) -> None:
        self.ids = ids
        self.seed = seed

    def begin(self, script: Script) -> Dialogue:
        return _Tokens(self, script)

    def shortest(self, *, later: bool) -> int:
        return 1


class _Tokens:
    def __init__(self, author: TokenAuthor, script: Script) -> None:
        self._author = author
        self._script = script
        self._ids: list[int] = []

    def ask(self, index: int) -> dict[str, Any]:
        turn, author = self._script.turns[index], self._author
        if turn.restarts:
            self._ids = []
        place = (self._script.number, index)
        drawn = draw(turn, place, seed=author.seed, count=turn.new_tokens or 1, choices=len(author.ids))
        self._ids += [author.ids[at] for at in drawn]
        return {"prompt": self._ids, "return_token_ids": True}

    def answered(self, text: str, token_ids: list[int]) -> None:
        self._ids += token_ids
