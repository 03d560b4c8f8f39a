"""Which clients may connect to a ZeroMQ port at all.

The address of each message is not enough: ZeroMQ bounds a message's parts but not their number, and keeps them all
until the last one has come, so whoever may connect can fill the memory.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any

import zmq

MAPPED_BITS = 96  # of an IPv6 address, before the IPv4 one


def take_from(socket: zmq.Socket[Any], ranges: Iterable[str], *, is_ipv6: bool) -> None:
    """Only connections from these address ranges, if there are any. To be called before the socket is bound.

    is_ipv6: of the address that the socket is bound to.
    """
    for text in ranges:
        network = ipaddress.ip_network(text)
        told = str(network)
        if is_ipv6 and network.version == 4:  # as such a port sees IPv4; ZeroMQ would take the length for IPv6's
            told = f"::ffff:{network.network_address}/{MAPPED_BITS + network.prefixlen}"
        # No client of an IPv4 port is in an IPv6 network, but a port without any filter takes all clients.
        socket.setsockopt(zmq.IPV6, is_ipv6 or network.version == 6)
        socket.setsockopt(zmq.TCP_ACCEPT_FILTER, told.encode())
    socket.setsockopt(zmq.IPV6, is_ipv6)
