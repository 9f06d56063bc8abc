"""The producers that a topic remembers: a producer and its row, the table of all producers, and the policy."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from plainsong.protocol.ids import checked_position
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.records import checked_number, pack_record, unpack_record
from plainsong.protocol.requests import MAX_SEQUENCE_ID

if TYPE_CHECKING:
    from typing import Any

    from plainsong.protocol.names import TopicName
    from plainsong.protocol.properties import Deduplication

Level = Literal["topic", "namespace", "service"]
#: Plainsong's own namespace: its topics remember producers only if their own property says so.
SYSTEM_NAMESPACE = "system"


class NamespacePolicy(NamedTuple):
    """A namespace's setting for its topics' producers."""

    enabled: bool | None = None
    """None: the service's default."""
    switched: int = 0
    """Grows whenever the namespace is switched from remembering producers to forgetting them."""


#: The policy of a namespace without properties.
INHERITED = NamespacePolicy()


class Effective(NamedTuple):
    """The policy in effect for a topic, and the level that it comes from."""

    enabled: bool
    level: Level


def effective_policy(name: TopicName, own: Deduplication, policy: NamespacePolicy, *, default: bool) -> Effective:
    """Return the policy for topic ``name``: its own property ``own``, else its namespace's, else the service's default."""
    if own != "inherit":
        return Effective(own == "enabled", "topic")
    if name.namespace == SYSTEM_NAMESPACE:
        return Effective(enabled=False, level="service")
    if policy.enabled is not None:
        return Effective(policy.enabled, "namespace")
    return Effective(default, "service")


# --- rows ------------------------------------------------------------------------------------------
#
# producer row    e epoch  h highest id  u highest under a pointer  a active  m retention (ms)
#                 r results: lowest id, highest id, first and last position, write pointer or 0
# producers row   o on  s switched  f from  g forgotten  x epochs


#: Number of recent requests of a producer to remember, with the positions of their messages.
MAX_RESULTS = 5


class Result(NamedTuple):
    """One stored request: its lowest and highest id, and the positions (10 bytes) of its first and last row."""

    low: int
    high: int
    first: bytes
    last: bytes
    pointer: int
    """The write pointer it was published under; 0 if none."""


@dataclass(slots=True)
class Producer:
    """One producer in one generation of a topic."""

    name: str
    epoch: int = 0
    """The epoch of its latest session; 0 if it never opened one."""
    pushed: int = -1
    """The highest sequence id accepted."""
    persisted: int = -1
    """The highest durable sequence id; lower than ``pushed`` while a commit is under way."""
    active_ms: int = 0
    retention_ms: int | None = None
    """Its retention while inactive, if longer than the default."""
    recent: tuple[Result, ...] = ()
    highest_transactional: int = -1
    """The highest id ever published under a write pointer."""

    def record(self, result: Result) -> None:
        """Remember a request with the positions of its rows."""
        self.pushed = result.high
        if result.pointer:
            self.highest_transactional = result.high
        self.recent = self.recent[1 - MAX_RESULTS :] + (result,)  # noqa: RUF005  # half the time of an unpacking

    def encode(self) -> bytes:
        record: dict[str, object] = {"e": self.epoch, "h": self.pushed, "a": self.active_ms}
        if self.highest_transactional >= 0:
            record["u"] = self.highest_transactional
        if self.retention_ms is not None:
            record["m"] = self.retention_ms
        if self.recent:
            record["r"] = self.recent
        return pack_record(record)

    @classmethod
    def decode(cls, name: str, value: bytes) -> Producer:
        record = unpack_record(value, "producer")
        try:
            highest = checked_number(record["h"], -1, MAX_SEQUENCE_ID)
            return cls(
                name,
                epoch=checked_number(record["e"]),
                pushed=highest,
                persisted=highest,
                highest_transactional=checked_number(record.get("u", -1), -1, MAX_SEQUENCE_ID),
                active_ms=checked_number(record["a"]),
                retention_ms=checked_number(record["m"]) if "m" in record else None,
                recent=tuple(map(_result, record.get("r", ()))),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRow(f"a producer row has a missing or invalid field: {error!r}") from error


def _result(packed: Any) -> Result:
    low, high, first, last, pointer = packed
    ids = (checked_number(low, 0, MAX_SEQUENCE_ID), checked_number(high, 0, MAX_SEQUENCE_ID))
    return Result(*ids, checked_position(first), checked_position(last), checked_number(pointer, 0, MAX_SEQUENCE_ID))


@dataclass(frozen=True, slots=True)
class DeduplicationRecord:
    """A generation's row about deduplication: its state, and the positions from which stamps are valid."""

    on: bool = True
    switched: int = field(default=0, compare=False)
    """``NamespacePolicy.switched`` when this was written."""
    since: bytes | None = None
    """The position up to which stamps are void; None if all are valid."""
    forgotten: bytes | None = None
    """The topic's last position when producers were last forgotten; earlier stamps are in the producers' rows, or void."""
    epochs: int = 0
    """Sessions get only epochs above this one."""

    def counts_from(self) -> bytes:
        """Return the position after which stamps are replayed."""
        return max(self.since or b"", self.forgotten or b"")

    def encode(self) -> bytes:
        record: dict[str, object] = {"o": self.on, "s": self.switched, "x": self.epochs}
        if self.since is not None:
            record["f"] = self.since
        if self.forgotten is not None:
            record["g"] = self.forgotten
        return pack_record(record)

    @classmethod
    def decode(cls, value: bytes) -> DeduplicationRecord:
        record = unpack_record(value, "producers")
        try:
            return cls(
                record["o"] is True,
                checked_number(record["s"]),
                checked_position(record["f"]) if "f" in record else None,
                checked_position(record["g"]) if "g" in record else None,
                checked_number(record["x"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRow(f"a producers row has a missing or invalid field: {error!r}") from error


# --- the table of all producers --------------------------------------------------------------------


#: The value before the policy is first applied.
_BY_DEFAULT = Effective(enabled=True, level="service")


class AppliedPolicy(NamedTuple):
    """The most recently applied settings."""

    generation: int
    own: Deduplication
    policy: NamespacePolicy


@dataclass(slots=True)
class ProducerTable:
    """The producers of one generation; an empty table costs nothing to keep, write or load."""

    retention_ms: int
    """The default retention of an inactive producer."""
    known: OrderedDict[str, Producer] = field(default_factory=OrderedDict)
    """By name, in the order of last activity."""
    damaged: set[str] = field(default_factory=set)
    """Producers whose rows cannot be read."""
    record: DeduplicationRecord | None = None
    """The row on disk; None if the generation never had a producer."""
    policy: Effective = _BY_DEFAULT
    """The policy in effect."""
    applied: AppliedPolicy | None = None
    changed: set[str] = field(default_factory=set)
    """Names of producers whose rows have to be written before the next high-water mark."""
    record_changed: bool = False
    obsolete: list[str] = field(default_factory=list)
    """Names of producers with void rows that are still on disk."""
    long_retention: int = 0
    """The number of producers with a longer retention than the default."""
    entries: int = 0
    """Requests of producers since the last snapshot."""
    due_s: float | None = None
    """The time at which a snapshot is due even without requests, on the monotonic clock."""
    snapshot_position: bytes | None = None
    snapshot_ms: int = 0
    replayed_entries: int = 0
    replay_ms: int = 0

    @property
    def enabled(self) -> bool:
        """True if producers are remembered."""
        return self.policy.enabled

    @property
    def switched(self) -> int:
        """``NamespacePolicy.switched`` as last applied."""
        return (INHERITED if self.applied is None else self.applied.policy).switched

    @property
    def epochs(self) -> int:
        """Unknown producers must get epochs above this one."""
        return 0 if self.record is None else self.record.epochs

    def add(self, producer: Producer) -> None:
        """Add a producer as the most recently active."""
        self.known[producer.name] = producer
        self.long_retention += producer.retention_ms is not None

    def touch(self, producer: Producer, time_ms: int) -> None:
        """Record activity of a producer; its row is written with the next snapshot."""
        producer.active_ms = time_ms
        self.known.move_to_end(producer.name)
        self.changed.add(producer.name)

    def pop(self, name: str) -> Producer | None:
        self.damaged.discard(name)
        self.changed.discard(name)
        producer = self.known.pop(name, None)
        if producer is not None:
            self.long_retention -= producer.retention_ms is not None
        return producer

    def clear(self) -> None:
        """Forget all producers."""
        self.known.clear()
        self.damaged.clear()
        self.changed.clear()
        self.long_retention = self.entries = 0
        self.due_s = None

    def expires_ms(self, producer: Producer) -> int:
        """Return the time until which a producer is remembered if it stays inactive."""
        return producer.active_ms + max(self.retention_ms, producer.retention_ms or 0)

    def expired(self, time_ms: int) -> list[str]:
        """Return the names of the producers whose retention is over."""
        gone = []
        for producer in self.known.values():
            if time_ms <= producer.active_ms + self.retention_ms:
                break
            if time_ms > self.expires_ms(producer):
                gone.append(producer.name)
        return gone

    def idle(self, before_ms: int, at_most: int) -> list[str]:
        """Return the longest inactive producers with the default retention, up to ``at_most``.

        Only those last active before ``before_ms`` are returned.
        """
        gone: list[str] = []
        for producer in self.known.values():
            if producer.active_ms >= before_ms or len(gone) >= at_most:
                break
            if producer.retention_ms is None:
                gone.append(producer.name)
        return gone

    def snapshot_written(self, position: bytes | None, time_ms: int) -> None:
        """Record that the rows are up to date up to ``position``."""
        self.changed.clear()
        self.entries = 0
        self.due_s = None
        self.snapshot_position, self.snapshot_ms = position, time_ms

    def load(self, row: DeduplicationRecord, producers: dict[str, Producer | None]) -> None:
        """Load the rows on disk; a producer is None if its row cannot be read."""
        self.record = row
        if not row.on:
            self.obsolete = list(producers)
            return
        for name, producer in producers.items():
            if producer is None:
                self.damaged.add(name)
            else:
                self.add(producer)

    def loaded(self) -> None:
        """Complete the load: order the producers by activity."""
        if self.known:
            self.known = OrderedDict(sorted(self.known.items(), key=lambda item: item[1].active_ms))
