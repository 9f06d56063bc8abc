"""What a topic's actor can be asked about producers: open a session, show one or all, forget one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.topic.asks import Ask

if TYPE_CHECKING:
    from protocol.requests import PublishResponse


@dataclass(frozen=True, slots=True)
class ResultView:
    """One request of a producer that is remembered with where its messages went."""

    first: int
    last: int
    """Its lowest and highest sequence id."""
    first_id: bytes
    last_id: bytes
    """Ids (20 bytes) of the rows of its first and last message."""
    response: PublishResponse | None
    """What the publish under a write pointer answered; None: it had none."""


@dataclass(frozen=True, slots=True)
class ProducerView:
    """A producer as a topic remembers it."""

    name: str
    epoch: int
    """The number of its session, growing; 0: it never opened one."""
    last_sequence_id: int
    """The highest id that is durable; -1: none."""
    pushed: int
    """The highest id that was taken; above the other only while a commit is under way."""
    generation: int
    enabled_from: bytes | None
    """The position (10 bytes) behind which deduplication holds; None: from the first message of the generation."""
    active_ms: int
    """When it last did anything."""
    expires_ms: int
    """When it is forgotten if it does nothing more."""
    recent: tuple[ResultView, ...] = ()
    """Its last requests, oldest first."""
    damaged: bool = False
    """Its row cannot be read: it can be removed, and nothing else."""


@dataclass(slots=True)
class OpenProducer(Ask[ProducerView]):
    """Open a session: from now on what older ones of this name still send is refused.

    Raises:
      TopicNotFound, GenerationChanged, DeduplicationDisabled, TooManyProducers, ProducerFenced (it must be new, and
      is not), InvalidParameter (``retention_ms`` over its bound), DamagedRow: nothing happened.
    """

    name: str
    retention_ms: int | None = None
    """How long to remember it while it is inactive; None: as it was, or by default. Shorter than the default counts
    as the default."""
    must_be_new: bool = False
    """For names the service makes: there must be no such producer yet."""
    generation: int | None = None
    """The topic's generation that the caller means; None: whatever it is."""
    discard_staged: bool = False
    """What it staged and did not publish never is: of attempts that failed, say."""


@dataclass(slots=True)
class GetProducer(Ask[ProducerView]):
    """One producer, of the last generation, also while that is deleted.

    For older generations there is ``actors.reading.producer_of``.

    Raises:
      TopicNotFound, ProducerNotFound, ProducerExpired (the generation is gone with all it knew), GenerationChanged
      (``generation`` is an older one), DamagedRow.
    """

    name: str
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """How far what is known about producers has been written, and what the last load had to read behind it."""

    position: bytes | None
    """10 bytes: all up to there is in the producers' rows; None: nothing was published before it."""
    at_ms: int
    entries_since: int
    """Requests of producers since."""
    replayed_entries: int
    replay_ms: int


@dataclass(frozen=True, slots=True)
class ProducerPage:
    """Some of a topic's producers, by name."""

    producers: tuple[ProducerView, ...]
    more: bool
    """Whether there are others behind the last one."""
    total: int
    enabled: bool
    enabled_from: bytes | None
    snapshot: SnapshotView


@dataclass(slots=True)
class ListProducers(Ask[ProducerPage]):
    """The producers whose names come after ``after``, at most ``limit`` of them. Raises TopicNotFound."""

    after: str = ""
    limit: int = 100


@dataclass(slots=True)
class RemoveProducer(Ask[None]):
    """Forget a producer: its sequence ids may be used again, its sessions are over.

    Raises TopicNotFound, ProducerNotFound.
    """

    name: str
