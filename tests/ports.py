"""Ports for servers that a test starts: free, and promised to nobody else on this machine."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_chance = random.SystemRandom()  # hypothesis seeds the common one, alike in every process


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, from below those that outgoing connections take; this process keeps them reserved.

    Rings run side by side, and between choosing a port and listening on it a server takes its time.
    """
    first_taken = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    while len(found) < count:
        port = _chance.randrange(min(15_000, first_taken - 10_000), first_taken)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if _reserve(port):
            found.append(port)
    return found


def free_port() -> int:
    """One of them."""
    (port,) = free_ports(1)
    return port


def free_address() -> str:
    """What a daemon binds that is killed and started again at the same place, where nobody takes its port meanwhile."""
    return f"127.0.0.1:{free_port()}"


def _reserve(port: int) -> bool:
    """Bind a name in Linux's abstract namespace, which vanishes with this process; False: another process has it."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0plainsong-test-port-{port}")
    except OSError:
        holder.close()
        return False
    holder.detach()  # open until the process ends
    return True
