"""What the doctor says of the ports that a config names."""

from __future__ import annotations

import errno
import os

import pytest

from ppd.proxy.cli.doctor.checks import ports_are_free
from ppd.proxy.cli.doctor.values import ConfigFact, Facts, Level, PortFact

OK, FAIL, SKIP = Level.OK, Level.FAIL, Level.SKIP


def of(*ports: PortFact) -> Facts:
    return Facts(config=ConfigFact(ports=ports))


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ([("port", 10001, "")], [(OK, "h:10001 is free")]),
        ([("port", 10001, "Address already in use")], [(FAIL, "h:10001 can't be bound (Address already in use)")]),
        ([("port", 0, ""), ("heartbeat_port", 0, "")], [(SKIP, "any free port"), (SKIP, "off")]),
        (
            [("port", 7, ""), ("heartbeat_port", 7, "")],
            [(OK, "free"), (OK, "free"), (FAIL, "port and heartbeat_port are both 7")],
        ),
    ],
)
def test_ports(ports: list[tuple[str, int, str]], expected: list[tuple[Level, str]]) -> None:
    found = list(ports_are_free(of(*(PortFact(key, "h", port, error) for key, port, error in ports))))
    assert [finding.level for finding in found] == [level for level, _ in expected]
    assert all(words in finding.message for finding, (_, words) in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EADDRINUSE, "Stop what uses it"),
        (errno.EADDRNOTAVAIL, "run the doctor on the machine"),
        (errno.EACCES, "choose a port from 1024 on"),
    ],
)
def test_the_remedy_of_a_port_is_that_of_its_error(number: int, remedy: str) -> None:
    (finding,) = ports_are_free(of(PortFact("heartbeat_port", "h", 7, os.strerror(number))))
    assert finding.level is FAIL and remedy in finding.remedy
