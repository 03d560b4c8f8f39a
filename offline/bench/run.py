"""What `ppd bench` does between its flags and its table: finds the model, makes the scripts, plays them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import aiohttp
import msgspec

from ppd.proxy.errors import ConfigError

from ..experiment.files import UNREADABLE
from ..experiment.records import Record
from ..load.client import cause, open_session
from ..load.dialogue import check_lengths, too_short
from ..load.local_tokenizer import LocalTokenizer
from ..load.measure import playing
from ..load.player import Progress
from ..load.server_tokenizer import ServerTokenizer
from ..load.target import Api, Target
from ..traces.turns import TracedConversation
from .workloads import Pace, scripts_for, with_outputs, within

USUAL_OUTPUT = 128  # tokens of an answer of unknown length
_ASK_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """`target.model` may be empty where the endpoint serves one model."""

    target: Target
    api: Api | None  # None: chat where there is text, else completions
    conversations: Sequence[TracedConversation]
    recorded: bool  # from a file; their lengths are kept as far as possible
    pace: Pace
    seed: int = 0
    until_s: float = math.inf
    most_context: int | None = None  # tokens; None: as the endpoint says
    output_tokens: int | None = None  # of every answer; None: as recorded


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


async def prepared(bench: Bench, note: Callable[[str], None]) -> Bench:
    """The bench with its model, endpoint and all lengths settled. `note` is told what differs from the request."""
    async with open_session(bench.target) as session:
        card = await _card(session, bench.target)
        target = replace(bench.target, model=card.id, api=bench.api or _natural(bench.conversations))
        conversations = await _with_outputs(session, target, bench)
    limit = bench.most_context or card.max_model_len
    if bench.recorded and limit:
        conversations = _cut(conversations, limit, note)
    return replace(bench, target=target, conversations=conversations)


async def play(
    bench: Bench,
    record: Callable[[Record], None],
    progress: Callable[[Progress], None],
    note: Callable[[str], None],
) -> None:
    """ConfigError where the endpoint cannot be sent such prompts."""
    scripts = scripts_for(bench.conversations, bench.pace, bench.seed)
    async with playing(
        scripts, bench.target, record, progress=progress, seed=bench.seed, until_s=bench.until_s
    ) as player:
        if not bench.recorded:
            check_lengths(scripts, player.author)
        elif short := too_short(scripts, player.author):
            note(f"{len(short)} turns are longer than recorded: the chat template alone takes more")
        if bench.pace.concurrency is None:
            await player.open_loop(scripts)
        else:
            await player.closed_loop(scripts, bench.pace.concurrency)


def _natural(conversations: Sequence[TracedConversation]) -> Api:
    has_text = any(turn.messages or turn.images for conversation in conversations for turn in conversation.turns)
    return Api.CHAT if has_text else Api.COMPLETIONS


async def _card(session: aiohttp.ClientSession, target: Target) -> _Card:
    try:
        async with asyncio.timeout(_ASK_S):
            async with session.get(target.at("/v1/models"), headers=target.headers()) as response:
                status, body = response.status, await response.read()
        cards = msgspec.json.decode(body, type=_Cards).data if status == 200 else []
    except UNREADABLE as exc:
        raise ConfigError(f"url: {target.url} does not list its models: its answer is something else") from exc
    except (aiohttp.ClientError, OSError, TimeoutError) as exc:
        raise ConfigError(f"url: {target.url} does not list its models: {cause(exc)}") from exc
    if target.model:
        return next((card for card in cards if card.id == target.model), _Card(target.model))
    if len(cards) == 1:
        return cards[0]
    names = ", ".join(card.id for card in cards[:10])
    raise ConfigError(f"model: {f'give one of {names}' if cards else f'is not told by /v1/models ({status})'}")


async def _with_outputs(session: aiohttp.ClientSession, target: Target, bench: Bench) -> list[TracedConversation]:
    tokenizer = LocalTokenizer.load(target.tokenizer) if target.tokenizer else ServerTokenizer(session, target)
    return await with_outputs(bench.conversations, bench.output_tokens, USUAL_OUTPUT, tokenizer)


def _cut(
    conversations: Sequence[TracedConversation], limit: int, note: Callable[[str], None]
) -> list[TracedConversation]:
    cut = within(conversations, limit)
    before, after = (sum(len(one.turns) for one in these) for these in (conversations, cut))
    if after < before:
        note(f"{before - after} of {before} turns are left out: their context is above {limit} tokens")
    if not cut:
        raise ConfigError(f"max_context: no conversation fits into {limit} tokens")
    return cut
