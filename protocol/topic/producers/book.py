"""What a topic remembers of all its producers, by name and in the order in which they last did something.

A topic that never had a producer has an empty book, which costs nothing to keep, to write or to load.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from protocol.topic.producers.policy import INHERITED, Effective

if TYPE_CHECKING:
    from protocol.properties import Deduplication
    from protocol.topic.producers.policy import NamespacePolicy
    from protocol.topic.producers.record import Producer, Remembering

#: Until somebody has said anything.
_BY_DEFAULT = Effective(enabled=True, level="service")


class Seen(NamedTuple):
    """What was last said about remembering producers."""

    generation: int
    own: Deduplication
    policy: NamespacePolicy


@dataclass(slots=True)
class Book:
    """The producers of one generation."""

    retention_ms: int
    """How long an inactive producer is remembered that has not asked for longer."""
    known: OrderedDict[str, Producer] = field(default_factory=OrderedDict)
    """By name; the one that has been inactive for longest comes first."""
    damaged: set[str] = field(default_factory=set)
    """Producers whose rows cannot be read."""
    record: Remembering | None = None
    """As it is on disk; None: no producer has been here."""
    policy: Effective = _BY_DEFAULT
    """Whether producers are remembered, and who said so."""
    seen: Seen | None = None
    changed: set[str] = field(default_factory=set)
    """Whose rows have to be written before the next high-water mark."""
    record_changed: bool = False
    leftover: list[str] = field(default_factory=list)
    """Producers whose rows mean nothing any more and are still there."""
    long: int = 0
    """Producers that asked for a longer memory."""
    entries: int = 0
    """Requests of producers since the last snapshot."""
    due_s: float | None = None
    """When a snapshot is due although nothing happens, on the clock that only goes forward."""
    snapshot_position: bytes | None = None
    snapshot_ms: int = 0
    replayed_entries: int = 0
    replay_ms: int = 0

    @property
    def enabled(self) -> bool:
        """Whether producers are remembered."""
        return self.policy.enabled

    @property
    def switched(self) -> int:
        """How often the namespace was switched off."""
        return (INHERITED if self.seen is None else self.seen.policy).switched

    @property
    def epochs(self) -> int:
        """No epoch up to this one may be given to a name that is not known."""
        return 0 if self.record is None else self.record.epochs

    def add(self, producer: Producer) -> None:
        """Take in a producer as the last that did something."""
        self.known[producer.name] = producer
        self.long += producer.memory_ms is not None

    def touch(self, producer: Producer, time_ms: int) -> None:
        """It did something, and what is known of it has to be written some time."""
        producer.active_ms = time_ms
        self.known.move_to_end(producer.name)
        self.changed.add(producer.name)

    def pop(self, name: str) -> Producer | None:
        """Take a producer out."""
        self.damaged.discard(name)
        self.changed.discard(name)
        producer = self.known.pop(name, None)
        if producer is not None:
            self.long -= producer.memory_ms is not None
        return producer

    def clear(self) -> None:
        """Forget all of them."""
        self.known.clear()
        self.damaged.clear()
        self.changed.clear()
        self.long = self.entries = 0
        self.due_s = None

    def expires_ms(self, producer: Producer) -> int:
        """Until when it is remembered if it does nothing more."""
        return producer.active_ms + max(self.retention_ms, producer.memory_ms or 0)

    def expired(self, time_ms: int) -> list[str]:
        """Those whose memory is over."""
        gone = []
        for producer in self.known.values():
            if time_ms <= producer.active_ms + self.retention_ms:
                break
            if time_ms > self.expires_ms(producer):
                gone.append(producer.name)
        return gone

    def idle(self, before_ms: int, at_most: int) -> list[str]:
        """The longest inactive ones that did nothing since ``before_ms`` and asked for no longer memory."""
        gone: list[str] = []
        for producer in self.known.values():
            if producer.active_ms >= before_ms or len(gone) >= at_most:
                break
            if producer.memory_ms is None:
                gone.append(producer.name)
        return gone

    def noted(self, position: bytes | None, time_ms: int) -> None:
        """All that is known is in the rows, up to ``position``."""
        self.changed.clear()
        self.entries = 0
        self.due_s = None
        self.snapshot_position, self.snapshot_ms = position, time_ms

    def load(self, row: Remembering, producers: dict[str, Producer | None]) -> None:
        """Take what the metadata table has: None for a producer whose row cannot be read."""
        self.record = row
        if not row.on:
            self.leftover = list(producers)
            return
        for name, producer in producers.items():
            if producer is None:
                self.damaged.add(name)
            else:
                self.add(producer)

    def loaded(self) -> None:
        """All rows are in: bring them into their order."""
        if self.known:
            self.known = OrderedDict(sorted(self.known.items(), key=lambda item: item[1].active_ms))
