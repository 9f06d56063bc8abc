"""What TLS costs a small publish: two daemons, one of them with TLS, asked in turns by the same client.

    python -m bench.tls [--connections 16] [--publishes 20000] [--rounds 5]

The client's own work, TLS included, is in the rates; the processor time is the daemon's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.bodies import path
from bench.daemon import daemon

if TYPE_CHECKING:
    from bench.daemon import Daemon

TOPIC = "singles"
BODY = b'{"messages": ["' + b"x" * 100 + b'"]}'
CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost "
    "-addext subjectAltName=IP:127.0.0.1 -keyout {0}/tls.key -out {0}/tls.pem"
)


async def publish(port: int, trusting: ssl.SSLContext | None, count: int) -> None:
    """Publishes ``count`` messages on one connection, each when the one before is durable."""
    host = f"Host: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    request = f"POST {path(TOPIC, 'publish')} HTTP/1.1\r\n{host}".encode() + BODY
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    for _ in range(count):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode("latin-1"))
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
    writer.close()


def measure(of: Daemon, trusting: ssl.SSLContext | None, connections: int, publishes: int) -> tuple[float, float]:
    """Publishes a second, and microseconds of the daemon's processor time for each."""

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(connections):
                tasks.create_task(publish(of.port, trusting, publishes // connections))

    cpu, begun_s = of.cpu_s(), time.perf_counter()
    asyncio.run(all_of_them())
    done = publishes // connections * connections
    return done / (time.perf_counter() - begun_s), (of.cpu_s() - cpu) / done * 1e6


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--publishes", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(CERTIFICATE.format(folder).split(), check=True, capture_output=True)
        trusting = ssl.create_default_context(cafile=f"{folder}/tls.pem")
        guarded = {"tls_certificate": f"{folder}/tls.pem", "tls_key": f"{folder}/tls.key"}
        with daemon(Path(folder, "plain")) as plain, daemon(Path(folder, "tls"), **guarded) as by_tls:
            for each, context in ((plain, None), (by_tls, trusting)):
                asyncio.run(create(each.port, context))
                measure(each, context, asked.connections, asked.publishes // 4)
            found: dict[str, list[tuple[float, float]]] = {"plain": [], "TLS": []}
            for _ in range(asked.rounds):
                found["plain"].append(measure(plain, None, asked.connections, asked.publishes))
                found["TLS"].append(measure(by_tls, trusting, asked.connections, asked.publishes))
    rates = {name: median(rate for rate, _ in values) for name, values in found.items()}
    costs = {name: median(cost for _, cost in values) for name, values in found.items()}
    for name in found:
        print(f"{name:6} {rates[name]:8.0f} publishes/s {costs[name]:6.0f} µs of processor time each")
    print(f"TLS / plain: {rates['TLS'] / rates['plain']:.2f}; {costs['TLS'] - costs['plain']:+.0f} µs a publish")


async def create(port: int, trusting: ssl.SSLContext | None) -> None:
    """Creates the topic."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    writer.write(f"PUT {path(TOPIC)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    await reader.read()
    writer.close()


if __name__ == "__main__":
    main()
