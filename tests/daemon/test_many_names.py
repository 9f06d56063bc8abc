"""Memory stays flat with many names and many unauthenticated clients: measured on a real daemon."""

from __future__ import annotations

import random
import re
import socket
from pathlib import Path

import pytest

from broker.security.files import write_guarded
from broker.security.tokens import TokenEntry, format_tokens, hash_of, id_of, new_token
from tests.daemon.harness import Daemon
from tests.patience import PATIENCE_S

#: Pipelined requests on a connection.
AHEAD = 100
GRANTS = """format = 1
[[grant]]
to = ["*"]
verbs = ["publish", "poll", "admin"]
on = ["shop:*"]
[[quota]]
to = ["*"]
requests_per_s = 1000
poll_bytes_per_s = "1 MiB"
connections = 100
parked_polls = 10
"""
TOPIC = "/v1/namespaces/shop/topics/orders"


def ask(daemon, requests, status):
    """Send pipelined requests over new connections; every answer must have this status."""
    for begin in range(0, len(requests), AHEAD):
        some = requests[begin : begin + AHEAD]
        with socket.create_connection(daemon.address, timeout=PATIENCE_S) as connection:
            connection.sendall(b"".join(some))
            connection.shutdown(socket.SHUT_WR)
            said = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert re.findall(rb"HTTP/1\.1 (\d+)", said) == [b"%d" % status] * len(some)


def poll(credential, topic=TOPIC):
    return (
        f"POST {topic}/poll HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {credential}\r\nX-Request-Id: {credential[-20:]}\r\nContent-Length: 2\r\n\r\n{{}}"
    ).encode()


def weigh(daemon):
    """Return the daemon's anonymous memory in bytes."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024


@pytest.mark.parametrize(
    ("names", "strangers"), [(1_500, 3_000), pytest.param(5_000, 50_000, marks=pytest.mark.torture)]
)
def test_memory_stays_flat_with_thousands_of_names_and_any_number_of_anonymous_clients(tmp_path, names, strangers):
    source = random.Random(16)
    tokens = [new_token(source.choice) for _ in range(names)]
    entries = [TokenEntry(id_of(hash_of(each)), f"n{at}", hash_of(each), 0, None) for at, each in enumerate(tokens)]
    write_guarded(tmp_path / "tokens.json", format_tokens(entries))
    write_guarded(tmp_path / "grants.toml", GRANTS.encode())
    settings = {
        "security.authentication": "required",
        "security.tokens_file": tmp_path / "tokens.json",
        "security.grants_file": tmp_path / "grants.toml",
    }

    def everybody_asks():
        ask(daemon, [poll(token) for token in tokens], 200)
        unknown = [new_token(source.choice) for _ in range(strangers // 3)]
        malformed = [f"psg_{source.randbytes(200).hex()}" for _ in range(strangers // 3)]
        foreign = [f"eyJ{number}.{source.randbytes(500).hex()}.x" for number in range(strangers // 3)]
        ask(daemon, [poll(each) for each in (*unknown, *malformed, *foreign)], 401)
        # An authenticated client without grants uses a new topic in each request.
        nowhere = [f"/v1/namespaces/x{source.randbytes(100).hex()}/topics/{'t' * 255}" for _ in range(300)]
        ask(daemon, [poll(tokens[0], topic) for topic in nowhere], 403)

    with Daemon(tmp_path / "data", *(f"{name}={value}" for name, value in settings.items()), forked=False) as daemon:
        create = (
            f"PUT {TOPIC} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {tokens[0]}\r\nContent-Length: 0\r\n\r\n"
        )
        ask(daemon, [create.encode()], 200)
        everybody_asks()
        before = weigh(daemon)
        for _ in range(2):
            everybody_asks()
        grown = weigh(daemon) - before
        print(
            f"{names} names and {strangers} strangers, twice more: {grown / 1024:.0f} KiB on top of {before / 1024:.0f}"
        )
        assert grown < 4 << 20
