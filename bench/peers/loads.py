"""The loads that every peer gets in turn, and their results."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.bodies import payloads
from bench.generator import started
from bench.peers.peer import Lacking
from bench.rounds import Row, Section, Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from bench.peers.peer import Asked, Peer, Running

SIZE = 100
BATCH = 1000
PAGE = 10_000
#: Page sizes of a consumer that asks for few messages at a time.
SMALL_PAGE, SMALL_STEP = 10, 100
#: Connections that run whole transactions, and the topics of each.
TRANSACTING = ((1, 1), (16, 1), (1, 3))
SHARES = (("1/4", 0.25), ("1/2", 0.5), ("3/4", 0.75))
#: Connections of the open loop.
OPEN_CONNECTIONS = 32
#: Higher than any run reaches: the run ends by time.
_REQUESTS = 1 << 30


@dataclass(frozen=True, slots=True)
class PeersProfile:
    """Sizes and durations."""

    name: str
    rounds: int
    seconds: float
    """Duration of each load, per round."""
    warm_up_s: float
    """Warm-up with single messages, and for half of it with pages, because JVMs compile."""
    sustained_s: float
    topics: int
    singles: tuple[int, ...]
    """Numbers of connections, each sending one message a request."""
    batches: tuple[int, ...]
    """The same with requests of 1000 messages."""
    read_messages: int
    """Messages in the topic that is read; fewer if filling it takes longer than ten times ``seconds``."""
    open_rates: tuple[int, ...]
    """Single messages a second, the same for all peers."""
    open_s: float


FULL = PeersProfile(
    name="full",
    rounds=3,
    seconds=4.0,
    warm_up_s=10.0,
    sustained_s=20.0,
    topics=50,
    singles=(1, 16, 50),
    batches=(1, 4),
    read_messages=1_000_000,
    open_rates=(300, 1000, 2000),
    open_s=10.0,
)
QUICK = PeersProfile(
    name="quick",
    rounds=1,
    seconds=0.1,
    warm_up_s=0.1,
    sustained_s=0.2,
    topics=4,
    singles=(1, 16),
    batches=(4,),
    read_messages=3_000,
    open_rates=(100,),
    open_s=0.2,
)

RATES_SAY = """Messages a second; requests of one message (*single*) or of 1000 (*batch*) of 100 B, each answered once it was synced.
*÷* is Plainsong's rate divided by the peer's, within each round: above 1 Plainsong is faster. *Page* is the same 10 000
messages repeatedly, *walk* a topic from its start to its end in pages of 10 000, on one connection; *page of 10* and
*walk by 100* the same with smaller pages. *Transaction* counts whole transactions a second, run by each peer's own
client, one after the other on each connection. Plainsong and the original: Tephra's client in Java starts one, publishes
a message to each topic under its pointer, asks if it can commit, and commits. Kafka: the transactional producer in Java
begins, sends a message to each topic, and commits. PostgreSQL: pgbench sends BEGIN, an INSERT into each table, and
COMMIT, as prepared statements."""
WAITS_SAY = """The same loads: how long a request waited for its answer, the processor time that the peer's processes spent on
a message, and how much of one core the load generator took. Where that is near 100 the generator is the limit."""
OPEN_SAY = """Single messages of 100 B in an open loop over 32 connections: due at a fixed rate, waits counted from when they were
due. First the same rates for all, then shares of the highest rate that each reached just before, in a closed loop with
the same number of connections. *Unsent* had no answer ten seconds after the end: that peer cannot keep up with this rate."""


@dataclass(slots=True)
class Measured:
    """Result of one load in one round on one peer."""

    messages_per_s: float
    result: dict[str, Any]
    server_us: float
    """Processor time of the peer per message."""


@dataclass(slots=True)
class Side:
    """A running peer and its state."""

    peer: Peer
    running: Running
    version: str
    topics: int = 0

    def topic(self, count: int = 1) -> list[str]:
        """Create new topics; return their names."""
        names = [f"peer-{self.topics + number}" for number in range(count)]
        self.topics += count
        self.peer.create(self.running, names)
        return names

    def load(self, asked: Sequence[Asked], connections: int, per_request: int, *options: str) -> Measured:
        """Run the generator; with ``per_request`` 0 the messages in the responses are counted."""
        peer, first = self.peer, asked[0]
        hello = peer.hello + first.prepared
        command = ["--protocol", peer.protocol, "--connections", str(connections), "--replies", str(first.replies)]
        command += ["--number", "--everywhere", *options]
        if "--requests" not in options:
            command += ["--requests", str(_REQUESTS)]
        if hello:
            command += ["--hello-replies", str(peer.hello_replies * bool(peer.hello) + bool(first.prepared))]
        cpu_s = self.running.cpu_s()
        with started([each.request for each in asked], [self.running.port], *command, hello=hello) as running:
            result = running.end()
        cpu_s = self.running.cpu_s() - cpu_s
        messages = result["requests"] * per_request if per_request else result["messages"]
        seconds = max(result["seconds"], 1e-9)
        return Measured(messages / seconds, result, 1e6 * cpu_s / max(messages, 1))


@dataclass(slots=True)
class Comparison:
    """All running peers, and the results so far."""

    profile: PeersProfile
    say: Callable[[str], None]
    sides: list[Side] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)
    """Why a peer, or one of its loads, has no result."""
    reading: dict[str, str] = field(default_factory=dict)
    """The topic that is read, by peer."""

    def start(self, peers: Sequence[Peer], home: Path, ending: ExitStack) -> None:
        """Fetch and start all peers; record the reason for those that are unavailable."""
        for peer in peers:
            try:
                version = peer.fetch()
                place = home / peer.name
                place.mkdir()
                running = ending.enter_context(peer.run(place))
            except (Lacking, OSError) as error:
                self.lacking[peer.name] = _one_line(str(error))
                self.say(f"{peer.name}: not measured: {_one_line(str(error))}")
                continue
            self.sides.append(Side(peer, running, version))
            self.say(f"{peer.name}: {version}")

    def warm_up(self) -> None:
        """Warm up with singles, a batch fill and pages; drop a peer whose filled topic lacks acknowledged messages."""
        seconds = self.profile.warm_up_s
        messages = payloads(BATCH, SIZE)
        for side in list(self.sides):
            try:
                (topic,) = side.topic()
                side.load([side.peer.publish(topic, messages[:1])], 16, 1, "--seconds", str(seconds))
                (topic,) = side.topic()
                requests = str(self.profile.read_messages // BATCH)
                limit = str(10 * self.profile.seconds)
                batch = side.peer.publish(topic, messages)
                filled = (
                    side.load([batch], 4, BATCH, "--seconds", limit, "--requests", requests).result["requests"] * BATCH
                )
                self.reading[side.peer.name] = topic
                found = self._walk(side).result["messages"]
                if found != filled:
                    raise RuntimeError(f"it acknowledged {filled:,} messages and returned {found:,}")
                self.say(f"{side.peer.name}: warm, with {found:,} messages to read")
                walk_until = time.monotonic() + seconds / 2
                while time.monotonic() < walk_until:
                    self._walk(side)
            except RuntimeError as error:
                self.lacking[side.peer.name] = f"it failed during the warm-up: {error}"
                self.sides.remove(side)

    def idle_percent(self, seconds: float) -> float:
        """Return the percentage of one core that all peers together use without requests."""
        before_s = [side.running.cpu_s() for side in self.sides]
        time.sleep(seconds)
        used_s = [side.running.cpu_s() - before for side, before in zip(self.sides, before_s, strict=True)]
        return 100 * sum(used_s) / seconds

    def _walk(self, side: Side, limit: int = PAGE) -> Measured:
        asked = side.peer.walk(side.running, self.reading[side.peer.name], limit)
        return side.load([asked], 1, 0, "--walk", str(asked.position_at))

    def _page(self, side: Side, limit: int = PAGE) -> Measured | None:
        asked = side.peer.page(side.running, self.reading[side.peer.name], limit)
        if asked is None:
            return None
        return side.load([asked], 1, 0, "--messages", "--seconds", str(self.profile.seconds))

    def _publish(self, side: Side, connections: int, per_request: int, topics: int, seconds: float) -> Measured:
        messages = payloads(BATCH, SIZE)[:per_request]
        asked = [side.peer.publish(topic, messages) for topic in side.topic(topics)]
        return side.load(asked, connections, per_request, "--seconds", str(seconds))

    def _transact(self, side: Side, connections: int, topics: int) -> Measured | None:
        cpu_s, seconds = side.running.cpu_s(), self.profile.seconds
        result = side.peer.transact(side.running, side.topic(topics), connections, seconds, SIZE)
        if result is None:
            return None
        cpu_s = (side.running.cpu_s() - cpu_s) / 2  # half of the time is the warm-up's
        count = result["requests"]
        return Measured(count / result["seconds"], result, 1e6 * cpu_s / max(count, 1))

    def loads(self) -> dict[str, tuple[int, Callable[[Side], Measured | None]]]:
        """Return the loads by name: the number of rounds, and the function that runs a load on a peer."""
        profile, publish = self.profile, self._publish
        seconds = profile.seconds

        def publishing(connections: int, per_request: int, topics: int = 1, lasts_s: float = seconds) -> Any:
            return lambda side: publish(side, connections, per_request, topics, lasts_s)

        def transacting(connections: int, topics: int) -> Any:
            return lambda side: self._transact(side, connections, topics)

        rounds = profile.rounds
        # Plainsong's transactions alone would need the original service's client, and so its jars.
        is_compared = any(side.peer.transacts for side in self.sides if side.peer.name != "plainsong")
        transactions = {
            f"transaction, {_topics(topics)}, {on_connections(connections)}": (rounds, transacting(connections, topics))
            for connections, topics in (TRANSACTING if is_compared else ())
        }
        return {
            **{f"single, {on_connections(c)}": (rounds, publishing(c, 1)) for c in profile.singles},
            **{f"batch, {on_connections(c)}": (rounds, publishing(c, BATCH)) for c in profile.batches},
            f"batch over {profile.topics} topics, 4 connections": (rounds, publishing(4, BATCH, profile.topics)),
            f"batch for {profile.sustained_s:g} s, 4 connections": (
                1,
                publishing(4, BATCH, lasts_s=profile.sustained_s),
            ),
            "page": (rounds, self._page),
            f"page of {SMALL_PAGE}": (rounds, partial(self._page, limit=SMALL_PAGE)),
            "walk": (rounds, self._walk),
            f"walk by {SMALL_STEP}": (rounds, partial(self._walk, limit=SMALL_STEP)),
            **transactions,
        }

    def measure(self, settle: Callable[[], None]) -> tuple[Section, Section]:
        """Run all closed-loop loads; return their rates, and their waits."""
        rates = Section("peers-rates", "Rates", RATES_SAY)
        waits = Section("peers-waits", "Waits and work", WAITS_SAY)
        for load, (rounds, put) in self.loads().items():
            found: dict[str, list[Measured]] = {}
            refused: set[str] = set()
            for number in range(rounds):
                for side in self._in_turn(number):
                    if side.peer.name in refused:
                        continue
                    settle()
                    try:
                        measured = put(side)
                    except (Lacking, RuntimeError) as error:
                        self.lacking[f"{side.peer.name}, {load}"] = _one_line(str(error))
                        measured = None
                    if measured is None:
                        refused.add(side.peer.name)
                        found.pop(side.peer.name, None)
                        continue
                    found.setdefault(side.peer.name, []).append(measured)
                    self.say(
                        f"{load}: {side.peer.name} {measured.messages_per_s:,.0f}/s,"
                        f" p50 {measured.result['p50_ms']:.2f} ms, {measured.server_us:.1f} µs of processor time each"
                    )
            if found:
                rates.rows.append(Row({"load": load}, _rates(found)))
            for name in (side.peer.name for side in self.sides if side.peer.name in found):
                waits.rows.append(Row({"load": load, "peer": name}, _waits(found[name])))
        return rates, waits

    def _in_turn(self, number: int) -> list[Side]:
        return self.sides if number % 2 == 0 else self.sides[::-1]

    def measure_open(self, settle: Callable[[], None]) -> Section:
        """Run the open loops."""
        profile = self.profile
        section = Section("peers-open", "Waits at a fixed rate", OPEN_SAY)
        found: dict[tuple[str, str], list[Measured]] = {}
        for number in range(profile.rounds):
            for rate in profile.open_rates:
                for side in self._in_turn(number):
                    settle()
                    self._open(side, f"{rate:,} a second", rate, found)
        for side in self.sides:
            settle()
            highest = self._publish(side, OPEN_CONNECTIONS, 1, 1, profile.seconds).messages_per_s
            for shown, share in SHARES:
                settle()
                self._open(side, f"{shown} of its highest", highest * share, found)
        for rate_name, name in sorted(
            found, key=lambda key: list(dict.fromkeys(rate for rate, _ in found)).index(key[0])
        ):
            values = _open_waits(found[rate_name, name])
            beside = found.get((rate_name, "original"))
            if name == "plainsong" and beside and "highest" not in rate_name:
                for shown, key in (("p50", "p50_ms"), ("p99.9", "p999_ms")):
                    ours = [each.result[key] for each in found[rate_name, name]]
                    values[f"{shown} ÷ original"] = Spread.ratio(ours, [each.result[key] for each in beside])
            section.rows.append(Row({"rate": rate_name, "peer": name}, values))
        return section

    def _open(self, side: Side, name: str, rate: float, found: dict[tuple[str, str], list[Measured]]) -> None:
        asked = [side.peer.publish(topic, payloads(1, SIZE)) for topic in side.topic()]
        try:
            measured = side.load(asked, OPEN_CONNECTIONS, 1, "--rate", str(rate), "--seconds", str(self.profile.open_s))
        except RuntimeError as error:
            self.lacking[f"{side.peer.name}, {name}"] = str(error)
            return
        found.setdefault((name, side.peer.name), []).append(measured)
        at = measured.result
        waits = " / ".join(f"{at[f'{key}_ms']:.2f}" for key in ("p50", "p99", "p999", "max"))
        self.say(
            f"open loop, {name}: {side.peer.name} {rate:,.0f}/s, p50/p99/p99.9/max {waits} ms, {at['unsent']} unsent"
        )

    def overview(self) -> Section:
        """List the peers, and the unavailable ones with the reason."""
        return overview_of(self.sides, self.lacking)


def overview_of(sides: Iterable[Side], lacking: Mapping[str, str]) -> Section:
    """List the measured peers, and the reason for each missing result."""
    section = Section(
        "peers",
        "Peers",
        "All at their defaults, except for the settings that sync messages before they are acknowledged.",
    )
    for side in sides:
        what: dict[str, str | int] = {"peer": side.peer.name, "version": side.version, "synced": side.peer.synced}
        section.rows.append(Row(what, {}))
    for name, reason in lacking.items():
        section.rows.append(Row({"peer": name, "version": "not measured", "synced": reason}, {}))
    return section


def settled() -> None:
    """Write the page cache to disk, so that one peer's unwritten data does not slow down the next measurement."""
    os.sync()


def _one_line(text: str) -> str:
    """Format a text for a table cell."""
    return " ".join(text.replace("|", "/").split())[:400]


def _topics(count: int) -> str:
    return "1 topic" if count == 1 else f"{count} topics"


def on_connections(count: int) -> str:
    """Return the number of connections as words for a load's name."""
    return "1 connection" if count == 1 else f"{count} connections"


def _rates(found: dict[str, list[Measured]]) -> dict[str, Spread]:
    rates = {name: [each.messages_per_s for each in measured] for name, measured in found.items()}
    ordered = sorted(rates, key=lambda name: (name != "plainsong", name != "original", name))
    values = {name: Spread.of(rates[name]) for name in ordered}
    if "plainsong" in rates:
        ours = rates["plainsong"]
        values |= {f"÷ {name}": Spread.ratio(ours, rates[name]) for name in ordered if name != "plainsong"}
    return values


def _waits(measured: Sequence[Measured]) -> dict[str, Spread]:
    values = {
        "p50 ms": [each.result["p50_ms"] for each in measured],
        "p99 ms": [each.result["p99_ms"] for each in measured],
        "max ms": [each.result["max_ms"] for each in measured],
        "its µs a message": [each.server_us for each in measured],
        "generator %": [100 * each.result.get("cpu_s", 0) / max(each.result["seconds"], 1e-9) for each in measured],
    }
    return {name: Spread.of(each) for name, each in values.items()}


def _open_waits(measured: Sequence[Measured]) -> dict[str, Spread]:
    names = (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999"), ("max", "max"), ("late p99", "late_p99"))
    values = {"messages/s": Spread.of([each.messages_per_s for each in measured])}
    values |= {f"{name} ms": Spread.of([each.result[f"{key}_ms"] for each in measured]) for name, key in names}
    values["unsent"] = Spread.of([float(each.result["unsent"]) for each in measured])
    return values
