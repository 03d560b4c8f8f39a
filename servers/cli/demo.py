"""`ppd demo`: a fleet, and a three-turn conversation played through it with OpenAI's client."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import click
from click.core import ParameterSource
from rich.console import Console

from ..fleet.fleet import FleetSpec, LocalFleet
from ..fleet.ports import free_offset, free_ports, is_free
from .up import READY_S, fleet_options, fleet_spec, run, show, with_topology

CONVERSATION = Path(__file__).with_name("demo_conversation.json")
ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TurnShown:
    """One line of the demo, from the proxy's receipt of the turn."""

    number: int
    receipt: dict[str, Any]

    def line(self) -> str:
        r = self.receipt
        workers = f"{r['prefill']}->{r['decode']}" if r["prefill"] else r["decode"]
        cached = r["cached_tokens"] or 0
        ttft, tpot = f"{r['ttft_s'] * 1000:.0f} ms", "-" if r["tpot_s"] is None else f"{r['tpot_s'] * 1000:.1f} ms"
        tokens = f"{cached}/{r['prompt_tokens'] - cached}"
        return f"{self.number:<6}{r['route']:<9}{r['reason']:<19}{workers:<9}{tokens:<13}{ttft:<9}{tpot:<9}"


HEADING = f"{'turn':<6}{'route':<9}{'reason':<19}{'workers':<9}{'cached/new':<13}{'TTFT':<9}{'TPOT':<9}"


async def play(base_url: str, model: str, admin_key: str) -> AsyncIterator[TurnShown]:
    from openai import AsyncOpenAI, AsyncStream, DefaultAsyncHttpxClient

    http = DefaultAsyncHttpxClient(trust_env=False)  # not through an HTTP_PROXY
    user_turns = json.loads(CONVERSATION.read_text())["user_turns"]
    messages: list[dict[str, str]] = []
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="demo", max_retries=0, http_client=http) as client:
        for number, text in enumerate(user_turns, 1):
            messages.append({"role": "user", "content": text})
            raw = await client.chat.completions.with_raw_response.create(
                model=model,
                messages=messages,
                max_tokens=ANSWER_TOKENS,
                temperature=0,
                stream=True,
            )
            stream = raw.parse()
            assert isinstance(stream, AsyncStream), "stream=True"
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            answer = "".join(parts)
            messages.append({"role": "assistant", "content": answer})
            yield TurnShown(number, await _receipt(base_url, raw.headers["X-Request-Id"], admin_key))


async def _receipt(base_url: str, request_id: str, admin_key: str) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(headers={"X-Admin-Key": admin_key}) as session,
        session.get(f"{base_url}/admin/requests/{request_id}") as response,
    ):
        response.raise_for_status()
        receipt: dict[str, Any] = await response.json()
        return receipt


async def _demo(console: Console, spec: FleetSpec, once: bool) -> None:
    from openai import OpenAIError

    started = time.monotonic()
    async with LocalFleet(spec) as fleet:
        with console.status(f"starting {sum(spec.workers.values())} workers on the {spec.engine} engine"):
            await fleet.wait_ready(READY_S[spec.engine])
        show(fleet)
        click.echo(f"ready after {time.monotonic() - started:.1f} s\n")
        click.echo(HEADING)
        try:
            async for turn in play(fleet.url, spec.prepared.name, spec.admin_key):
                click.echo(turn.line())
        except OpenAIError as exc:  # as where the fleet has nobody who answers, or the model too little context
            raise click.ClickException(f"a turn failed: {exc}") from exc
        if once:
            return
        body = json.dumps({"model": spec.prepared.name, "messages": [{"role": "user", "content": "hi"}]})
        click.echo("\nThe fleet stays up: Ctrl-C ends it. Ask it something:")
        click.echo(f"  curl {fleet.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
        click.echo("Ask why the last turn went there:")
        ppd = sys.argv[0] if Path(sys.argv[0]).name == "ppd" else "ppd"  # as it was called: often not on the PATH
        request_id = turn.receipt["id"]
        click.echo(f"  {ppd} why {request_id[:8]} --proxy {fleet.url} --admin-key {spec.admin_key}")
        await fleet.wait_ended()


def out_of_the_way(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags, where no port is asked for with free ones for what clients do not connect to."""
    ctx = click.get_current_context()

    def is_given(name: str) -> bool:
        return ctx.get_parameter_source(name) is not ParameterSource.DEFAULT

    changed: dict[str, Any] = {}
    if not is_given("heartbeat_port") and not is_free(flags["heartbeat_port"]):
        changed["heartbeat_port"] = free_ports(1)[0]
    if not is_given("port_offset"):
        changed["port_offset"] = ctx.with_resource(free_offset(flags["topology"].by_role))
    return {**flags, **changed}


@click.command("demo")
@fleet_options
@click.option("--once", is_flag=True, help="end after the conversation")
def command(once: bool, **flags: Any) -> None:
    """Start a fleet (1 P, 2 D, 1 R) and the proxy, and play a three-turn conversation through them."""
    if importlib.util.find_spec("openai") is None:
        raise click.ClickException("the demo plays its conversation with OpenAI's client: pip install openai")
    console = Console()

    async def demo(spec: FleetSpec) -> None:
        # Its programs' logs. The last lines of one that ends are part of the error.
        with tempfile.TemporaryDirectory(prefix="ppd-demo-", ignore_cleanup_errors=True) as folder:
            await _demo(console, replace(spec, log_dir=Path(folder)), once)

    run(lambda: fleet_spec(console, **out_of_the_way(with_topology(flags))), demo)
