"""Plays `ppd doctor`'s probe conversation: two turns through the proxy, and every worker's counters before and after.

The text is new in every run, from its first word on, so no cache holds any of it. Whether a token is a word or a
character, it fills several KV blocks of any usual size, and fits into 4096 tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import aiohttp
import msgspec

from ...fleet.worker import Role
from ...policy import Route
from ...telemetry.receipts import Receipt
from .gather import ProxyClient, Said, look_at
from .readback import may_read_back
from .values import EngineCounts, Facts, ProbeConversation, TurnFact, WorkerFact

TURN_S = 120.0
READ_BACK_S = 30.0  # for a turn whose P may hang
READING_BACK = (Route.SPLIT, Route.READBACK)
FIRST_CHARS, NEXT_CHARS = 1400, 700
MAX_TOKENS = 8
SETTLE_TRIES, SETTLE_S = 10, 0.2  # engines update their counters a moment after they answer

WORDS = (
    "alder amber anchor apple arrow basin beacon birch brook candle canyon cedar cinder clover copper coral "
    "delta ember falcon fern flint garnet glacier harbor hazel heron island ivory jasper juniper kettle lagoon "
    "lantern laurel linen maple marble meadow mortar nectar oak ochre olive orchard otter paper pebble pepper "
    "pine plum quartz quill raven reed ridge river saddle sage sparrow spruce stone tallow thistle timber topaz "
    "tulip umber valley velvet walnut willow yarrow zephyr"
).split()


def probe_text(chars: int, random: Random) -> str:
    words, length = [f"{random.getrandbits(64):016x}"], 16
    while length < chars:
        words.append(random.choice(WORDS))
        length += 1 + len(words[-1])
    return " ".join(words)


def choose_model(facts: Facts) -> str:
    """A model that both a P and a D serve, else the first model of a D or R; "" if there is none."""
    on_p = {model for fact in facts.serving(Role.PREFILL) for model in fact.worker.models}
    on_d = [model for fact in facts.serving(Role.DECODE) for model in fact.worker.models]
    on_r = [model for fact in facts.serving(Role.REPLICA) for model in fact.worker.models]
    return next((model for model in on_d if model in on_p), next(iter(on_d + on_r), ""))


async def converse(
    session: aiohttp.ClientSession, proxy: ProxyClient, facts: Facts, *, model: str, random: Random
) -> Facts:
    """Adds the conversation to `facts`, and the workers as they are after it."""
    if facts.proxy is None or facts.proxy.error or facts.proxy.ready_status != 200:
        return replace(facts, conversation=ProbeConversation(skipped="not held: the proxy can't serve"))
    model = model or choose_model(facts) or _first_model(await proxy.client("/v1/models"))
    if not model:
        return replace(facts, conversation=ProbeConversation(skipped="not held: no worker tells a model's name"))
    workers, turns = await _talk(session, proxy, facts.workers, model, random)
    forced: tuple[TurnFact, ...] = ()
    read_back: tuple[TurnFact, ...] = ()
    if _may_split(facts) and turns[-1].status == 200 and not any(turn.prefill for turn in turns):
        workers, forced = await _talk(session, proxy, workers, model, random, (Route.SPLIT,))
    if may_read_back(facts) and turns[-1].status == 200:
        workers, read_back = await _talk(session, proxy, workers, model, random, READING_BACK)
    held = ProbeConversation(model=model, turns=turns, forced=forced, read_back=read_back)
    return replace(facts, workers=workers, conversation=held)


def _may_split(facts: Facts) -> bool:
    return facts.can_force and facts.proxy is not None and "split" in facts.proxy.ways


async def _talk(
    session: aiohttp.ClientSession,
    proxy: ProxyClient,
    workers: tuple[WorkerFact, ...],
    model: str,
    random: Random,
    routes: tuple[str, ...] = ("", ""),
) -> tuple[tuple[WorkerFact, ...], tuple[TurnFact, ...]]:
    """The workers as they are after a turn for each of routes, which are forced; a failed turn is the last one."""
    session_id = f"ppd-doctor-{random.getrandbits(64):016x}"
    messages = [{"role": "user", "content": probe_text(FIRST_CHARS, random)}]
    turns = []
    for route in routes:
        turn, content = await _turn(proxy, model, messages, session_id, route)
        after = await _settled(session, workers, turn)
        turns.append(replace(turn, growth=_growth(workers, after)))
        workers = after
        if turn.status != 200:
            break
        messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": probe_text(NEXT_CHARS, random)},
        ]
    return workers, tuple(turns)


def _first_model(listed: Said) -> str:
    entries = listed.json().get("data")
    first = entries[0] if isinstance(entries, list) and entries else None
    return str(first.get("id", "")) if isinstance(first, dict) else ""


async def _turn(
    proxy: ProxyClient, model: str, messages: list[dict[str, str]], session_id: str, route: str
) -> tuple[TurnFact, str]:
    body = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": False}
    timeout_s = READ_BACK_S if route else TURN_S
    said = await proxy.client("/v1/chat/completions", body, session_id=session_id, forced=route, timeout_s=timeout_s)
    request_id = said.headers.get("x-request-id", "")
    receipt = _receipt(await proxy.operator(f"/admin/requests/{request_id}")) if request_id else None
    turn = turn_fact(said, receipt)
    return turn, _content(said.json())


def _receipt(said: Said) -> Receipt | None:
    """None if the admin API is off."""
    if said.status != 200:
        return None
    try:
        return msgspec.json.decode(said.body, type=Receipt)
    except msgspec.DecodeError:
        return None


def turn_fact(said: Said, receipt: Receipt | None) -> TurnFact:
    usage = _object(said.json().get("usage"))
    turn = TurnFact(
        status=said.status,
        is_late=said.is_late,
        error="" if said.status == 200 else _error(said, receipt),
        route=said.headers.get("x-ppd-route", ""),
        reason=said.headers.get("x-ppd-reason", ""),
        decode=said.headers.get("x-ppd-decode", ""),
        prefill=said.headers.get("x-ppd-prefill", ""),
        prompt_tokens=_count(usage.get("prompt_tokens")) or 0,
        cached_tokens=_count(_object(usage.get("prompt_tokens_details")).get("cached_tokens")),
    )
    if receipt is None:
        return turn
    return replace(
        turn,
        number=receipt.turn,
        handoff_missing=receipt.handoff_missing or "",
        failed_legs="; ".join(_failed(receipt)),
        prompt_tokens=receipt.prompt_tokens or turn.prompt_tokens,
        cached_tokens=receipt.cached_tokens,
    )


def _error(said: Said, receipt: Receipt | None) -> str:
    message = said.error or str(_object(said.json().get("error")).get("message", "no message"))
    return "; ".join((message, *(_failed(receipt) if receipt else ())))


def _failed(receipt: Receipt) -> list[str]:
    return [f"{leg.kind} on {leg.worker}: {leg.error}" for leg in receipt.legs if leg.error]


def _content(body: dict[str, Any]) -> str:
    choices = body.get("choices")
    message = _object(choices[0]).get("message") if isinstance(choices, list) and choices else None
    return str(_object(message).get("content") or "")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if type(value) is int else None


async def _settled(
    session: aiohttp.ClientSession, before: tuple[WorkerFact, ...], turn: TurnFact
) -> tuple[WorkerFact, ...]:
    """Waits until the workers of the turn have counted it, or gives up after a few tries."""
    after = await look_at(session, before, api_key="")
    for _ in range(SETTLE_TRIES):
        if _has_counted(before, after, turn):
            break
        await asyncio.sleep(SETTLE_S)
        after = await look_at(session, before, api_key="")
    return after


def _has_counted(before: tuple[WorkerFact, ...], after: tuple[WorkerFact, ...], turn: TurnFact) -> bool:
    took_part = {turn.decode, turn.prefill} if turn.status == 200 else set()
    return not any(
        old.name in took_part and new.counts is not None and old.counts == new.counts
        for old, new in zip(before, after, strict=True)
    )


def _growth(before: tuple[WorkerFact, ...], after: tuple[WorkerFact, ...]) -> tuple[tuple[str, EngineCounts], ...]:
    grown = []
    for old, new in zip(before, after, strict=True):
        if old.counts is not None and new.counts is not None and (growth := new.counts.since(old.counts)) is not None:
            grown.append((new.name, growth))
    return tuple(grown)
