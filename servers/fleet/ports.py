"""Ports of this machine: whether those that a fleet needs are free, and where it finds free ones."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from ppd.proxy.config import cannot_listen
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role

HOST = "127.0.0.1"
FIRST_PORT = {Role.PREFILL: 8100, Role.DECODE: 8200, Role.REPLICA: 8300, Role.ENCODE: 8400}
FIRST_SIDE_CHANNEL = 5600
FIRST_SIDECAR = 8500
PORTS_A_FLEET = 50
_ANYWHERE = range(20_000, 30_000)  # below what systems give out: from 32,768 on Linux, from 49,152 elsewhere
_ANY = random.SystemRandom()  # no two processes choose alike, whatever they have seeded
_given: set[int] = set()


def check_free(port: int, param: str, host: str = HOST) -> None:
    """ConfigError, naming the flag that takes another, unless a program could listen there now."""
    try:
        _listen(host, port)
    except OSError as exc:
        error = cannot_listen(param, port, "host", host, exc)
        if error.param == param:
            error = ConfigError(f"{error}; --{param.replace('_', '-')} takes another", param=param)
        raise error from exc


def check_workers_free(workers: Mapping[Role, int], port_offset: int, *, with_sidecars: bool = False) -> None:
    """with_sidecars: one before each D and R too."""
    sidecars = workers.get(Role.DECODE, 0) + workers.get(Role.REPLICA, 0) if with_sidecars else 0
    for port in (*worker_ports(workers), *(FIRST_SIDECAR + index for index in range(sidecars))):
        if not is_free(port + port_offset):
            raise ConfigError(
                f"port_offset = {port_offset}: must leave the workers free ports on {HOST} ({port + port_offset} is in "
                "use); --port-offset moves them all",
                param="port_offset",
            )


def is_free(port: int) -> bool:
    try:
        _listen(HOST, port)
    except OSError:
        return False
    return True


def _listen(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the programs themselves do
        attempt.bind((host, port))
        attempt.listen()


def free_ports(count: int) -> list[int]:
    """For programs that may listen anywhere, each port given once by this process.

    The system gives none of them to a program that asks for any port, nor to a connection: an engine takes seconds to
    start, and then its port must still be free. ConfigError if there are not as many.
    """
    found: list[int] = []
    for port in _ANY.sample(_ANYWHERE, len(_ANYWHERE)):
        if port not in _given and is_free(port):
            _given.add(port)
            found.append(port)
        if len(found) == count:
            return found
    raise ConfigError(f"no {count} free ports between {_ANYWHERE.start} and {_ANYWHERE.stop - 1} on {HOST}")


@contextmanager
def free_offset(workers: Mapping[Role, int]) -> Iterator[int]:
    """The first multiple of PORTS_A_FLEET at which all ports of the fleet's workers are free. Until the end of the
    context no other fleet gets them by this function, in this process or another.
    """
    wanted = worker_ports(workers)
    for offset in range(0, 20_000, PORTS_A_FLEET):
        with ExitStack() as held:
            if all(_hold(port + offset, held) and is_free(port + offset) for port in wanted):
                yield offset
                return
    raise ConfigError(f"port_offset: no free ports for {sum(workers.values())} workers", param="port_offset")


def _hold(port: int, held: ExitStack) -> bool:
    """By a socket of UDP, as engines, which listen only seconds later, use none: they find the port free."""
    try:
        held.enter_context(socket.socket(type=socket.SOCK_DGRAM)).bind((HOST, port))
    except OSError:
        return False
    return True


def worker_ports(workers: Mapping[Role, int]) -> list[int]:
    """The ports of a fleet's engines and of their side channels, without an offset."""
    engines = [FIRST_PORT[role] + index for role, count in workers.items() for index in range(count)]
    return [*engines, *(FIRST_SIDE_CHANNEL + ordinal for ordinal in range(sum(workers.values())))]
