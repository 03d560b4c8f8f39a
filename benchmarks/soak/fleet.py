"""The proxy and the simulated engines of a soak, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ppd.proxy.errors import PPDError
from ppd.servers.fleet.ports import free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.launch import Launch

from .engines import HOST, SPARE, SoakEngines

ADMIN_KEY = "operator"
LEASE_S = 8.0  # the proxy may be paused for longer
POISON = "the prompt of death"
_STARTS_S = 60.0
_DIES_S = 1.0  # an engine that has just been killed is seen to have ended
_NOT_HELD = ("0A", "06", "03")  # listening, TIME_WAIT, SYN_RECV
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})? (\S+)")

# Small enough that conversations evict each other's KV; a long one still fits.
ENGINE_FLAGS = (
    *("--num-blocks", "2048", "--max-model-len", "16384", "--time-scale", "0.15"),
    *("--lease-s", f"{LEASE_S:g}", "--meeting-timeout-s", f"{LEASE_S:g}", "--fatal-text", POISON),
)
# Tables that are full within a minute, so that filling them is not taken for a leak, and time-outs of seconds.
SESSION_LIMIT = 300
PROXY_FLAGS = {
    "receipts-kept": 500,
    "session-limit": SESSION_LIMIT,
    "probe-interval-s": 1.0,
    "connect-timeout-s": 1.0,
    "prefill-timeout-s": 3.0,
    "handoff-max-age-s": 5.0,  # of the 8 s of the lease
    "first-event-timeout-s": 3.0,
    "answer-timeout-s": 8.0,
    "idle-timeout-s": 10.0,
    "warm-up-s": 2.0,
    "breaker-open-s": 1.0,
    "canary-interval-s": 10.0,
}


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine's ports, which stay when its process is replaced."""

    name: str
    port: int
    side_port: int

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"


class FleetDamaged(Exception):
    """A fault did more harm than it may."""


class SoakFleet:
    """Owns the processes. Engines are registered with the proxy through its admin API."""

    def __init__(
        self,
        folder: Path,
        session: aiohttp.ClientSession,
        kind: SoakEngines,
        *,
        processes: int = 1,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """tls: by which `session` trusts the certificate in `folder`, which is every server's; None: plain HTTP."""
        ports = iter(free_ports(2 * len(kind.names) + 3))
        self.addresses = {name: EngineAddress(name, next(ports), next(ports)) for name in (*kind.names, SPARE)}
        self._port = next(ports)
        self._folder = folder
        self._session = session
        self._kind, self._tls = kind, tls
        self._engines: dict[str, EngineProcess] = {}
        self._lives = 0
        self.proxy_log = folder / "proxy.log"
        self._pid_file = folder / "proxy.pid"
        self._config_file, self._clock_file = folder / "ppd.toml", folder / "clock"
        self.change_config("table")
        self.set_clock(0.0)
        flags = [item for name, value in PROXY_FLAGS.items() for item in (f"--{name}", str(value))]
        argv = [sys.executable, "-m", "benchmarks.soak.stepped_clock", str(self._clock_file), "serve"]
        argv += ["--port", str(self._port), "--heartbeat-port", "0", "--processes", str(processes), *flags]
        argv += ["--config", str(self._config_file)]
        argv += ["--receipt-log", str(folder / "receipts.jsonl")]
        self._scheme = "http" if tls is None else "https"
        self.url = f"{self._scheme}://{HOST}:{self._port}"
        if tls is not None:
            certificate, key = map(str, certificate_in(folder))
            argv += ["--tls-cert-file", certificate, "--tls-key-file", key, "--worker-ca-file", certificate]
        with_pid = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._pid_file), *argv)
        env = {"PPD_ADMIN_KEY": ADMIN_KEY, "PYTHONWARNINGS": "default"}
        self.proxy = EngineProcess(Launch(with_pid, env), self.proxy_log, name="proxy")

    @property
    def client_connections(self) -> int:
        """Open connections to the proxy. The admin client closes each of its own after one request."""
        return connections(self._port)

    @property
    def proxy_pids(self) -> list[int]:
        """The proxy's process, or its supervisor and its processes."""
        first = int(self._pid_file.read_text())
        children = Path(f"/proc/{first}/task/{first}/children").read_text()
        return [first, *map(int, children.split())]

    @property
    def running(self) -> list[EngineAddress]:
        return [self.addresses[name] for name, engine in self._engines.items() if engine.is_running]

    async def start(self) -> None:
        await self.proxy.start()
        await asyncio.gather(
            self.proxy.wait_healthy(self.url, timeout_s=_STARTS_S, tls=self._tls),
            *(self.start_engine(name) for name in self._kind.names),
        )
        for name in self._kind.names:
            await self.register(name)
        await self.all_up()

    async def stop(self) -> int | None:
        code = await self.proxy.stop()
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))
        return code

    async def start_engine(self, name: str) -> None:
        engine_address = self.addresses[name]
        self._lives += 1
        argv = [*_ppd("sim"), "--role", name[0], "--port", str(engine_address.port), "--allow-faults", *ENGINE_FLAGS]
        argv += ["--side-channel-port", str(engine_address.side_port)]
        if name in ("D2", SPARE):
            argv += ["--kv-load-failure-policy", "recompute"]
        argv += self._kind.flags(name)
        if self._tls is not None:
            certificate, key = map(str, certificate_in(self._folder))
            argv += ["--ssl-certfile", certificate, "--ssl-keyfile", key]
        engine = EngineProcess(Launch(tuple(argv), {}), self._folder / f"{name}-{self._lives}.log", name=name)
        self._engines[name] = engine
        await engine.start()
        await engine.wait_healthy(self._url(name), timeout_s=_STARTS_S, tls=self._tls)

    async def kill_engine(self, name: str) -> None:
        await self._engines[name].kill()

    async def stop_engine(self, name: str) -> None:
        await self._engines[name].stop()

    async def register(self, name: str, role: str = "") -> None:
        engine = self.addresses[name]
        told = f"{role or name[0]}={engine.address}{self._kind.told(name, engine.side_port)}"
        if self._tls is not None:
            told += ",tls=true"
        await self.admin("POST", "/workers", {"worker": told})

    async def remove(self, name: str) -> None:
        await self.admin("DELETE", f"/workers/{self.addresses[name].address}")

    async def drain(self, name: str, *, draining: bool) -> None:
        await self.admin("PATCH", f"/workers/{self.addresses[name].address}", {"draining": draining})

    def signal_proxy(self, number: signal.Signals) -> None:
        for pid in self.proxy_pids:
            os.kill(pid, number)

    def spoil_config(self) -> None:
        """As an editor or a full disk leaves it: half of it is there, or nothing."""
        text = self._config_file.read_text()
        self._config_file.write_text(text[: len(text) // 2])

    def change_config(self, mode: str, *, prefills_answer: bool = False) -> None:
        """prefills_answer: whether P stand in where no D and no R can answer."""
        text = f'mode = "{mode}"\nw_ttft = 1.0\nw_tpot = 1.0\nprefills_answer = {prefills_answer}\n'
        self._config_file.write_text("")
        self._config_file.write_text(text.lower())

    def set_clock(self, off_s: float) -> None:
        self._clock_file.write_text(f"{off_s:g}")

    async def ask_poisoned(self, for_s: float) -> None:
        """A prompt that kills engines, asked again at once whenever it fails, as client libraries do."""
        body = {"model": "sim", "messages": [{"role": "user", "content": POISON}], "max_tokens": 8}
        with suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                while True:
                    async with self._session.post(f"{self.url}/v1/chat/completions", json=body) as answer:
                        await answer.read()
                    await asyncio.sleep(0.2)

    async def revive_engines(self) -> None:
        """Starts the engines that have ended by themselves; FleetDamaged if there are more than may."""
        await asyncio.sleep(_DIES_S)
        dead = [name for name, engine in self._engines.items() if engine.returncode not in (None, 0)]
        for name in dead:
            await self._engines[name].stop()
            await self.start_engine(name)
        if len(dead) > self._kind.most_poisoned:
            raise FleetDamaged(f"one prompt killed {', '.join(dead)}")

    async def order_faults(self, name: str, faults: dict[str, Any]) -> None:
        async with self._session.post(f"{self._url(name)}/faults", json=faults) as answer:
            answer.raise_for_status()

    async def all_up(self, limit_s: float = LEASE_S + 40.0) -> None:
        """Waits until all but `SPARE` are known, and all known ones up, which may take until a lease has ended."""
        async with asyncio.timeout(limit_s):
            while True:
                workers = (await self.admin("GET", "/workers"))["workers"]
                states = {worker["id"]: worker["state"] for worker in workers}
                if (
                    set(states.values()) == {"up"}
                    and {self.addresses[name].address for name in self._kind.names} <= states.keys()
                ):
                    return
                await asyncio.sleep(0.2)

    async def unused(self, name: str, limit_s: float = LEASE_S + 10.0) -> None:
        """Waits until the proxy has nothing for it to do. A D may yet get a turn whose prompt is at its P."""
        async with asyncio.timeout(limit_s):
            while any(worker[one] for worker in await self._known(name) for one in BOOKED):
                await asyncio.sleep(0.1)

    async def _known(self, name: str) -> list[dict[str, Any]]:
        workers = (await self.admin("GET", "/workers"))["workers"]
        return [worker for worker in workers if worker["id"] == self.addresses[name].address]

    async def idle(self, name: str, limit_s: float = LEASE_S + 10.0) -> None:
        async with asyncio.timeout(limit_s):
            while any((await self.engine_metrics(name, ENGINE_GAUGES)).values()):
                await asyncio.sleep(0.1)

    async def admin(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"X-Admin-Key": ADMIN_KEY}
        async with self._session.request(method, f"{self.url}/admin{path}", json=body, headers=headers) as answer:
            answer.raise_for_status()
            return await answer.json()

    async def engine_metrics(self, name: str, wanted: Iterable[str]) -> dict[str, float]:
        return await self._metrics(self._url(name), wanted)

    def _url(self, name: str) -> str:
        return f"{self._scheme}://{self.addresses[name].address}"

    async def proxy_metrics(self, wanted: Iterable[str]) -> dict[str, float]:
        return await self._metrics(self.url, wanted)

    async def _metrics(self, url: str, wanted: Iterable[str]) -> dict[str, float]:
        async with self._session.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=5)) as answer:
            return samples(await answer.text(), re.compile("|".join(wanted)))


BOOKED = ("inflight", "decoding_sequences", "queued_prefill_tokens")
ENGINE_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting$", "vllm:kv_cache_usage_perc")


def samples(text: str, wanted: re.Pattern[str]) -> dict[str, float]:
    """Values by name and labels, of the samples whose name matches `wanted` from its start."""
    found = (_SAMPLE.match(line) for line in text.splitlines())
    return {
        match[1] + (f"{{{match[2]}}}" if match[2] else ""): float(match[3])
        for match in found
        if match is not None and wanted.match(match[1])
    }


@asynccontextmanager
async def running_fleet(
    folder: Path, session: aiohttp.ClientSession, kind: SoakEngines, *, processes: int, tls: ssl.SSLContext | None
) -> AsyncIterator[SoakFleet]:
    """EngineFailed if a process does not start."""
    async with AsyncExitStack() as stack:
        fleet = SoakFleet(folder, session, kind, processes=processes, tls=tls)
        stack.push_async_callback(fleet.stop)
        await fleet.start()
        yield fleet


def loopback_certificate(folder: Path) -> tuple[Path, Path]:
    """Makes one that is self-signed and valid for a day; where it and its key lie. PPDError without openssl."""
    certificate, key = certificate_in(folder)
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(key))
    names = ("-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}")
    command = ["openssl", "req", "-x509", *curve, *names, "-days", "1", "-out", str(certificate)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise PPDError(f"openssl makes no certificate: {done.stderr.strip()}")
    return certificate, key


def certificate_in(folder: Path) -> tuple[Path, Path]:
    """Where the certificate and its key lie."""
    return folder / "cert.pem", folder / "key.pem"


def rss_kib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def connections(port: int) -> int:
    """Connections that a program on this machine still holds on its own port, even if the client has closed them."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(row[1].endswith(f":{port:04X}") and row[3] not in _NOT_HELD for row in rows)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _ppd(command: str) -> list[str]:
    return [sys.executable, "-m", "ppd.servers", command]
