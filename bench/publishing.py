"""Publishing, compared with raw plyvel, a bare ASGI response and the listener's empty one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.settings import CommitConfig
from bench import bodies
from bench.daemon import Daemon, daemon
from bench.doors import serve_bare, serve_listener
from bench.generator import run_load
from bench.raw import TOPIC, RawStore, raw_store
from bench.rounds import Row, Section, Spread, in_turns
from bench.servers import server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.profiles import Profile
    from bench.servers import Server

SAYS = """Messages a second, each acknowledged after it was synced. *Bare* is an ASGI application on hypercorn's trio
worker that reads the same request and answers without doing anything; *listener* is the daemon's own listener with an empty
handler. *Raw* is plyvel alone, one thread, with prepared rows: a synced batch per request, and per group of as many
requests as there are connections (within `commit.max_bytes`)."""


def measure_publishing(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure every combination, each with a new daemon and a new raw store."""
    section = Section("publish", "Publishing", SAYS)
    with server(serve_bare) as bare, server(serve_listener) as listener:
        for size in profile.message_bytes:
            for messages in profile.messages:
                for connections in profile.connections:
                    cell = _Cell(profile, messages, size, connections)
                    home = scratch / f"publish-{messages}-{size}-{connections}"
                    home.mkdir()
                    with daemon(home / "data") as ours, raw_store(home / "raw") as raw:
                        ours.create(TOPIC)
                        row = cell.measure(ours, bare, listener, raw)
                    section.rows.append(row)
                    ratios = "  ".join(f"{k} {v.median:.2f}" for k, v in row.values.items() if k.startswith("÷"))
                    rate = row.values["plainsong"].median
                    say(f"publish {messages} x {size} B, {connections} connections: {rate:,.0f}/s  {ratios}")
    return section


class _Cell:
    """One combination of request size, message size and connections."""

    def __init__(self, profile: Profile, messages: int, size: int, connections: int) -> None:
        self._profile = profile
        self._messages = messages
        self._size = size
        self._connections = connections
        self._request = bodies.publish(TOPIC, messages, size)
        self._p99_ms: list[float] = []

    def measure(self, ours: Daemon, bare: Server, listener: Server, raw: RawStore) -> Row:
        seconds, group = self._profile.seconds, self._group()
        found = in_turns(
            {
                "plainsong": lambda: self._rate(ours.port, ours=True),
                "bare": lambda: self._rate(bare.port),
                "listener": lambda: self._rate(listener.port),
                "raw request": lambda: raw.write(self._messages, self._size, 1, seconds),
                "raw group": lambda: raw.write(self._messages, self._size, group, seconds),
            },
            self._profile.rounds,
        )
        values = {name: Spread.of(rates) for name, rates in found.items()}
        values["p99 ms"] = Spread.of(self._p99_ms)
        for name in list(found)[1:]:
            values[f"÷ {name}"] = Spread.ratio(found["plainsong"], found[name])
        return Row({"messages": self._messages, "bytes": self._size, "connections": self._connections}, values)

    def _rate(self, port: int, *, ours: bool = False) -> float:
        result = run_load(port, self._connections, self._request, self._profile.seconds)
        if ours:
            self._p99_ms.append(result["p99_ms"])
        return float(result["requests_per_s"]) * self._messages

    def _group(self) -> int:
        return max(1, min(self._connections, CommitConfig().max_bytes // len(self._request)))
