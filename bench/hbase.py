"""The daemon on a small real HBase, compared with raw Thrift calls for the same messages: publishes, polls, singles.

HBase, its gateway, the daemon, the generator and the raw calls share the machine; the first round of each is discarded.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from bench import bodies
from bench.daemon import daemon
from bench.generator import run_load
from bench.hbase_costs import call_costs, daemon_costs, open_costs
from bench.rounds import Row, Section, Spread, in_turns
from bench.thrift import DAEMON_PREFIX, RAW_PREFIX, RawCalls, raw_calls
from bench.wire import Wire
from plainsong.protocol.ids import ID_BYTES
from tests.hbase_server import HBase, why_not

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.daemon import Daemon
    from bench.profiles import Profile

SIZE = 100
GROUP = 1000
#: Topics: of batches, of single publishes, and the one that is polled.
GROUPS, SINGLES, READ = "groups", "singles", "read"
SAYS = """Messages of 100 B a second. *groups*: requests of 1000, compared with ``mutateRows`` of the same 1000 rows
over the same number of connections; *store*: commits of 1000 rows without a daemon. *poll*: a page from far behind (the
daemon was restarted after the messages were written, so its cache is empty), compared with a raw scan of the very same
cells and of one row for each message. *single*: one message at one connection, its p50 compared with the calls that its
commit needs: a row put if absent and a head compared and set, one after the other. Raw calls use the store's own
client, in a process of their own. *cost*: processor time of each process per call, commit, request, or opened topic;
and the growth of the write-ahead log."""


def measure_hbase(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure everything against one HBase; without Java, print a line and return no rows."""
    section = Section("hbase", "HBase", SAYS)
    if (lacking := why_not()) is not None:
        say(lacking)
        return section
    with HBase(scratch / "hbase", jvm=profile.jvm) as hbase, raw_calls(hbase.address) as raw:
        settings = settings_of(hbase)
        with daemon(scratch / "data", **settings) as ours:
            for topic in (GROUPS, SINGLES, READ):
                ours.create(topic)
            bench = _Bench(profile, ours.port, raw)
            section.rows += [bench.groups(connections) for connections in profile.hbase_connections]
            section.rows += [bench.store(connections) for connections in profile.hbase_connections]
            section.rows.append(bench.single())
            section.rows += call_costs(profile, hbase, raw)
            section.rows += daemon_costs(profile, ours, GROUPS, SINGLES)
            bench.fill()
            idle = _fill_idle(ours, profile.topics)
        with daemon(scratch / "data", **settings) as ours:
            bench = _Bench(profile, ours.port, raw)
            section.rows += [bench.poll(encoding) for encoding in bodies.ENCODINGS]
            section.rows.append(open_costs(ours, idle))
    for row in section.rows:
        what = ", ".join(str(value) for value in row.what.values())
        say(f"hbase {what}: " + "  ".join(f"{name} {value.median:,.2f}" for name, value in row.values.items()))
    return section


def settings_of(hbase: HBase) -> dict[str, Any]:
    """Return the settings of a daemon on this HBase."""
    host, port = hbase.address
    return {"storage_kind": "hbase", "storage_hbase.thrift": f"{host}:{port}"}


def _fill_idle(ours: Daemon, topics: int) -> list[str]:
    """Create topics with one message each."""
    names = [f"idle-{number}" for number in range(topics)]
    with Wire(ours.port) as wire:
        for name in names:
            ours.create(name)
            wire.send(bodies.publish(name, 1, SIZE))
    return names


class _Bench:
    def __init__(self, profile: Profile, port: int, raw: RawCalls) -> None:
        self._profile = profile
        self._port = port
        self._raw = raw

    def groups(self, connections: int) -> Row:
        """Requests of 1000 messages."""
        return self._written("groups", connections, partial(self._rate, connections))

    def store(self, connections: int) -> Row:
        """Commits of 1000 rows, without a daemon."""
        seconds = self._profile.seconds
        return self._written("store", connections, lambda: self._raw.commit(GROUP, SIZE, connections, seconds))

    def _written(self, what: str, connections: int, ours: Callable[[], float]) -> Row:
        seconds = self._profile.seconds
        sides = {"ours": ours, "raw": lambda: self._raw.write(GROUP, SIZE, connections, seconds)}
        found = _turns(sides, self._profile)
        values = {"messages/s": Spread.of(found["ours"]), "÷ mutateRows": Spread.ratio(found["ours"], found["raw"])}
        return Row({"what": what, "connections": connections}, values)

    def _rate(self, connections: int) -> float:
        request = bodies.publish(GROUPS, GROUP, SIZE)
        return float(run_load(self._port, connections, request, self._profile.seconds)["requests_per_s"]) * GROUP

    def single(self) -> Row:
        """One message per request, on one connection."""
        seconds = self._profile.seconds
        request = bodies.publish(SINGLES, 1, SIZE)
        sides = {
            "ours": lambda: float(run_load(self._port, 1, request, seconds)["p50_ms"]),
            "raw": lambda: self._raw.round_trips(SIZE, seconds),
        }
        found = _turns(sides, self._profile)
        ratio = Spread.ratio(found["ours"], found["raw"])
        values = {"p50 ms": Spread.of(found["ours"]), "raw ms": Spread.of(found["raw"]), "÷ round trips": ratio}
        return Row({"what": "single", "connections": 1}, values)

    def fill(self) -> None:
        """Write a page of messages, for the daemon started next, and the same as raw rows."""
        page = self._profile.page_messages
        with Wire(self._port) as wire:
            for _ in range(page // GROUP):
                wire.send(bodies.publish(READ, GROUP, SIZE))
        self._raw.fill(READ, page, SIZE)

    def poll(self, encoding: str) -> Row:
        """Whole pages, read by one reader."""
        page, seconds = self._profile.page_messages, self._profile.seconds
        request = bodies.poll(READ, encoding, bytes(ID_BYTES), page)

        def polled() -> float:
            result = run_load(self._port, 1, request, seconds)
            if result["received_bytes"] < result["requests"] * page * SIZE:
                raise RuntimeError("pages are shorter than they should be")
            return float(result["requests_per_s"]) * page

        sides = {
            "ours": polled,
            "scan": lambda: self._raw.scan(DAEMON_PREFIX, READ, seconds) * page,
            "scan of rows": lambda: self._raw.scan(RAW_PREFIX, READ, seconds) * page,
        }
        found = _turns(sides, self._profile)
        values = {"messages/s": Spread.of(found["ours"])}
        values |= {f"÷ {name}": Spread.ratio(found["ours"], found[name]) for name in ("scan", "scan of rows")}
        return Row({"what": f"poll {encoding}", "connections": 1}, values)


def _turns(sides: dict[str, Callable[[], float]], profile: Profile) -> dict[str, list[float]]:
    """Like ``in_turns``, after a discarded round if the profile warms up: a cold JVM is several times slower."""
    discarded = 1 if profile.warms_up else 0
    return {name: values[discarded:] for name, values in in_turns(sides, profile.rounds + discarded).items()}
