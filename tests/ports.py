"""Free ports for servers that a test starts, reserved against other test processes on this machine."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_chance = random.SystemRandom()  # hypothesis seeds the shared one, the same in every process


def free_ports(count: int) -> list[int]:
    """Return free ports below the range of outgoing connections, reserved until this process ends.

    Rings run in parallel, and a server needs some time between choosing a port and listening on it.
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
    """Return one free port."""
    (port,) = free_ports(1)
    return port


def free_address() -> str:
    """Return an address for a daemon that is killed and restarted there: its port stays reserved in between."""
    return f"127.0.0.1:{free_port()}"


def _reserve(port: int) -> bool:
    """Bind a name in Linux's abstract namespace, which vanishes with this process; False if another process has it."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0plainsong-test-port-{port}")
    except OSError:
        holder.close()
        return False
    holder.detach()  # open until the process ends
    return True
