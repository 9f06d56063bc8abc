"""A model of a deployment under load, topic by topic: owners, commit rates, and the resulting load of each resource.

    rates       topic k of a shuffled list gets a share of 1 / k^skew of all messages (0: all equal)
    owners      by the daemon's rendezvous hashing; regions by the store's hash byte, split evenly, assigned round-robin
    commits     requests arrive at random (rate r); those arriving during a commit (of duration T) share the next:
                1 / (T + exp(-r T) / r) a second; more if a commit would exceed ``commit_max_bytes``
    T           two round trips: rows put if absent, head compared and set; stretched by queueing at the busiest region
                server, 1 / (1 - utilization): slower commits are fewer and larger, so both are solved for together
    readers     wait for the next commit, then take two round trips to poll again; a poll that finds messages costs a
                head check, shared by all that arrive during one
    forwarding  a share of requests arrives at any instance, and all but one in N of these are forwarded

Not modelled: transactions, cleaning, compactions (``headroom`` leaves room for them), and the network.
"""

from __future__ import annotations

import math
import random
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from plainsong.protocol.cluster import Member, rendezvous_score
from plainsong.protocol.keys import metadata_key
from plainsong.protocol.names import TopicName
from storage.hbase.layout import HASHES, hashed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.scale_costs import Costs

NAMESPACE = "scale"
OWNER, ONE_TOPIC = "an owner's core", "one topic's share of its owner"


@dataclass(frozen=True, slots=True)
class Load:
    """The users' load."""

    topics: int = 100_000
    messages_per_s: float = 1e6
    message_bytes: int = 100
    messages_per_request: float = 10.0
    skew: float = 0.5
    readers_per_topic: float = 1.0
    misdirected: float = 0.1
    """Share of the requests that go to any instance because the client has not learned the owner."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The operator's deployment."""

    instances: int
    region_servers: int
    cores: int = 16
    """Cores of a region server, and of the gateway next to it."""
    regions: int = 256
    commit_max_bytes: int = 8 << 20
    replicas: int = 3


@dataclass(slots=True)
class Instance:
    """One daemon."""

    topics: int = 0
    messages_per_s: float = 0.0
    busy: float = 0.0
    """Utilization of its one core."""


@dataclass(slots=True)
class RegionServer:
    """One region server, with the gateway next to it."""

    messages_per_s: float = 0.0
    writes_per_s: float = 0.0
    reads_per_s: float = 0.0
    busy: float = 0.0
    """Utilization of its cores."""
    gateway_busy: float = 0.0
    """Utilization of the gateway's cores, of which it has as many as the region server."""
    log_bytes_per_s: float = 0.0
    """Before replication."""


@dataclass(slots=True)
class Outcome:
    """The fleet's state under the load."""

    instances: list[Instance]
    region_servers: list[RegionServer]
    commits_per_s: float = 0.0
    requests_per_s: float = 0.0
    busiest_topic: float = 0.0
    """Largest share of its owner's core that one topic takes."""
    commit_ms: float = 0.0
    walls: dict[str, float] = field(default_factory=dict)
    """Utilization of each resource by its busiest member; 1 is the limit."""

    @property
    def first_wall(self) -> str:
        """Return the resource with the highest utilization."""
        return max(self.walls, key=lambda name: self.walls[name])


class Placement:
    """The topics of a load: message rate and hash of each. The same seed gives the same placement."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.names = [TopicName(NAMESPACE, f"topic-{number:06d}") for number in range(load.topics)]
        weights = [1 / rank**load.skew for rank in range(1, load.topics + 1)]
        random.Random(seed).shuffle(weights)
        total = math.fsum(weights)
        self.rates = [load.messages_per_s * weight / total for weight in weights]
        self._hashes = [hashed(metadata_key(name))[0] for name in self.names]
        #: Owners by number of instances, computed incrementally; the lowest score of each topic so far.
        self._owners: list[list[int]] = []
        self._least = [math.inf] * load.topics

    def owners(self, instances: int) -> list[int]:
        """Return each topic's owner, by number, as ``Assignment`` does for this many members of equal weight."""
        while len(self._owners) < instances:
            number = len(self._owners)
            owners = list(self._owners[-1]) if number else [0] * len(self.names)
            member = member_of(number)
            for at, name in enumerate(self.names):
                if (drawn := rendezvous_score(member.name, member.weight, name)) < self._least[at]:
                    self._least[at] = drawn
                    owners[at] = number
            self._owners.append(owners)
        return self._owners[instances - 1]

    def asked(self, load: Load) -> Placement:
        """Return the same topics under another load. Raises ValueError if its topics or skew differ."""
        if (load.topics, load.skew) != (self.load.topics, self.load.skew):
            raise ValueError("other topics are another placement")
        other = copy(self)
        other.load = load
        other.rates = [rate * load.messages_per_s / self.load.messages_per_s for rate in self.rates]
        return other

    def region_servers(self, fleet: Fleet) -> list[int]:
        """Return the number of each topic's region server."""
        return [hash_byte * fleet.regions // HASHES % fleet.region_servers for hash_byte in self._hashes]


def member_of(number: int) -> Member:
    """Return an instance as a cluster member."""
    return Member(f"instance-{number:04d}", f"10.0.0.1:{number}")


def reckon(placement: Placement, fleet: Fleet, costs: Costs) -> Outcome:
    """Return the deployment's steady state under this load."""
    low, high = 0.0, 0.99
    outcome = _reckon(placement, fleet, costs, busy=0.0)
    if _busiest(server.busy for server in outcome.region_servers) == 0:
        return outcome
    # The busier HBase is, the longer commits take and the more requests share one: the two curves cross once.
    for _ in range(10):
        middle = (low + high) / 2
        outcome = _reckon(placement, fleet, costs, busy=middle)
        if _busiest(server.busy for server in outcome.region_servers) > middle:
            low = middle
        else:
            high = middle
    return outcome


def commits_per_s(requests_per_s: float, commit_s: float) -> float:
    """Return a topic's commit rate if a commit takes ``commit_s`` and requests arriving during it share the next."""
    return 1 / (commit_s + math.exp(-min(requests_per_s * commit_s, 700)) / requests_per_s)


def _reckon(placement: Placement, fleet: Fleet, costs: Costs, busy: float) -> Outcome:
    load = placement.load
    round_trip_s = costs.round_trip_ms / 1e3 / (1 - busy)
    commit_s = 2 * round_trip_s + costs.commit_us / 1e6
    outcome = Outcome(
        [Instance() for _ in range(fleet.instances)], [RegionServer() for _ in range(fleet.region_servers)]
    )
    outcome.commit_ms = commit_s * 1e3
    owners, homes = placement.owners(fleet.instances), placement.region_servers(fleet)
    message_us = costs.message_us + load.readers_per_topic * costs.delivered_us
    forwarded = load.misdirected * (fleet.instances - 1) / fleet.instances
    for messages, owner, home in zip(placement.rates, owners, homes, strict=True):
        requests = messages / load.messages_per_request
        size = messages * (load.message_bytes + costs.row_bytes)
        commits = max(commits_per_s(requests, commit_s), size / fleet.commit_max_bytes)
        polls = load.readers_per_topic * commits_per_s(commits, 2 * round_trip_s)
        found = polls * -math.expm1(-commits * 2 * round_trip_s)
        looks = min(found, 1 / round_trip_s)
        asked = requests + polls
        used_us = requests * costs.request_us + commits * costs.commit_us + polls * costs.poll_us
        used_us += looks * costs.look_us + messages * message_us + asked * forwarded * costs.forwarded_us
        instance = outcome.instances[owner]
        instance.topics += 1
        instance.messages_per_s += messages
        instance.busy += used_us / 1e6
        server = outcome.region_servers[home]
        server.messages_per_s += messages
        server.writes_per_s += 2 * commits
        server.reads_per_s += looks
        server.log_bytes_per_s += size + 2 * commits * costs.log_write_bytes
        outcome.commits_per_s += commits
        outcome.requests_per_s += asked
        outcome.busiest_topic = max(outcome.busiest_topic, used_us / 1e6)
    # A client that has not learned the owner asks any instance: forwarding is spread evenly.
    for instance in outcome.instances:
        instance.busy += outcome.requests_per_s * forwarded * costs.forward_us / 1e6 / fleet.instances
    for server in outcome.region_servers:
        _serve(server, fleet, costs, load)
    outcome.walls = _walls(outcome)
    return outcome


def _serve(server: RegionServer, fleet: Fleet, costs: Costs, load: Load) -> None:
    size = server.messages_per_s * (load.message_bytes + costs.row_bytes)
    used_us = server.writes_per_s * costs.region_write_us + server.reads_per_s * costs.region_read_us
    server.busy = (used_us + size * costs.region_byte_ns / 1e3) / 1e6 / fleet.cores
    used_us = (server.writes_per_s + server.reads_per_s) * costs.gateway_call_us
    server.gateway_busy = (used_us + size * costs.gateway_byte_ns / 1e3) / 1e6 / fleet.cores


def _walls(outcome: Outcome) -> dict[str, float]:
    return {
        OWNER: _busiest(instance.busy for instance in outcome.instances),
        ONE_TOPIC: outcome.busiest_topic,
        "a region server's cores": _busiest(server.busy for server in outcome.region_servers),
        "a gateway's cores": _busiest(server.gateway_busy for server in outcome.region_servers),
        "a region server's log": _busiest(server.log_bytes_per_s for server in outcome.region_servers)
        / LOG_BYTES_PER_S,
    }


#: Capacity of a region server's log: a share of a disk or a ten-gigabit link, with three replicas in flight.
LOG_BYTES_PER_S = 200e6


def _busiest(values: Iterable[float]) -> float:
    return max(values, default=0.0)


def largest_topic(load: Load, costs: Costs, busy: float) -> float:
    """Return the messages a second at which a single topic, without other load, makes its owner this busy."""
    low, high = 1.0, 1e9
    for _ in range(50):
        middle = math.sqrt(low * high)
        alone = Placement(replace(load, topics=1, messages_per_s=middle), seed=0)
        if _reckon(alone, Fleet(1, 1), costs, busy=0.0).busiest_topic < busy:
            low = middle
        else:
            high = middle
    return low


def skew_of(values: Sequence[float]) -> float:
    """Return the ratio of the largest to the mean: 1 is even."""
    return max(values) / (math.fsum(values) / len(values))
