"""`ppd demo`: a fleet, and a real three-turn conversation played through it with OpenAI's own client."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click
from ppd.proxy.workers import Role
from rich.console import Console
from rich.table import Table

from .fleet import Fleet, FleetSpec
from .up_command import READY_S, guarded, make_spec, show, until_signal

CONVERSATION = Path(__file__).with_name("demo_conversation.json")
ADMIN_KEY = "demo"
ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TurnShown:
    """One line of the demo: the turn as the proxy's receipt tells it, and its answer."""

    number: int
    receipt: dict[str, Any]
    text: str

    def cells(self) -> Iterator[str]:
        r = self.receipt
        yield str(self.number)
        yield r["route"]
        yield r["reason"]
        yield f"{r['prefill']} → {r['decode']}" if r["prefill"] else r["decode"]
        cached = r["cached_tokens"] or 0
        yield f"{cached}/{r['prompt_tokens'] - cached}"
        yield f"{r['ttft_s'] * 1000:.0f} ms"
        yield f"{r['tpot_s'] * 1000:.1f} ms" if r["tpot_s"] is not None else "-"
        yield repr(self.text[:32])


async def play(base_url: str) -> list[TurnShown]:
    """The conversation's turns, streamed; each turn's request carries what was answered before it."""
    from openai import AsyncOpenAI

    user_turns = json.loads(CONVERSATION.read_text())["user_turns"]
    shown: list[TurnShown] = []
    messages: list[dict[str, str]] = []
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="demo", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        for number, text in enumerate(user_turns, 1):
            messages.append({"role": "user", "content": text})
            raw = await client.chat.completions.with_raw_response.create(
                model=model,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=ANSWER_TOKENS,
                temperature=0,
                stream=True,
            )
            parts = [chunk.choices[0].delta.content or "" async for chunk in raw.parse() if chunk.choices]
            answer = "".join(parts)
            messages.append({"role": "assistant", "content": answer})
            shown.append(TurnShown(number, await _receipt(base_url, raw.headers["X-Request-Id"]), answer))
    return shown


async def _receipt(base_url: str, request_id: str) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(headers={"X-Admin-Key": ADMIN_KEY}) as session,
        session.get(f"{base_url}/admin/requests/{request_id}") as response,
    ):
        response.raise_for_status()
        receipt: dict[str, Any] = await response.json()
        return receipt


def turns_table(turns: list[TurnShown]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("turn", "route", "reason", "workers", "cached/new", "TTFT", "TPOT", "answer"):
        table.add_column(column, no_wrap=True)
    for turn in turns:
        table.add_row(*turn.cells())
    return table


async def _demo(console: Console, spec: FleetSpec, once: bool) -> None:
    started = time.monotonic()
    async with Fleet(spec) as fleet:
        with console.status(f"starting {sum(spec.workers.values())} workers on the {spec.engine} engine"):
            await fleet.wait_ready(READY_S[spec.engine])
        show(console, fleet, spec)
        console.print(f"ready after {time.monotonic() - started:.1f} s\n")
        console.print(turns_table(await play(fleet.url)))
        if once:
            return
        console.print("\nThe fleet stays up: Ctrl-C ends it. Ask it something:")
        body = json.dumps({"model": spec.model or "sim", "messages": [{"role": "user", "content": "hi"}]})
        console.print(f"  curl {fleet.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
        await until_signal(fleet)


@click.command("demo")
@click.option("--engine", type=click.Choice(["sim", "vllm"]), default="sim", show_default=True)
@click.option("--model", default="", help="folder or name; default: a tiny model made here, on CPUs")
@click.option("--once", is_flag=True, help="end after the conversation")
def command(engine: str, model: str, once: bool) -> None:
    """Start 1 P, 2 D, 1 R and the proxy, and play a three-turn conversation through them."""
    console = Console()
    workers = {Role.PREFILL: 1, Role.DECODE: 2, Role.REPLICA: 1}
    spec = make_spec(
        console, engine, model, workers, admin_key=ADMIN_KEY, log_dir=Path(tempfile.mkdtemp(prefix="ppd-demo-"))
    )
    guarded(_demo(console, spec, once))
