"""What a topic's actor can be asked, each request with the type of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from plainsong.protocol.effects import Ask
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import before, bound_at
from plainsong.protocol.properties import DEFAULT_TTL_S
from plainsong.protocol.requests import PublishResponse, Receipt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.protocol.properties import TopicProperties
    from plainsong.protocol.records import Metadata, Reader
    from plainsong.protocol.requests import PublishRequest


@dataclass(slots=True)
class Publish(Ask[Receipt]):
    """Store the messages of one request, all in one commit."""

    request: PublishRequest
    size: int


@dataclass(slots=True)
class PublishEach(Ask[Receipt | list[Receipt | PlainsongError]]):
    """Store messages of which each is a request of its own, and has nothing but its payload.

    The answer is what each of them would have been answered, in their order; or, when all are stored, the receipt
    of all of them as if they were one: their ids follow each other.
    """

    messages: Sequence[bytes]
    size: int


@dataclass(slots=True)
class Span:
    """What a reader may read: ``since <= id < until`` of one generation, as of ``now_ms``."""

    generation: int
    prefix: bytes
    """What the generation's message keys start with."""
    since: bytes
    """Where the reader wanted to start, inclusive."""
    until: bytes
    """Exclusive; never beyond the read watermark."""
    now_ms: int
    oldest_ms: int
    """The first publish time that has not expired by the topic's ttl."""
    watermark: bytes | None
    """The highest id the last completed commit can have; None before the first."""
    expired: bool = False
    """Messages from ``since`` on have expired by the topic's ttl, or may have: see ``Usage.expired_from``."""

    @property
    def start(self) -> bytes:
        """Where reading begins: ``since``, or the oldest message that lives."""
        return max(self.since, bound_at(self.oldest_ms))

    @property
    def resume(self) -> bytes | None:
        """The id to resume from, exclusively, once all of the span has been read; None: from the start."""
        return before(max(self.since, self.until))


@dataclass(slots=True)
class Look(Ask[Span]):
    """Find what there is from ``since`` on; with a deadline, wait until there is something."""

    since: bytes
    end_before: bytes | None = None
    """Read no further than this id, exclusive."""
    deadline_s: float | None = None
    """When to answer with an empty span, on the actor's monotonic clock; None: at once."""


@dataclass(frozen=True, slots=True)
class Description:
    """A topic that exists."""

    metadata: Metadata
    time_ms: int


@dataclass(slots=True)
class Describe(Ask[Description]):
    """The topic's metadata. Raises TopicNotFound."""


@dataclass(slots=True)
class Create(Ask[Description]):
    """Create the topic, a new generation of it if there was one before."""

    properties: TopicProperties
    if_not_exists: bool = False


@dataclass(slots=True)
class SetProperties(Ask[Description]):
    """Replace all properties by what the client gave: a decoded JSON object, or None."""

    given: object
    default_ttl_s: int = DEFAULT_TTL_S
    """The time to live when ``given`` names none, in seconds."""


@dataclass(slots=True)
class Remove(Ask[None]):
    """Delete the topic and, at once for every reader, its messages."""


@dataclass(slots=True)
class Undelete(Ask[Description]):
    """Bring the deleted generation back while all its rows are there."""


class Slice(NamedTuple):
    """Messages published from ``first_ms`` to ``last_ms``, both included, and not counted out yet."""

    first_ms: int
    last_ms: int
    messages: int
    bytes: int
    own_expiry_ms: int
    """When the first message with a time to live of its own expires; 0: there is none."""


@dataclass(frozen=True, slots=True)
class TopicStats:
    """Numbers of a topic as its actor knows them."""

    span: Span
    """All that is readable now."""
    slices: tuple[Slice, ...]
    """What was counted while it was written, oldest first."""


@dataclass(slots=True)
class Stats(Ask[TopicStats]):
    """Count without reading."""


@dataclass(frozen=True, slots=True)
class ReaderView:
    """A reader as the daemon keeps it."""

    name: str
    reader: Reader
    generation: int


@dataclass(slots=True)
class ListReaders(Ask[list[ReaderView]]):
    """All readers of the topic that have not expired, by name."""


@dataclass(slots=True)
class SetReader(Ask[ReaderView]):
    """Keep a reader's position; with ``expected``, only if it is there now."""

    name: str
    position: bytes
    generation: int | None = None
    expected: bytes | None = None
    compare: bool = False
    """Whether ``expected`` counts; None then means: there is no position yet."""


@dataclass(slots=True)
class RemoveReader(Ask[None]):
    """Forget a reader's position."""

    name: str


@dataclass(frozen=True, slots=True)
class CleaningPlan:
    """Which rows nobody can see any more, once this has been answered."""

    expired: tuple[bytes, bytes] | None = None
    """``[start, stop)`` of message keys, all expired."""
    due: tuple[tuple[int, int], ...] = ()
    """Slices ``(first_ms, last_ms)`` in which messages with their own time to live expired."""
    purge: tuple[int, int] | None = None
    """Generations, first and last, that are gone with all their rows."""
    prefix: bytes = b""
    now_ms: int = 0
    orphans: tuple[tuple[int, bytes, bytes], ...] = ()
    """Write pointers and ``[start, stop)`` of the payload keys of what was stored under them and is never published."""
    forget: tuple[int, int] | None = None
    """Generations, first and last, whose producers nobody may ask about any more."""


@dataclass(slots=True)
class PlanCleaning(Ask[CleaningPlan]):
    """Say what may be removed, after making sure that this stays true after a restart."""

    delete_grace_ms: int


@dataclass(frozen=True, slots=True)
class SliceCleaned:
    """What was removed from one slice, and when the next message in it expires (0: never by itself)."""

    first_ms: int
    last_ms: int
    messages: int
    bytes: int
    own_expiry_ms: int


@dataclass(slots=True)
class Cleaned(Ask[None]):
    """Count out what was removed."""

    prefix: bytes
    slices: Sequence[SliceCleaned]
    orphans: tuple[int, ...] = ()
    """Write pointers of the plan's ``orphans`` whose payload rows are all gone."""


# --- pointer asks ----------------------------------------------------------------------------------
#
# What a topic's actor can be asked about write pointers: publish and store under one, roll it back, list them.


@dataclass(slots=True)
class PublishUnder(Ask[PublishResponse]):
    """Publish messages, and what was stored, under the request's write pointer, all in one commit."""

    request: PublishRequest
    size: int


@dataclass(slots=True)
class StoreUnder(Ask[None]):
    """Keep messages in the payload table under the request's write pointer, seen by nobody until published."""

    request: PublishRequest
    size: int


@dataclass(slots=True)
class RollBackPointer(Ask[None]):
    """Roll back what a write pointer has in the topic, also in one that is deleted; done again, it changes nothing."""

    pointer: int
    within: tuple[bytes, bytes] | None = None
    """First and last position (10 bytes each) of a ``PublishResponse``. None: everything, stored messages too, and
    whatever comes later under this pointer is refused."""
    by_client: bool = True
    """A client's is refused when the topic does not exist; the service's and the janitor's never are."""


@dataclass(slots=True)
class ClosePointers(Ask[None]):
    """Once this is answered, nothing more is written under these pointers unless they are enlisted again."""

    pointers: Sequence[int]


@dataclass(frozen=True, slots=True)
class PointerView:
    """One write pointer that a topic has not seen decided."""

    pointer: int
    since_ms: int
    """When it was first used in the topic."""
    first: bytes | None
    """Position (10 bytes) of its first published row that is not rolled back; None: nothing is published."""
    messages: int
    """Published under it, stored ones included."""
    bytes: int
    stored: int
    """Stored and not published yet."""
    stored_bytes: int
    rolled_back: bool
    hidden: int
    """Messages of the topic from its first row on, which a transactional reader cannot pass; 0 without rows."""


@dataclass(slots=True)
class ListPointers(Ask[list[PointerView]]):
    """All undecided pointers of the topic, oldest first row first."""


# --- staging asks ----------------------------------------------------------------------------------
#
# What a topic's actor can be asked about staging: keep a producer's messages by segments, publish the winning ones.


@dataclass(slots=True)
class StoreStaged(Ask[None]):
    """Keep the messages of the request's producer under its segment, seen by nobody until a publish lists that."""

    request: PublishRequest
    size: int


@dataclass(slots=True)
class PublishStaged(Ask[Receipt]):
    """Publish what the request's producer staged under the segments it lists: one row, and once per sequence id."""

    request: PublishRequest
    size: int


# --- asks ------------------------------------------------------------------------------------------
#
# What a topic's actor can be asked about producers: open a session, show one or all, forget one.


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
