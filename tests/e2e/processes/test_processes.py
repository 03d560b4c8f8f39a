"""Several processes behave as one proxy: what one learns, the others know before they need it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.launch import running_engine
from tests.support.processes import LONG, proxy_group
from tests.support.serve_program import Program, serving, until


@pytest.mark.parametrize("mode", [Mode.ALWAYS_LOCAL, Mode.ALWAYS_SPLIT, Mode.REPLICA])
async def test_turns_on_any_process_continue_the_session(mode: Mode) -> None:
    names = "R1 R2" if mode is Mode.REPLICA else "P1 D1 D2 D3"
    async with proxy_group(names, 3, mode=mode) as group:
        draw = random.Random(5)
        chats = [group.chat() for _ in range(12)]
        homes = [set[str]() for _ in chats]
        for number in range(1, 5):
            turns = await asyncio.gather(
                *(chat.at(group.proxies[draw.randrange(3)], f"{id(chat)} {number} {LONG}") for chat in chats)
            )
            for home, turn in zip(homes, turns, strict=True):
                assert turn.status == 200
                home.add(turn.headers["X-PPD-Decode"])
                receipt = await group.proxies[0].receipt(turn)
                assert (receipt["turn"], receipt["kind"]) == (number, "first" if number == 1 else "next")
        assert all(len(home) == 1 for home in homes)
        assert len(set.union(*homes)) > 1
        await group.until(group.idle)


async def test_a_successor_knows_what_its_predecessor_knew_and_counts_on() -> None:
    async with proxy_group("P1 D1 D2") as group:
        chat = group.chat()
        first = await chat.at(group.proxies[1], f"first {LONG}")
        route = first.headers["X-PPD-Route"]
        turns = f'ppd_turn_outcomes_total{{outcome="completed",route="{route}"}}'
        assert await group.proxies[0].metric(turns) == 1
        await group.stop(1)
        newcomer = await group.start(1)
        await group.chat().at(newcomer, f"another {LONG}")
        second = await chat.at(newcomer, f"second {LONG}")
        assert second.headers["X-PPD-Decode"] == first.headers["X-PPD-Decode"]
        receipt = await newcomer.receipt(second)
        assert (receipt["turn"], receipt["kind"], receipt["cached_tokens"] > 0) == (2, "next", True)
        assert [await one.metric(turns) for one in group.proxies.values()] == [2, 2]


class Talks:
    """Conversations whose turns come to any process."""

    def __init__(self, program: Program) -> None:
        self.url = f"{program.base_url}/v1/chat/completions"
        self.session = program.session
        self.prompt_tokens = self.cached_tokens = self.done = self.lost = 0

    def have_done(self, turns: int) -> bool:
        return self.done >= turns

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    async def hold(self, number: int, turns: int, gate: asyncio.Semaphore) -> None:
        messages: list[dict[str, str]] = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{number} {turn} {LONG}"})
            async with gate:
                answer = await self.ask({"model": "sim", "messages": messages, "max_tokens": 4, "temperature": 0})
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            self.prompt_tokens += answer["usage"]["prompt_tokens"]
            self.cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.done += 1

    async def ask(self, body: dict[str, Any]) -> Any:
        """As clients do: again, where the connection broke before there was an answer."""
        while True:
            try:
                async with self.session.post(self.url, json=body) as response:
                    assert response.status == 200, await response.text()
                    return await response.json()
            except aiohttp.ClientConnectionError:
                self.lost += 1


async def hit_ratio_of(folder: Path, processes: int, victims: tuple[int, ...] = ()) -> float:
    """Of 500 conversations; the victims are killed one after the other, by their places among the processes."""
    async with AsyncExitStack() as stack:
        config = SimConfig(time_scale=0.01, num_blocks=1 << 17)
        engines = {
            role: await stack.enter_async_context(running_engine(replace(config, role=Role(role[0]))))
            for role in ("P", "D", "D2")
        }
        workers = [f"{role[0]}={engine.address}" for role, engine in engines.items()]
        program = await stack.enter_async_context(serving(folder, workers, processes, "--mode", "always_local"))
        talks, gate = Talks(program), asyncio.Semaphore(16)
        holding = [asyncio.create_task(talks.hold(number, 3, gate)) for number in range(500)]
        for count, victim in enumerate(victims, 1):
            await until(partial(talks.have_done, count * 400))
            os.kill(program.children()[victim], signal.SIGKILL)
        await asyncio.gather(*holding)
        await until(lambda: processes == 1 or len(program.children()) == processes)
        program.process.terminate()
        assert await asyncio.wait_for(program.process.wait(), 60) == 0, (folder / "log").read_text()
        print(f"{processes} processes, {len(victims)} killed: {talks.hit_ratio:.4f}, sent again {talks.lost}")
        return talks.hit_ratio


async def test_500_conversations_hit_as_often_over_three_processes_as_over_one(tmp_path: Path) -> None:
    """While one of them is killed and another takes its place, the one that watches the workers too."""
    alone = await hit_ratio_of(tmp_path, 1)
    assert alone > 0.45
    assert abs(await hit_ratio_of(tmp_path, 3, (1, 0)) - alone) < 0.01
