"""The requests to a topic's actor, each with the type of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from plainsong.protocol.effects import Ask
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import NO_PAYLOAD_PART, before, bound_at
from plainsong.protocol.properties import DEFAULT_TTL_S
from plainsong.protocol.requests import PublishResponse, Receipt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.protocol.properties import TopicProperties
    from plainsong.protocol.records import Metadata, Reader, SetAside
    from plainsong.protocol.requests import PublishRequest


# --- publishing and reading ------------------------------------------------------------------------


@dataclass(slots=True)
class Publish(Ask[Receipt]):
    """Store the messages of one request, all in one commit."""

    request: PublishRequest
    size: int


@dataclass(slots=True)
class CheckPublish(Ask[None]):
    """Check that one plain message of ``size`` bytes would be stored now, and store nothing.

    Raises what ``Publish`` would raise.
    """

    size: int


@dataclass(slots=True)
class PublishEach(Ask[Receipt | list[Receipt | PlainsongError]]):
    """Store messages that are a request each, with nothing but a payload.

    The answer is a list with the answer to each; or, when all are stored, one receipt for all of them, whose ids are
    consecutive.
    """

    messages: Sequence[bytes]
    size: int


@dataclass(slots=True)
class Span:
    """The messages that may be read: ``since <= id < until`` of one generation, as of ``now_ms``."""

    generation: int
    prefix: bytes
    """The prefix of the generation's message keys."""
    since: bytes
    """The reader's start, inclusive."""
    until: bytes
    """Exclusive; never beyond the read watermark."""
    now_ms: int
    oldest_ms: int
    """The first publish time that has not expired by the topic's ttl."""
    watermark: bytes | None
    """The highest id the last completed commit can have; None before the first."""
    expired: bool = False
    """Whether messages from ``since`` on have, or may have, expired by the topic's ttl: see ``Usage.expired_from``."""
    undecided: frozenset[int] = frozenset()
    """Write pointers that the topic does not know to be decided; empty unless ``Look.undecided`` asks for them."""
    set_aside: tuple[SetAside, ...] = ()
    """Stretches of the topic that were set aside."""

    @property
    def start(self) -> bytes:
        """The bound where reading begins: ``since``, or that of the oldest living message."""
        return max(self.since, bound_at(self.oldest_ms)) if self.oldest_ms > 0 else self.since

    def passed_set_aside(self, to: bytes | None, since: bytes | None = None) -> list[SetAside]:
        """The stretches from ``since`` to the id ``to``, both included; of None, from the start, to the end of the span."""
        if not self.set_aside:
            return []
        first = self.since if since is None else since
        last = self.until if to is None else to
        return [each for each in self.set_aside if first <= each.first + NO_PAYLOAD_PART <= last]

    @property
    def resume(self) -> bytes | None:
        """The id to resume from, exclusively, behind the whole span; None: from the start."""
        return before(max(self.since, self.until))


@dataclass(slots=True)
class Look(Ask[Span]):
    """Find the span from ``since`` on; with a deadline, wait until it has a message."""

    since: bytes
    end_before: bytes | None = None
    """Read no further than this id, exclusive."""
    deadline_s: float | None = None
    """When to answer with an empty span at the latest, on the actor's monotonic clock; None: at once."""
    undecided: int = 0
    """How many of the topic's undecided write pointers the span lists at most."""
    as_of_ms: int | None = None
    """The reader wants what had been published by this moment; None: by now.

    No message that is published later gets a publish time up to it. InvalidParameter: it is still to come.
    """


# --- under a write pointer -------------------------------------------------------------------------


@dataclass(slots=True)
class PublishUnder(Ask[PublishResponse]):
    """Publish the stored and the request's messages under its write pointer, all in one commit."""

    request: PublishRequest
    size: int


@dataclass(slots=True)
class StoreUnder(Ask[None]):
    """Store messages in the payload table under the request's write pointer; no reader sees them before a publish."""

    request: PublishRequest
    size: int


@dataclass(slots=True)
class RollBackPointer(Ask[None]):
    """Roll back a write pointer's rows in the topic, even in a deleted one; idempotent."""

    pointer: int
    within: tuple[bytes, bytes] | None = None
    """First and last position (10 bytes each) of a ``PublishResponse``. None: everything, stored messages too, and
    later requests under the pointer are refused."""
    by_client: bool = True
    """A client's rollback is refused if the topic does not exist; those of service and janitor never are."""


@dataclass(slots=True)
class ClosePointers(Ask[None]):
    """Stop writes under these pointers: after the answer nothing is written unless they are enlisted again."""

    pointers: Sequence[int]


@dataclass(frozen=True, slots=True)
class PointerView:
    """One write pointer that is undecided as far as a topic knows."""

    pointer: int
    since_ms: int
    """When it was first used in the topic."""
    first: bytes | None
    """Position (10 bytes) of its first published row that is not rolled back; None: nothing is published."""
    messages: int
    """Published under it, stored messages included."""
    bytes: int
    stored: int
    """Stored and not published yet."""
    stored_bytes: int
    rolled_back: bool
    hidden: int
    """Messages of the topic from its first row on: the pointer holds transactional readers there. 0 without rows."""


@dataclass(slots=True)
class ListPointers(Ask[list[PointerView]]):
    """All undecided pointers of the topic, oldest first row first."""


# --- staging: a producer stores messages by segments, and publishes the winning ones ---------------


@dataclass(slots=True)
class StoreStaged(Ask[None]):
    """Store messages under the request's producer and segment; no reader sees them before a publish lists it."""

    request: PublishRequest
    size: int


@dataclass(slots=True)
class PublishStaged(Ask[Receipt]):
    """Publish the listed segments of the request's producer: in one row, and once per sequence id."""

    request: PublishRequest
    size: int


# --- producers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResultView:
    """One request of a producer that is remembered with its positions."""

    first: int
    last: int
    """Its lowest and highest sequence id."""
    first_id: bytes
    last_id: bytes
    """Ids (20 bytes) of the rows of its first and last message."""
    response: PublishResponse | None
    """The answer, if it was published under a write pointer; None: it was not."""


@dataclass(frozen=True, slots=True)
class ProducerView:
    """A producer as a topic remembers it."""

    name: str
    epoch: int
    """The number of its session, growing; 0: it never opened one."""
    last_sequence_id: int
    """The highest durable id; -1: none."""
    pushed: int
    """The highest id accepted; above ``last_sequence_id`` only while a commit is under way."""
    generation: int
    enabled_from: bytes | None
    """Deduplication holds behind this position (10 bytes); None: from the first message of the generation."""
    active_ms: int
    """When it was last active."""
    expires_ms: int
    """When it is forgotten unless it is active before."""
    recent: tuple[ResultView, ...] = ()
    """Its last requests, oldest first."""
    damaged: bool = False
    """Its row cannot be read: removing it is all that can be done."""


@dataclass(slots=True)
class OpenProducer(Ask[ProducerView]):
    """Open a session of a producer; requests of its older sessions are refused from now on.

    Raises:
      TopicNotFound, GenerationChanged, DeduplicationDisabled, TooManyProducers, ProducerFenced (it must be new, and
      is not), InvalidParameter (``retention_ms`` over its bound), DamagedRow: nothing happened.
    """

    name: str
    retention_ms: int | None = None
    """How long to remember it while inactive; None: as before, or the default. Less than the default counts as the
    default."""
    must_be_new: bool = False
    """Refuse if there is such a producer: for names that the service generates."""
    generation: int | None = None
    """The expected generation of the topic; None: any."""
    discard_staged: bool = False
    """Whether its staged messages are never published: those of failed attempts, for example."""


@dataclass(slots=True)
class GetProducer(Ask[ProducerView]):
    """Show one producer of the last generation, even a deleted one.

    ``actors.reading.producer_of`` does so for older generations.

    Raises:
      TopicNotFound, ProducerNotFound, ProducerExpired (the generation is gone with all it knew), GenerationChanged
      (``generation`` is an older one), DamagedRow.
    """

    name: str
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """The last snapshot of a topic's producers, and what the last load had to replay behind it."""

    position: bytes | None
    """10 bytes: the producers' rows are complete up to this position; None: nothing was published before it."""
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
    """Whether more producers follow."""
    total: int
    enabled: bool
    enabled_from: bytes | None
    snapshot: SnapshotView


@dataclass(slots=True)
class ListProducers(Ask[ProducerPage]):
    """List the producers whose names follow ``after``, at most ``limit``. Raises TopicNotFound."""

    after: str = ""
    limit: int = 100


@dataclass(slots=True)
class RemoveProducer(Ask[None]):
    """Forget a producer: its sessions end, and its sequence ids may be used again.

    Raises TopicNotFound, ProducerNotFound.
    """

    name: str
    dry_run: bool = False
    """As ``Create.dry_run``."""


# --- the topic itself ------------------------------------------------------------------------------


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
    """Create the topic; a new generation if it existed before."""

    properties: TopicProperties
    if_not_exists: bool = False
    """Accept a topic that exists, if it has the properties that were given."""
    dry_run: bool = False
    """Check, answer as if it had been done, and change nothing."""
    creator: str = ""
    """The name that asks; empty: nobody was asked for one."""
    given: frozenset[str] | None = None
    """The properties that were given, by the names that clients use; the others are defaults. None: all of them."""


@dataclass(frozen=True, slots=True)
class TopicChange:
    """A change of a topic that exists or existed, with what the topic held in the very step that made it."""

    before: Metadata
    after: Metadata
    found: TopicStats
    """What readers had before, or after an ``Undelete`` have again."""


@dataclass(slots=True)
class SetProperties(Ask[TopicChange]):
    """Replace all properties by what the client gave: a decoded JSON object, or None."""

    given: object
    default_ttl_s: int = DEFAULT_TTL_S
    """The time to live when ``given`` names none, in seconds."""
    if_match: frozenset[str] | None = None
    """Do it only while the topic has one of these etags; None: in any state."""
    dry_run: bool = False
    """As ``Create.dry_run``."""


@dataclass(slots=True)
class Remove(Ask[TopicChange]):
    """Delete the topic; for every reader its messages are gone at once."""

    if_match: frozenset[str] | None = None
    """As ``SetProperties.if_match``."""
    dry_run: bool = False
    """As ``Create.dry_run``."""


@dataclass(slots=True)
class Undelete(Ask[TopicChange]):
    """Restore the deleted generation, while all its rows exist."""

    grace_ms: int | None = None
    """How long after its deletion it may come back; None: until its first row is removed."""
    if_match: frozenset[str] | None = None
    """Do it only if the deleted generation has one of these etags, as its dry run says."""
    dry_run: bool = False
    """As ``Create.dry_run``."""
    creator: str = ""
    """As ``Create.creator``."""


@dataclass(slots=True)
class NoteSetAside(Ask[TopicChange]):
    """Note that rows were taken out of the topic's order, before they are: from then on readers are told.

    Stretches that overlap become one. Nothing is noted behind the topic's last message.
    """

    generation: int
    first: bytes
    """Positions (10 bytes) of the first and the last."""
    last: bytes
    rows: int | None
    """Those that could be read; None: some could not be."""


class Slice(NamedTuple):
    """The counts of messages published from ``first_ms`` to ``last_ms``, both included."""

    first_ms: int
    last_ms: int
    messages: int
    bytes: int
    own_expiry_ms: int
    """When the first message with a time to live of its own expires; 0: there is none."""


@dataclass(frozen=True, slots=True)
class TopicStats:
    """The numbers of a topic, from memory."""

    span: Span
    """Everything readable now."""
    slices: tuple[Slice, ...]
    """Counts, oldest first."""


@dataclass(slots=True)
class Stats(Ask[TopicStats]):
    """Count without reading."""


# --- chains ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChainView:
    """How far a topic's chain has come."""

    generation: int
    number: int
    """Of the last entry; they are counted from 1."""
    position: bytes
    """Of the last entry, 10 bytes."""
    link: bytes
    """Of the last entry, 32 bytes."""
    prefix: bytes
    """What the keys of the topic's messages begin with."""
    entries: bytes
    """What the keys of the chain's entries begin with."""
    oldest_ms: int
    """What was published before has expired."""
    now_ms: int
    undecided: tuple[int, ...]
    """Write pointers with messages here that may still be rolled back, so many at most as were asked for."""


@dataclass(slots=True)
class DescribeChain(Ask[ChainView]):
    """How far the chain has come; NotFound where the topic has none."""

    undecided: int = 0


# --- readers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReaderView:
    """A reader's position, with its name and the topic's generation."""

    name: str
    reader: Reader
    generation: int


@dataclass(slots=True)
class ListReaders(Ask[list[ReaderView]]):
    """All readers of the topic that have not expired, by name."""


@dataclass(slots=True)
class SetReader(Ask[ReaderView]):
    """Set a reader's position; with ``compare``, only if it is ``expected`` now."""

    name: str
    position: bytes
    generation: int | None = None
    expected: bytes | None = None
    compare: bool = False
    """Whether ``expected`` is checked; None then means that the reader has no position yet."""
    dry_run: bool = False
    """As ``Create.dry_run``."""


@dataclass(slots=True)
class RemoveReader(Ask[None]):
    """Forget a reader's position."""

    name: str
    dry_run: bool = False
    """As ``Create.dry_run``."""


# --- cleaning --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CleaningPlan:
    """The rows that no reader can see any more, once this is answered."""

    expired: tuple[bytes, bytes] | None = None
    """``[start, stop)`` of message keys, all expired."""
    due: tuple[tuple[int, int], ...] = ()
    """Slices ``(first_ms, last_ms)`` in which messages with their own time to live expired."""
    purge: tuple[int, int] | None = None
    """Generations, first and last, whose rows may all be removed."""
    prefix: bytes = b""
    now_ms: int = 0
    orphans: tuple[tuple[int, bytes, bytes], ...] = ()
    """Pointers, each with ``[start, stop)`` of the keys of its stored messages, which are never published."""
    forget: tuple[int, int] | None = None
    """Generations, first and last, whose producers' rows may be removed."""
    entries: tuple[bytes, bytes] | None = None
    """``[start, stop)`` of keys of a chain's entries: all of them but the last one may be removed."""


@dataclass(slots=True)
class PlanCleaning(Ask[CleaningPlan]):
    """Plan what may be removed; the answer holds after a restart too."""

    delete_grace_ms: int


@dataclass(frozen=True, slots=True)
class SliceCleaned:
    """The removals from one slice, and when the next message in it expires by its own time to live (0: none)."""

    first_ms: int
    last_ms: int
    messages: int
    bytes: int
    own_expiry_ms: int


@dataclass(slots=True)
class Cleaned(Ask[None]):
    """Subtract removed rows from the counts."""

    prefix: bytes
    slices: Sequence[SliceCleaned]
    orphans: tuple[int, ...] = ()
    """Pointers of the plan's ``orphans`` whose payload rows are all removed."""
