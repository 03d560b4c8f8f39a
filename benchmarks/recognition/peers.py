"""Other routers as programs, in the same virtual time: each chooses by what it sees of real requests on real sockets.

A request goes through the router to one of four small servers, one a worker, which hold it until the turn has ended in
virtual time. So the router's count of what runs where is right, and engines need no model of their own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import aiohttp
from aiohttp import web
from msgspec.structs import replace

from ppd.proxy.openai.request import Endpoint
from ppd.proxy.policy import Route
from ppd.servers.fleet.ports import free_ports

from ..overhead.native import cache_folder
from ..overhead.processes import HOST, Program, assign_cores
from ..overhead.subjects import SubjectPorts, subject
from .engines.workers import TimedWorker
from .requests import MODEL, Asked
from .routing import Placed, Usage

_QUIET = logging.getLogger(__name__)  # routers try HTTP/2 first, which aiohttp would report at length
_QUIET.setLevel(logging.CRITICAL)
START_S, STEP_S = 60.0, 30.0
_ABOUT = {"model_path": MODEL, "served_model_name": MODEL, "model_id": MODEL, "tokenizer_path": "", "dp_size": 1}
_ABOUT |= {"is_generation": True, "tp_size": 1, "version": "0.24.0"}


class HeldRequests:
    """The workers' servers and the router's client, on a loop of their own."""

    def __init__(self, workers: int) -> None:
        self.ports: list[int] = []
        self._workers = workers
        self._runners: list[web.AppRunner] = []
        self._arrived: asyncio.Queue[tuple[int, asyncio.Event]] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.wait(self._open())

    def wait(self, step: Coroutine[Any, Any, Any]) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(step, self._loop)
        return future.result(STEP_S)

    def close(self) -> None:
        self.wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def sent(self, url: str, body: bytes) -> tuple[int, Callable[[], Coroutine[Any, Any, None]]]:
        """The number of the worker that the router has sent it to, and what ends the answer."""
        asking = asyncio.ensure_future(self._ask(url, body))
        arriving = asyncio.ensure_future(self._arrived.get())
        await asyncio.wait((asking, arriving), return_when=asyncio.FIRST_COMPLETED)
        if not arriving.done():
            arriving.cancel()
            raise RuntimeError(f"the router refused a request: {asking.result()}")
        worker, held = arriving.result()

        async def end() -> None:
            held.set()
            await asking

        return worker, end

    async def is_healthy(self, url: str) -> bool:
        try:
            async with self._client.get(f"{url}/v1/models") as response:
                return response.status == 200 and MODEL in await response.text()
        except aiohttp.ClientError:
            return False

    async def _ask(self, url: str, body: bytes) -> str:
        headers = {"content-type": "application/json"}
        async with self._client.post(f"{url}{Endpoint.CHAT}", data=body, headers=headers) as response:
            return f"{response.status} {await response.text()}"

    async def _open(self) -> None:
        self._client = aiohttp.ClientSession()
        for number in range(self._workers):
            app = web.Application(client_max_size=2**28)
            app.router.add_post(Endpoint.CHAT, self._holding(number))
            app.router.add_get("/v1/models", _models)
            app.router.add_get("/{path:.*}", _about)
            runner = web.AppRunner(app, logger=_QUIET)
            await runner.setup()
            await web.TCPSite(runner, HOST, 0).start()
            self._runners.append(runner)
            self.ports.append(runner.addresses[0][1])

    async def _close(self) -> None:
        await self._client.close()
        for runner in self._runners:
            await runner.cleanup()

    def _holding(self, number: int) -> Callable[[web.Request], Coroutine[Any, Any, web.Response]]:
        async def hold(request: web.Request) -> web.Response:
            await request.read()
            held = asyncio.Event()
            self._arrived.put_nowait((number, held))
            await held.wait()
            return web.Response(body=b"data: [DONE]\n\n", content_type="text/event-stream")

        return hold


class PeerRouting:
    """A router in front of replicas, by its policy `cache_aware`."""

    def __init__(self, name: str, workers: Sequence[TimedWorker], stack: ExitStack) -> None:
        self._workers = workers
        self._held = HeldRequests(len(workers))
        stack.callback(self._held.close)
        port, metrics = free_ports(2)
        ports = SubjectPorts(port, metrics, self._held.ports[0], self._held.ports[0])
        argv = subject(f"{name}:cache_aware", cache_folder()).plain(ports)
        argv += [f"http://{HOST}:{port}" for port in self._held.ports[1:]]
        log = Path(stack.enter_context(TemporaryDirectory())) / "log"
        program = stack.enter_context(Program(argv, assign_cores(range(2)).proxy, log))
        self._url = f"http://{HOST}:{port}"
        until_s = monotonic() + START_S
        while not self._held.wait(self._held.is_healthy(self._url)):
            if program.has_ended or monotonic() > until_s:
                raise RuntimeError(f"{name} does not start: {log.read_text()[-2000:]}")
            self._held.wait(asyncio.sleep(0.2))

    def place(self, asked: Asked, keys: Sequence[int], prompt_tokens: int) -> Placed:
        body = replace(asked, endpoint=Endpoint.CHAT).body()
        worker, end = self._held.wait(self._held.sent(self._url, body))

        def completed(usage: Usage) -> None:
            self._held.wait(end())

        return Placed(route=Route.REPLICA, decode=self._workers[worker], completed=completed)


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]})


async def _about(request: web.Request) -> web.Response:
    return web.json_response(_ABOUT)
