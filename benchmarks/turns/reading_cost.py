"""What reading a chat costs, in us: from its body to the request, with the keys of its prompt.

    python -m benchmarks.turns.reading_cost

Each body is read again and again, so all of it is known, as nearly all is of a client's later turns. Plain chats have
20 long messages, as in `benchmarks.overhead`. Agents' have 20 tools, and calls with results that are program code: in
OpenAI's form, in Anthropic's, and as items of Responses, as Codex sends them.

Then conversations that grow: each turn is read once, with all before it, as it comes from a client; as a whole, and
from where what is known of its beginning ends, in turn.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, takewhile
from random import Random
from statistics import mean
from typing import Any

import click
import msgspec

from ppd.offline.experiment.statistics import percentile
from ppd.proxy.admission.keys import Client
from ppd.proxy.bodies.shared_bytes import LARGE_BYTES
from ppd.proxy.openai.prompts.beginnings import KnownBeginnings
from ppd.proxy.openai.request import Endpoint

from ..overhead.bodies import MODEL as MOCK
from ..overhead.bodies import ChatShape, follow_ups
from ..small.decision_cost import show_table, tool
from ..small.proxy_here import MODEL, bench

CALLS = (5, 30, 60, 100)
MOST_TURNS = 100  # of a conversation that grows
SIZES = (2_000, 130_000, 600_000)
_CODE_LINE = '    def step_{at}(self, x): return x[{at}] + "{number:x}"  # and so on'


def code(random: Random, size: int) -> str:
    lines = (_CODE_LINE.format(at=at, number=random.getrandbits(64)) for at in range(size // 60))
    return "\n".join(lines)


def plain(size: int) -> bytes:
    turns = follow_ups(ChatShape(turns=3, opening_bytes=size, message_bytes=max(1000, size // 20)))
    return turns.splitlines()[1].replace(f'"{MOCK}"'.encode(), f'"{MODEL}"'.encode())


def agents(calls: int) -> bytes:
    random, messages = Random(calls), list[object]()
    messages.append({"role": "user", "content": "Find what is wrong, and mend it."})
    for at in range(calls):
        arguments = msgspec.json.encode({"command": f"sed -n 1,{at}p file.py", "why": code(random, 120)}).decode()
        call = {"id": f"call_{at}", "type": "function", "function": {"name": "search_1", "arguments": arguments}}
        messages.append({"role": "assistant", "content": "I look.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{at}", "content": code(random, 3000)})
    return msgspec.json.encode({"model": MODEL, "messages": messages, "tools": [tool(at) for at in range(20)]})


def claudes(calls: int) -> bytes:
    random, messages = Random(calls), list[object]()
    messages.append({"role": "user", "content": [{"type": "text", "text": "Find what is wrong, and mend it."}]})
    for at in range(calls):
        given = {"command": f"sed -n 1,{at}p file.py", "why": code(random, 120)}
        use = {"type": "tool_use", "id": f"toolu_{at}", "name": "search_1", "input": given}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{at}", "content": code(random, 3000)}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]})
        messages.append({"role": "user", "content": [result]})
    tools = [
        {"name": f"search_{at}", "input_schema": {"type": "object"}, "description": "x " * 200} for at in range(20)
    ]
    return msgspec.json.encode({"model": MODEL, "max_tokens": 64, "messages": messages, "tools": tools})


def codexes(calls: int) -> bytes:
    random, items = Random(calls), list[object]()
    items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": code(random, 6000)}]})
    for at in range(calls):
        arguments = msgspec.json.encode({"command": ["sed", "-n", f"1,{at}p"], "why": code(random, 120)}).decode()
        items.append({"type": "reasoning", "summary": [], "encrypted_content": f"{random.getrandbits(4000):x}"})
        call = {"type": "function_call", "name": "search_1", "arguments": arguments, "call_id": f"call_{at}"}
        result = {"type": "function_call_output", "call_id": f"call_{at}", "output": code(random, 3000)}
        items += [call, result]
    tools = [
        {"type": "function", "name": f"search_{at}", "parameters": {"type": "object"}, "description": "x " * 200}
        for at in range(20)
    ]
    return msgspec.json.encode({"model": MODEL, "instructions": code(random, 9000), "input": items, "tools": tools})


def bodies() -> Iterator[tuple[str, Endpoint, bytes]]:
    for size in SIZES:
        yield "plain", Endpoint.CHAT, plain(size)
    for calls in CALLS:
        yield f"{calls} calls", Endpoint.CHAT, agents(calls)
    for calls in CALLS:
        yield f"{calls} calls", Endpoint.MESSAGES, claudes(calls)
    for calls in CALLS:
        yield f"{calls} calls", Endpoint.RESPONSES, codexes(calls)


async def measure(rounds: int) -> list[tuple[str, Endpoint, int, int, list[float]]]:
    """By body: its name, endpoint, bytes and units, and the us of each reading after the first three."""
    one, client = bench(0), Client(name="", tenant="t")
    found = list[tuple[str, Endpoint, int, int, list[float]]]()
    try:
        for name, endpoint, body in bodies():
            times_us, units = list[float](), 0
            for _ in range(rounds + 3):
                started_ns = time.perf_counter_ns()
                request = await one.proxy.bodies.turn(endpoint, {}, client, body)
                times_us.append((time.perf_counter_ns() - started_ns) / 1000)
                units = len(request.prompt.chain.keys)
            found.append((name, endpoint, len(body), units, times_us[3:]))
    finally:
        one.proxy.listener.close()
    return found


def conversations() -> Iterator[tuple[str, Endpoint, list[bytes]]]:
    """The bodies of each, turn by turn, up to the size at which the helper process reads them."""
    for size in (3_000, 28_000):
        random = Random(size)
        texts = (code(random, size) for _ in range(2 * MOST_TURNS))
        said = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]
        yield f"plain, {size // 1000} KB a message", Endpoint.CHAT, _turns(agents(0), "messages", said, 2)
    for endpoint, whole, member, step in (
        (Endpoint.CHAT, agents(MOST_TURNS), "messages", 2),
        (Endpoint.MESSAGES, claudes(MOST_TURNS), "messages", 2),
        (Endpoint.RESPONSES, codexes(MOST_TURNS), "input", 3),
    ):
        yield "calls", endpoint, _turns(whole, member, msgspec.json.decode(whole)[member], step)


def _turns(body: bytes, member: str, said: list[Any], step: int) -> list[bytes]:
    members = msgspec.json.decode(body)
    turns = (msgspec.json.encode({**members, member: said[:end]}) for end in range(1, len(said) + 1, step))
    return list(takewhile(lambda turn: len(turn) <= LARGE_BYTES, turns))


async def measure_growing(repetitions: int) -> list[tuple[str, Endpoint, list[int], dict[bool, list[float]]]]:
    """By conversation: its name, endpoint, and of each turn the bytes and the us, read as a whole and from where its
    beginning ends; medians of several proxies in turn."""
    rows = list[tuple[str, Endpoint, list[int], dict[bool, list[float]]]]()
    for name, endpoint, turns in conversations():
        times: dict[bool, list[list[float]]] = {False: [], True: []}
        for has_beginnings in (False, True) * repetitions:
            with beginnings(has_beginnings):
                times[has_beginnings].append(await _read_all(endpoint, turns))
        us = {way: [percentile(each, 0.5) for each in zip(*found, strict=True)] for way, found in times.items()}
        rows.append((name, endpoint, [len(body) for body in turns], us))
    return rows


@contextmanager
def beginnings(are_known: bool) -> Iterator[None]:
    least = KnownBeginnings.least_bytes
    try:
        KnownBeginnings.least_bytes = least if are_known else sys.maxsize
        yield
    finally:
        KnownBeginnings.least_bytes = least


async def _read_all(endpoint: Endpoint, turns: list[bytes]) -> list[float]:
    one, client, times_us = bench(0), Client(name="", tenant="t"), list[float]()
    try:
        for body in turns:
            started_ns = time.perf_counter_ns()
            await one.proxy.bodies.turn(endpoint, {}, client, body)
            times_us.append((time.perf_counter_ns() - started_ns) / 1000)
    finally:
        one.proxy.listener.close()
    return times_us


@click.command(help=__doc__)
@click.option("--rounds", default=100, show_default=True, help="Readings of each body.")
@click.option("--repetitions", default=5, show_default=True, help="Readings of each conversation.")
def main(rounds: int, repetitions: int) -> None:
    rows = [
        [name, str(endpoint), f"{size:,}", str(units), f"{percentile(us, 0.5):.0f} / {percentile(us, 0.99):.0f}"]
        for name, endpoint, size, units, us in asyncio.run(measure(rounds))
    ]
    show_table(["chat", "endpoint", "bytes", "units", "us, median / p99"], rows)
    click.echo()
    rows = []
    for name, endpoint, sizes, us in asyncio.run(measure_growing(repetitions)):
        ends = [len(sizes) * at // 4 for at in range(5)]
        cells = [
            f"{sizes[(one + end) // 2] // 1000} KB: {mean(us[False][one:end]):.0f} / {mean(us[True][one:end]):.0f}"
            for one, end in pairwise(ends)
        ]
        rows.append([name, str(endpoint), str(len(sizes)), *cells])
    quarters = (
        f"{which} quarter, us a turn read whole / from its beginning" for which in ("first", "2nd", "3rd", "last")
    )
    show_table(["conversation", "endpoint", "turns", *quarters], rows)


if __name__ == "__main__":
    main()
