"""`ppd serve --processes 2`: what one process has learned of answers, the other one knows, and their successors too."""

from __future__ import annotations

import os
import random
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.launch import running_engine
from tests.support.serve_program import Program, serving, until

DRAW = random.Random(3)


class Asking:
    """First turns over one connection, and so to one process."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._socket: socket.socket | None = None
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1, socket_factory=self._made))

    def _made(self, address: aiohttp.AddrInfoType) -> socket.socket:
        self._socket = made = socket.socket(*address[:3])
        made.setblocking(False)
        return made

    @property
    def process(self) -> int:
        assert self._socket is not None, "it has asked"
        return self._program.child_of(self._socket.getsockname()[1])

    async def error(self) -> float:
        """Of the estimate of a prompt's tokens, relative to what the engine has counted.

        The prompt is made of numbers: the simulated engine makes half as many tokens of them as others do.
        """
        text = " ".join(str(DRAW.randrange(10**8, 10**9)) for _ in range(300))
        body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        async with self.session.post(f"{self._program.base_url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            counted: int = (await response.json())["usage"]["prompt_tokens"]
        receipt = await self._program.admin("GET", f"/requests/{response.headers['X-Request-Id']}")
        estimated: int = receipt["estimated_prompt_tokens"]
        return abs(estimated / counted - 1)


async def test_what_one_process_learned_the_other_knows_and_their_successors_too(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running_engine(SimConfig(time_scale=0.01)))
        program = await stack.enter_async_context(serving(tmp_path, [f"R={engine.address}"], 2, "--mode", "replica"))

        async def asking() -> Asking:
            asking = Asking(program)
            await stack.enter_async_context(asking.session)
            return asking

        log, first = tmp_path / "log", await asking()
        errors = [await first.error() for _ in range(12)]
        assert (errors[0] > 0.3, errors[-1] < 0.03) == (True, True), errors
        learner = first.process
        (other,) = set(program.children()) - {learner}
        for joined, gone in enumerate((learner, other), 3):
            staying = set(program.children()) - {gone}
            os.kill(gone, signal.SIGKILL)
            await until(lambda gone=gone: gone not in program.children())  # type: ignore[misc]
            next_one = await asking()
            assert await next_one.error() < 0.03
            assert next_one.process in staying
            await until(lambda joined=joined: log.read_text().count("of this proxy serves") == joined)  # type: ignore[misc]
