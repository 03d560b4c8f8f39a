"""Linux network namespaces with netem: one for each worker, with a pair of veth devices between it and the proxy.

This process and the proxy are in a namespace made by `unshare --net`, which ends with them. It routes between the
workers, so a KV transfer crosses the bad network twice. Needs root, iproute2 and the kernel's netem.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from contextlib import AsyncExitStack

from ppd.proxy.errors import PPDError

from .fault_link import Conditions

_PROBE = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
_CUT = ("loss", "100%")


class NetworkError(PPDError):
    """A command of iproute2 failed."""


def is_available() -> bool:
    try:
        probe = subprocess.run(["unshare", "--net", "sh", "-c", _PROBE], capture_output=True, check=False)
    except OSError:
        return False
    return probe.returncode == 0


def netem(conditions: Conditions) -> tuple[str, ...]:
    """Arguments of tc; empty for a network without fault. netem draws jitter evenly around the delay."""
    words: list[str] = []
    if conditions.latency_s or conditions.jitter_s:
        half_s = conditions.jitter_s / 2
        words += ["delay", f"{(conditions.latency_s + half_s) * 1e3:g}ms"]
        words += [f"{half_s * 1e3:g}ms"] if half_s else []
    if conditions.loss:
        words += ["loss", f"{conditions.loss * 100:g}%"]
    if conditions.bandwidth_bps:
        words += ["rate", f"{conditions.bandwidth_bps * 8:.0f}bit"]
    return tuple(words)


class Namespaces:
    name = "netem"

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._numbers: dict[str, int] = {}
        self._conditions = Conditions()

    async def open(self) -> None:
        await _run("ip", "link", "set", "lo", "up")
        await _run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    async def place(self, worker: str) -> tuple[str, tuple[str, ...]]:
        number = self._numbers[worker] = len(self._numbers) + 1
        space, near, far = self._space(worker), f"10.77.{number}.1", f"10.77.{number}.2"
        await _run("ip", "netns", "add", space)
        self._stack.push_async_callback(_run, "ip", "netns", "del", space)
        await _run("ip", "link", "add", self._device(worker), "type", "veth", "peer", "name", "eth0", "netns", space)
        await _run("ip", "addr", "add", f"{near}/24", "dev", self._device(worker))
        await _run("ip", "link", "set", self._device(worker), "up")
        await _run("ip", "-n", space, "addr", "add", f"{far}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            await _run("ip", "-n", space, "link", "set", device, "up")
        await _run("ip", "-n", space, "route", "add", "default", "via", near)
        return far, ("ip", "netns", "exec", space)

    async def connect(self, worker: str, port: int) -> str:
        return f"10.77.{self._numbers[worker]}.2:{port}"

    async def apply(self, conditions: Conditions) -> None:
        self._conditions = conditions
        for worker in self._numbers:
            await self._shape(worker, netem(conditions))

    async def cut_off(self, worker: str) -> None:
        await self._shape(worker, _CUT)

    async def heal(self, worker: str) -> None:
        await self._shape(worker, netem(self._conditions))

    async def reset(self) -> None:
        """Needs a kernel with CONFIG_INET_DIAG_DESTROY."""
        for number in self._numbers.values():
            await _run("ss", "-K", "dst", f"10.77.{number}.2")

    async def _shape(self, worker: str, words: tuple[str, ...]) -> None:
        # At both ends, because netem acts on what a device sends.
        ends = (("tc", self._device(worker)), ("tc", "-n", self._space(worker), "eth0"))
        for *tc, device in ends:
            if words:
                await _run(*tc, "qdisc", "replace", "dev", device, "root", "netem", *words)
            elif "netem" in await _run(*tc, "qdisc", "show", "dev", device):
                await _run(*tc, "qdisc", "del", "dev", device, "root")

    def _space(self, worker: str) -> str:
        return f"ppd-{os.getpid()}-{worker}"

    def _device(self, worker: str) -> str:
        return f"ppd{self._numbers[worker]}"


async def _run(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = await process.communicate()
    if process.returncode:
        raise NetworkError(f"{' '.join(argv)}: {output.decode(errors='replace').strip()}")
    return output.decode()
