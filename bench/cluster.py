"""Several instances on one small HBase: throughput over topics, cost of forwarding, duration of hand-overs.

Everything runs on one machine, so more instances raise throughput only if there are cores for them. The cost of a
message, per process, is meaningful anywhere.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from itertools import count
from typing import TYPE_CHECKING

from bench import bodies
from bench.daemon import Daemon, cpu_s, daemon
from bench.generator import run_loads
from bench.hbase import settings_of
from bench.rounds import Row, Section, Spread, in_turns
from bench.silence import silences
from plainsong.protocol.cluster import Assignment, Member, Placement
from plainsong.protocol.ids import ID_BYTES
from tests.hbase_server import HBase, why_not

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bench.profiles import Profile

SIZE, GROUP = 100, 100
SESSION_S = 4.0
SAYS = f"""Requests of 100 messages of 100 B (*publish*), or of one (*single*), on HBase. *topics*: the same number of
topics for each instance, two connections to each topic's owner; processor time of all daemons, and of HBase and its
gateway. *forwarded*: the same through an instance that does not own the topic, compared with requests to the owner, and
how the processor time is divided. *hand-over*: seconds from the release of a topic, or its owner's death, to the new
owner's first answer to a publish, one client a topic: *leaving* at SIGTERM, *killed* at SIGKILL with a session of
{SESSION_S:g} s in ZooKeeper, which notices at the end of one of its ticks."""


def measure_cluster(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure one, two and three instances in turn; without Java, print a line and return no rows."""
    section = Section("cluster", "Several instances", SAYS)
    if (lacking := why_not()) is not None:
        say(lacking)
        return section
    with HBase(scratch / "hbase", jvm=profile.jvm) as hbase:
        for instances in profile.instances:
            with _Cluster.open(hbase, scratch, instances) as cluster:
                section.rows.append(_over_topics(cluster, profile))
                if instances > 1:
                    section.rows += [_forwarded(cluster, profile, *each) for each in _kinds(cluster)]
        _compare(section.rows)
        for what, end in (("leaving", _leave), ("killed", _kill)):
            with _Cluster.open(hbase, scratch, 2) as cluster:
                section.rows.append(_handed_over(cluster, profile, what, end))
    for row in section.rows:
        what = ", ".join(str(value) for value in row.what.values())
        say(f"cluster {what}: " + "  ".join(f"{name} {value.median:,.3f}" for name, value in row.values.items()))
    return section


def _compare(rows: Sequence[Row]) -> None:
    """Add the cost of a message, or forwarded request, relative to the deployment with the fewest instances."""
    first: dict[str, Row] = {}
    for row in rows:
        name = f"{row.what['what']}, {row.what['connections']}"
        column = "daemons µs" if row.what["what"] == "topics" else "forwarder µs"
        fewest = first.setdefault(name, row)
        if fewest is not row:
            row.values["÷ fewer instances"] = Spread.of([row.values[column].median / fewest.values[column].median])


_runs = count()


class _Cluster:
    """Instances of one cluster, and their topics."""

    def __init__(self, hbase: HBase, daemons: dict[str, Daemon]) -> None:
        self.hbase = hbase
        self.daemons = daemons
        members = [Member(name, f"127.0.0.1:{ours.port}") for name, ours in daemons.items()]
        self._assignment = Assignment(members, Placement())
        self._run = next(_runs)

    @classmethod
    @contextmanager
    def open(cls, hbase: HBase, scratch: Path, instances: int) -> Iterator[_Cluster]:
        """Start this many instances; stop them at the end."""
        run = next(_runs)
        with ExitStack() as stack:
            daemons = {}
            for number in range(instances):
                settings = settings_of(hbase) | {
                    "cluster_zookeeper": f"127.0.0.1:{hbase.zookeeper}/bench-{run}",
                    "cluster_instance": f"instance-{number}",
                    "cluster_session_timeout_s": SESSION_S,
                }
                ours = daemon(scratch / f"data-{run}-{number}", **settings)
                daemons[f"instance-{number}"] = stack.enter_context(ours)
            yield cls(hbase, daemons)

    def topics(self, what: str, owned_by: str, wanted: int) -> list[str]:
        """Create topics that the instance ``owned_by`` owns."""
        names = (f"{what}-{self._run}-{number}" for number in count())
        found: list[str] = []
        while len(found) < wanted:
            name = next(names)
            owner = self._assignment.owner(bodies.topic(name))
            assert owner is not None  # there are instances
            if owner.name == owned_by:
                self.daemons[owned_by].create(name)
                self._wait_owned(owned_by, name)
                found.append(name)
        return found

    def _wait_owned(self, owner: str, topic: str) -> None:
        """Wait until the owner answers for the topic without forwarding. Raises RuntimeError after 30 seconds."""
        until_s = time.monotonic() + 30
        while time.monotonic() < until_s:
            connection = HTTPConnection("127.0.0.1", self.daemons[owner].port, timeout=30)
            connection.request("GET", bodies.path(topic))
            answer = connection.getresponse()
            answer.read()
            connection.close()
            if answer.status == 200 and answer.getheader("Plainsong-Owner") is None:
                return
            time.sleep(0.05)
        raise RuntimeError(f"{owner} does not own {topic}, as it should")

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time of each instance, and (``hbase``) of everything they share."""
        used = {name: ours.cpu_s() for name, ours in self.daemons.items()}
        return used | {"hbase": sum(cpu_s(process.pid) for process in self.hbase.processes.values())}


def _over_topics(cluster: _Cluster, profile: Profile) -> Row:
    """Publish to all topics at once, each at its owner."""
    targets = [
        (ours.port, bodies.publish(topic, GROUP, SIZE))
        for name, ours in cluster.daemons.items()
        for topic in cluster.topics("many", name, profile.cluster_topics)
    ]
    measured = partial(_spent, cluster, targets, 2 * len(targets), profile.seconds * 3)
    if profile.warms_up:
        measured()
    found = [measured() for _ in range(profile.rounds)]
    names = list(cluster.daemons)
    values = {
        "messages/s": Spread.of([rate * GROUP for rate, _ in found]),
        "daemons µs": Spread.of([sum(used[name] for name in names) / GROUP * 1e6 for _, used in found]),
        "others µs": Spread.of([used["hbase"] / GROUP * 1e6 for _, used in found]),
    }
    return Row({"what": "topics", "instances": len(names), "connections": 2 * profile.cluster_topics}, values)


def _spent(
    cluster: _Cluster, targets: Sequence[tuple[int, bytes]], connections: int, seconds: float
) -> tuple[float, dict[str, float]]:
    """Return requests per second, and seconds of processor time per request, by process."""
    before = cluster.cpu_s()
    result = run_loads(targets, connections, seconds)
    requests = result["requests"] + 2 * connections
    used = {name: (after - before[name]) / requests for name, after in cluster.cpu_s().items()}
    return float(result["requests_per_s"]), used | {"p50_ms": result["p50_ms"]}


def _kinds(cluster: _Cluster) -> list[tuple[str, bytes, int]]:
    """Return the requests to forward: publishes to and polls of a topic of the first instance."""
    (topic,) = cluster.topics("forwarded", "instance-0", 1)
    port = cluster.daemons["instance-0"].port
    run_loads([(port, bodies.publish(topic, 1000, SIZE))], 1, 0.1)  # messages to poll, cached
    polled = bodies.poll(topic, "frames", bytes(ID_BYTES), 1000)
    return [
        ("single", bodies.publish(topic, 1, SIZE), 1),
        ("single", bodies.publish(topic, 1, SIZE), 16),
        ("publish", bodies.publish(topic, GROUP, SIZE), 16),
        ("poll of 1000", polled, 1),
    ]


def _forwarded(cluster: _Cluster, profile: Profile, what: str, request: bytes, connections: int) -> Row:
    """Measure one request at its owner, and through the other instance."""
    used: dict[str, list[dict[str, float]]] = {"direct": [], "forwarded": []}

    def side(name: str, port: int) -> float:
        _, spent = _spent(cluster, [(port, request)], connections, profile.seconds)
        used[name].append(spent)
        return spent["p50_ms"]

    owner, other = (cluster.daemons[f"instance-{number}"].port for number in (0, 1))
    sides = {"direct": partial(side, "direct", owner), "forwarded": partial(side, "forwarded", other)}
    found = in_turns(sides, profile.rounds)
    values = {
        "direct ms": Spread.of(found["direct"]),
        "forwarded ms": Spread.of(found["forwarded"]),
        "÷ direct": Spread.ratio(found["forwarded"], found["direct"]),
        "owner µs, direct": Spread.of([each["instance-0"] * 1e6 for each in used["direct"]]),
        "owner µs": Spread.of([each["instance-0"] * 1e6 for each in used["forwarded"]]),
        "forwarder µs": Spread.of([each["instance-1"] * 1e6 for each in used["forwarded"]]),
    }
    return Row({"what": f"forwarded {what}", "instances": len(cluster.daemons), "connections": connections}, values)


def _handed_over(cluster: _Cluster, profile: Profile, what: str, end: Callable[[Daemon], None]) -> Row:
    """End the first instance; measure when the second one's clients can publish to each of its topics again."""
    topics = cluster.topics(what, "instance-0", profile.handed_topics)
    goes, stays = cluster.daemons["instance-0"], cluster.daemons["instance-1"]
    before = cluster.cpu_s()
    leaving = goes if what == "leaving" else None
    found = silences(stays.port, topics, partial(end, goes), leaving=leaving)
    del cluster.daemons["instance-0"]  # it has ended
    after = cluster.cpu_s()
    values = {"median s": found[len(found) // 2], "worst s": found[-1]}
    if what == "leaving":
        values["median s a thousand"] = values["median s"] * 1000 / len(topics)
        values["daemon µs"] = (after["instance-1"] - before["instance-1"]) / len(topics) * 1e6
        values["others µs"] = (after["hbase"] - before["hbase"]) / len(topics) * 1e6
    row = {name: Spread.of([value]) for name, value in values.items()}
    return Row({"what": f"hand-over, {what}", "instances": 2, "connections": len(topics)}, row)


def _leave(ours: Daemon) -> None:
    ours.process.terminate()


def _kill(ours: Daemon) -> None:
    ours.process.kill()
