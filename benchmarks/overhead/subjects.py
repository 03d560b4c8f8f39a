"""The subjects and their command lines: in front of one D, and in front of a P and a D.

A peer by its name alone chooses workers by `round_robin`, the cheapest of its policies; `PEER:POLICY` has another one.
Those that a user would run in PPD's place know sessions: `cache_aware`, the peers' default, looks for a known prefix as
PPD does, and `consistent_hash` keeps a session where it is. PPD runs with its defaults, except limits that are lower
than the load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from ppd.proxy.errors import ConfigError

from .peers import PEERS, program
from .processes import HOST

DIRECT = "direct"
PPD = "ppd"
PPD_TWICE = "ppd x 2"  # two processes on one core: the cost of sharing state
BEFORE = "ppd before"  # another build of PPD, which the run is told of
BLIND = "round_robin"  # the policy of a peer that none is named of
AWARE = (  # of sessions
    "vllm-router:cache_aware",
    "vllm-router:consistent_hash",
    "sglang-router:cache_aware",
    "smg:cache_aware",
)
SUBJECTS = (DIRECT, PPD, PPD_TWICE, *PEERS, *AWARE)
_STREAMS = "32768"  # more than any row has open


class FleetKind(StrEnum):
    """`PLAIN`: every timed request is one leg. `PAIR`: each is prefilled on P and decoded on D (NIXL)."""

    PLAIN = "plain"
    PAIR = "pair"


@dataclass(frozen=True, slots=True)
class SubjectPorts:
    """Of the proxy, of its metrics, and of the mock backend as P and as D."""

    port: int
    metrics: int
    prefill: int
    decode: int

    @property
    def prefill_url(self) -> str:
        return f"http://{HOST}:{self.prefill}"

    @property
    def decode_url(self) -> str:
        return f"http://{HOST}:{self.decode}"


Command = Callable[[SubjectPorts], list[str]]


@dataclass(frozen=True, slots=True)
class Subject:
    """`pair` is None for a router that does not ask P before D, as NIXL needs; `why_not` says what it does."""

    name: str
    plain: Command
    pair: Command | None = None
    why_not: str = ""

    def command(self, fleet: FleetKind) -> Command | None:
        return self.plain if fleet is FleetKind.PLAIN else self.pair


def subject(name: str, cache: Path, ppd_args: Sequence[str] = ()) -> Subject:
    """name: any of SUBJECTS but DIRECT."""
    if name in (PPD, PPD_TWICE):
        return several(1 if name == PPD else 2, ppd_args)
    peer, _, policy = name.partition(":")
    path, policy = str(program(cache, peer)), policy or BLIND
    match peer:
        case "vllm-router":
            return Subject(name, partial(_vllm_plain, path, policy), partial(_vllm_pair, path, policy))
        case _:
            why = "asks P and D at once, SGLang's order"
            return Subject(name, partial(_sglang, path, policy), why_not=why)


def several(processes: int, ppd_args: Sequence[str] = ()) -> Subject:
    more = (*ppd_args, "--processes", str(processes)) if processes > 1 else ppd_args
    return _build(f"{PPD} x {processes}" if processes > 1 else PPD, Path(sys.executable).with_name("ppd"), more)


def earlier(path: Path, ppd_args: Sequence[str] = ()) -> Subject:
    """path: the command `ppd` of the environment that the other build is installed in."""
    if not path.is_file():
        raise ConfigError(f"before = {path}: must be the command `ppd` of another environment")
    return _build(BEFORE, path, ppd_args)


def _build(name: str, path: Path, more: Sequence[str]) -> Subject:
    return Subject(name, lambda ports: _ppd(path, ports, more), lambda ports: _ppd(path, ports, more))


def _ppd(path: Path, ports: SubjectPorts, more: Sequence[str]) -> list[str]:
    """The same for both fleets: first turns are SPLIT, later ones LOCAL where the table says so."""
    argv = [str(path), "serve", "--port", str(ports.port), "--heartbeat-port", "0"]
    argv += ["--workers", f"P={HOST}:{ports.prefill}", "--workers", f"D={HOST}:{ports.decode}"]
    for limit in ("connections-per-address", "max-inflight", "max-worker-inflight"):
        argv += [f"--{limit}", _STREAMS]
    return [*argv, "--warm-up-s", "0", "--log-level", "warning", *more]


def _vllm_router(path: str, policy: str, ports: SubjectPorts) -> list[str]:
    argv = [path, "--host", HOST, "--port", str(ports.port), "--prometheus-port", str(ports.metrics)]
    argv += ["--worker-startup-check-interval", "1", "--max-concurrent-requests", _STREAMS]
    return [*argv, "--policy", policy, "--log-level", "warning"]


def _vllm_plain(path: str, policy: str, ports: SubjectPorts) -> list[str]:
    return [*_vllm_router(path, policy, ports), "--worker-urls", ports.decode_url]


def _vllm_pair(path: str, policy: str, ports: SubjectPorts) -> list[str]:
    argv = [*_vllm_router(path, policy, ports), "--vllm-pd-disaggregation"]
    return [*argv, "--prefill", ports.prefill_url, "--decode", ports.decode_url]


def _sglang(path: str, policy: str, ports: SubjectPorts) -> list[str]:
    """sglang-router, and smg, which was made from it."""
    argv = [path, "launch", "--host", HOST, "--port", str(ports.port), "--prometheus-port", str(ports.metrics)]
    argv += ["--worker-startup-check-interval", "1", "--max-concurrent-requests", _STREAMS]
    return [*argv, "--policy", policy, "--log-level", "warn", "--worker-urls", ports.decode_url]
