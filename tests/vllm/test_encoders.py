"""Real E, P and D through the real proxy: KV by NIXL, embeddings over files by vLLM's own connector, or over Redis.

Over files `ppd agent` launches E, and the proxy learns of it by heartbeats alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.eviction.engines import tiny_engine
from ppd.proxy.config import EncoderUse, Mode
from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.ports import free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.cpu_install import ensure, unsupported_reason
from ppd.servers.vllm.encoder_parts import ensure_parts
from ppd.servers.vllm.launch import TINY_ARGS, TINY_NAME, EngineSpec, Launch, command
from ppd.servers.vllm.tiny_llava import ensure_llava
from tests.servers.ec_redis.redis_server import RedisServer
from tests.support.proxy import ProxyClient, Turn, running_proxy
from tests.vllm.conftest import START_S, with_env
from tests.vllm.nursery.launches import Born, interpreter
from tests.vllm.test_ec_redis import QUESTION, image, pushes, redis_cache

pytestmark = pytest.mark.asyncio(loop_scope="session")

EC_ROLES = {"E": "ec_producer", "P": "ec_consumer"}
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0}


@dataclass
class Engines:
    """D has no part in the encoders' cache, so asked by itself it is the replica that others are compared with."""

    session: aiohttp.ClientSession
    addresses: dict[str, str]
    embeddings: Callable[[], int]  # that E has given away so far
    heartbeat_port: int = 0  # where E's agent says that it is there; 0: the config names E

    async def straight(self, name: str, *seeds: int, uuid: str = "straight", asks: bool = True) -> str:
        """What the engine of this name answers without a proxy."""
        content = [image(seed, f"{uuid}-{seed}" if uuid == "straight" else uuid) for seed in seeds]
        body = {
            "model": TINY_NAME,
            "messages": [{"role": "user", "content": [*content, *([QUESTION] if asks else [])]}],
        }
        url = f"http://{self.addresses[name]}/v1/chat/completions"
        async with self.session.post(url, json=body | GREEDY) as response:
            assert response.status == 200, await response.text()
            text: str = (await response.json())["choices"][0]["message"]["content"] or ""
            return text


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engines(born: Born, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    """Over files."""
    shared = tmp_path_factory.mktemp("embeddings")  # a folder an item
    cache = {"ec_connector": "ECExampleConnector", "ec_connector_extra_config": {"shared_storage_path": str(shared)}}
    (port,) = free_ports(1)
    agent = Agent(port, shared, born)
    async with started(tmp_path_factory.mktemp("engines"), cache, born, agent) as (session, addresses):
        yield Engines(session, addresses, lambda: sum(1 for _ in shared.rglob("*.safetensors")), port)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def over_redis(born: Born, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    folder = tmp_path_factory.mktemp("over-redis")
    with RedisServer(folder) as server:
        async with started(folder, redis_cache(server.url), born) as (session, addresses):
            yield Engines(session, addresses, lambda: pushes(server.url))


@dataclass(frozen=True, slots=True)
class Agent:
    """Launches E, and announces it."""

    heartbeat_port: int
    embeddings: Path
    born: Born

    def launch(self, spec: EngineSpec, log: Path) -> Launch:
        argv = [sys.executable, "-m", "ppd.servers", "agent", "--role", "E", "--model", spec.model, "--device", "cpu"]
        argv += ["--port", str(spec.port), "--proxy", f"{spec.host}:{self.heartbeat_port}", "--interval", "0.5"]
        argv += ["--python", interpreter(log.parent, spec.python, self.born), "--log", str(log)]
        argv += ["--encoder-cache", str(self.embeddings)]
        return Launch((*argv, "--", "--served-model-name", TINY_NAME, *TINY_ARGS))


@asynccontextmanager
async def started(
    folder: Path, cache: dict[str, Any], born: Born, agent: Agent | None = None
) -> AsyncIterator[tuple[aiohttp.ClientSession, dict[str, str]]]:
    """E, P and D. cache: what `--ec-transfer-config` says of the encoders' cache; agent: E's, which says it itself."""
    if reason := unsupported_reason():
        pytest.skip(f"real vLLM is not tested here: {reason}")
    environment = ensure(print)
    parts, model = ensure_parts(environment, print), ensure_llava(environment)
    addresses, processes = {}, {}
    async with AsyncExitStack() as stack:
        for name, role in (("E", Role.REPLICA), ("P", Role.PREFILL), ("D", Role.DECODE)):
            spec = tiny_engine(role, model, environment.python, *encoder_args(name, cache))
            spec = replace(spec, connector="none" if name == "E" else spec.connector)
            launch = agent.launch(spec, folder / "E-engine.log") if agent and name == "E" else born(command(spec))
            launch = with_env(launch, {"PYTHONPATH": str(parts)})
            process = EngineProcess(launch, folder / f"{name}.log", name=name)
            processes[name] = await stack.enter_async_context(process)
            addresses[name] = spec.address
        healthy = (one.wait_healthy(f"http://{addresses[name]}", timeout_s=START_S) for name, one in processes.items())
        await asyncio.gather(*healthy)
        yield await stack.enter_async_context(aiohttp.ClientSession()), addresses


def encoder_args(name: str, cache: dict[str, Any]) -> tuple[str, ...]:
    """Of E and P; D computes no prompt with an image in it."""
    if name not in EC_ROLES:
        return ()
    return "--ec-transfer-config", json.dumps({"ec_role": EC_ROLES[name], **cache})


async def asked(engines: Engines, mode: Mode, workers: str, *seeds: int) -> list[Turn]:
    """One turn about each image, through a proxy whose workers are `R=P`: as R, the engine P."""
    named, port = [one.split("=") for one in workers.split()], engines.heartbeat_port
    told = tuple(
        f"{role}={engines.addresses[name]}{'' if role == 'E' else ',connector=nixl'}"
        for role, name in named
        if role != "E" or not port
    )
    settings: dict[str, Any] = {"mode": mode, "encoder": EncoderUse.ALWAYS, "probe_interval_s": 0.5}
    async with running_proxy(workers=told, heartbeat_port=port, **settings) as running:
        client = ProxyClient(*running, TINY_NAME)
        await client.until(lambda: list(client.states().values()) == ["up"] * len(named), 60)
        turns = []
        for seed in seeds:
            turn = await client.chat([{"role": "user", "content": [image(seed, "the client's"), QUESTION]}], **GREEDY)
            assert turn.status == 200, turn.body
            found = (await client.receipt(turn))["encoder"]
            assert (found["items"], [leg["error"] for leg in found["legs"]]) == (["image: encoded"], [None])
            turns.append(turn)
        return turns


async def test_the_embedding_is_the_encoders(engines: Engines) -> None:
    """P gets another image under the name, and tells of the one that E encoded."""
    await engines.straight("E", 5, uuid="swapped", asks=False)
    assert await engines.straight("P", 6, uuid="swapped") == await engines.straight("D", 5)
    assert await engines.straight("D", 5) != await engines.straight("D", 6)


@pytest.mark.parametrize(
    ("mode", "workers", "route", "seeds"),
    [(Mode.REPLICA, "E=E R=P", "REPLICA", (20, 21, 20)), (Mode.ALWAYS_SPLIT, "E=E P=P D=D", "SPLIT", (30, 31, 30))],
    ids=["E-PD", "E-P-D"],
)
async def test_the_text_is_a_replicas_and_another_image_is_another_text(
    engines: Engines, mode: Mode, workers: str, route: str, seeds: tuple[int, ...]
) -> None:
    before = engines.embeddings()
    turns = await asked(engines, mode, workers, *seeds)
    assert [turn.route for turn in turns] == [route] * len(seeds)
    assert engines.embeddings() - before == len(set(seeds)), "E has written each image's embedding once"
    assert [turn.text for turn in turns] == [await engines.straight("D", seed) for seed in seeds]
    assert len({turn.text for turn in turns}) == len(set(seeds))


async def test_over_redis_too(over_redis: Engines) -> None:
    before = over_redis.embeddings()
    turns = await asked(over_redis, Mode.ALWAYS_SPLIT, "E=E P=P D=D", 40, 41)
    assert [turn.route for turn in turns] == ["SPLIT", "SPLIT"]
    assert over_redis.embeddings() - before >= 2, "E has sent each image's embedding"
    assert [turn.text for turn in turns] == [await over_redis.straight("D", seed) for seed in (40, 41)]
    assert turns[0].text != turns[1].text
