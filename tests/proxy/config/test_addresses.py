"""Which kind of addresses ZeroMQ has to look for."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ppd.proxy.config import is_ipv6

KNOWN = {"four": ["10.0.0.5"], "six": ["fd00::5"], "both": ["fd00::5", "10.0.0.5"], "10.0.0.5": ["10.0.0.5"]}


def resolve(host: str, port: None, **_: Any) -> list[Any]:
    if host not in KNOWN:
        raise socket.gaierror("no such host")
    return [(socket.AF_INET6 if ":" in one else socket.AF_INET, 0, 0, "", (one, 0)) for one in KNOWN[host]]


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("tcp://[fd00::5]:5557", True),
        ("[fd00::5]:30001", True),
        ("tcp://10.0.0.5:5557", False),
        ("tcp://six:5557", True),
        ("six:30001", True),
        ("tcp://four:5557", False),
        ("tcp://both:5557", False),  # one that is not heard there is heard at neither
        ("tcp://nobody:5557", False),
        ("ipc:///tmp/events", False),
        ("tcp://*:5557", False),
    ],
)
def test_a_name_is_looked_for_among_ipv6_addresses_where_it_has_no_others(endpoint: str, found: bool) -> None:
    assert is_ipv6(endpoint, resolve) is found
