"""Which address and which interface of this node the other nodes of a job reach."""

from __future__ import annotations

import socket

import psutil

DISCARD_PORT = 9


def address_towards(host: str) -> str:
    """IPv4 address of this machine on the way to `host`. Nothing is sent.

    A host name of one's own often resolves to a loopback address; the route to another machine does not.
    Raises OSError when `host` has no address or no route leads there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, DISCARD_PORT))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Name of the interface that has `address`."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None
