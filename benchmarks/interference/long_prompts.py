"""How long does a short prompt wait on an engine that computes a long one, by what it computes of that in a step?

    python -m benchmarks.interference.long_prompts                   # real vLLM on CPU with the tiny model
    python -m benchmarks.interference.long_prompts --caps 0 128 64

An engine of real vLLM computes at most 256 tokens in a step; of one prompt it computes at most the cap while there are
other requests (`--long-prefill-token-threshold`; 0: no cap). A prompt of 600 words is sent, and a short one 0.1 s
later, eight times. The medians of their TTFT, and that of short ones alone, in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp

from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.ports import free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.cpu_install import ensure
from ppd.servers.vllm.launch import TINY_ARGS, TINY_NAME, EngineSpec, command
from ppd.servers.vllm.tiny_model import ensure_model

STEP_TOKENS = 256
WORDS = 600
SHORT_LATER_S = 0.1
ROUNDS = 8
_STARTS_S = 600.0


@dataclass(frozen=True, slots=True)
class Waits:
    """TTFT in seconds, one a round."""

    beside_s: list[float] = field(default_factory=list)  # of short prompts, while a long one is computed
    long_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)

    def row(self, cap: int) -> str:
        figures = "".join(f"{median(times) * 1000:>14.0f}" for times in (self.beside_s, self.long_s, self.alone_s))
        return f"{cap:>8}{figures}"


async def ttft_s(session: aiohttp.ClientSession, url: str, prompt: str) -> float:
    body = {"model": TINY_NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    began_s = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data:"):
                return time.monotonic() - began_s
    raise ConnectionError(f"{url}: an answer without an event")


async def measured(url: str) -> Waits:
    waits = Waits()
    async with aiohttp.ClientSession() as session:
        await ttft_s(session, url, "The first request compiles.")
        for number in range(ROUNDS):
            long = asyncio.create_task(ttft_s(session, url, f"{number} " + "alpha beta gamma delta " * (WORDS // 4)))
            await asyncio.sleep(SHORT_LATER_S)
            waits.beside_s.append(await ttft_s(session, url, f"hello {number}"))
            waits.long_s.append(await long)
            waits.alone_s.append(await ttft_s(session, url, f"and {number}"))
    return waits


async def run(caps: Sequence[int]) -> None:
    environment = ensure(print)
    model = ensure_model(environment)
    print(f"{'cap':>8}{'short, beside':>14}{'long':>14}{'short, alone':>14}")
    with tempfile.TemporaryDirectory() as folder:
        for cap in caps:
            flags = ("--max-num-batched-tokens", str(STEP_TOKENS), "--long-prefill-token-threshold", str(cap))
            (port,) = free_ports(1)
            spec = EngineSpec(
                role=Role.REPLICA,
                model=str(model),
                served_model_name=TINY_NAME,
                port=port,
                device="cpu",
                extra_args=(*TINY_ARGS, *flags),
                python=str(environment.python),
            )
            url = f"http://{spec.address}"
            async with EngineProcess(command(spec), Path(folder) / f"{cap}.log", name="R") as engine:
                await engine.wait_healthy(url, timeout_s=_STARTS_S)
                print((await measured(url)).row(cap), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a short prompt waits for a long one, on real vLLM.")
    parser.add_argument("--caps", type=int, nargs="+", default=[0, 64], help="tokens of one prompt in a step; 0: all")
    asyncio.run(run(parser.parse_args().caps))


if __name__ == "__main__":
    main()
