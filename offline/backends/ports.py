"""Ports of this machine that are free now, so that a fleet can start beside whatever runs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.fleet import FIRST_PORT, FIRST_SIDE_CHANNEL, HOST

PORTS_A_FLEET = 50


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listening in taken:
            listening.bind((HOST, 0))
        return [listening.getsockname()[1] for listening in taken]


def free_offset(workers: Mapping[Role, int]) -> int:
    """The first multiple of PORTS_A_FLEET at which all ports of the fleet's workers are free."""
    wanted = [FIRST_PORT[role] + index for role, count in workers.items() for index in range(count)]
    wanted += [FIRST_SIDE_CHANNEL + ordinal for ordinal in range(sum(workers.values()))]
    for offset in range(0, 20_000, PORTS_A_FLEET):
        if all(is_free(port + offset) for port in wanted):
            return offset
    raise ConfigError(f"port_offset: no free ports for {sum(workers.values())} workers")


def is_free(port: int) -> bool:
    with socket.socket() as attempt:
        try:
            attempt.bind((HOST, port))
        except OSError:
            return False
    return True
