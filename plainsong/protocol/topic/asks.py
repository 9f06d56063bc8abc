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
    """Store messages that are one request each, with only a payload.

    The answer is a list of the answers to each; or, if all are stored, one receipt with consecutive ids.
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
    """The exclusive end; never after the read watermark."""
    now_ms: int
    oldest_ms: int
    """The first publish time that has not expired by the topic's ttl."""
    watermark: bytes | None
    """The highest id the last completed commit can have; None before the first."""
    expired: bool = False
    """True if messages from ``since`` on have, or may have, expired by the topic's ttl: see ``Usage.expired_from``."""
    undecided: frozenset[int] = frozenset()
    """Write pointers not known to be decided; empty unless ``Look.undecided`` requests them."""
    set_aside: tuple[SetAside, ...] = ()
    """Ranges of the topic that were set aside."""

    @property
    def start(self) -> bytes:
        """The bound where reading begins: ``since``, or the bound of the oldest living message if that is later."""
        return max(self.since, bound_at(self.oldest_ms)) if self.oldest_ms > 0 else self.since

    def passed_set_aside(self, to: bytes | None, since: bytes | None = None) -> list[SetAside]:
        """Return the set-aside ranges from ``since`` (None: the start) to the id ``to`` (None: the end), inclusive."""
        if not self.set_aside:
            return []
        first = self.since if since is None else since
        last = self.until if to is None else to
        return [each for each in self.set_aside if first <= each.first + NO_PAYLOAD_PART <= last]

    @property
    def resume(self) -> bytes | None:
        """The id after which to resume once the whole span is read; None: from the start."""
        return before(max(self.since, self.until))


@dataclass(slots=True)
class Look(Ask[Span]):
    """Find the span from ``since`` on; with a deadline, wait until it has a message."""

    since: bytes
    end_before: bytes | None = None
    """Read no further than this id, exclusive."""
    deadline_s: float | None = None
    """The latest time to answer with an empty span, on the actor's monotonic clock; None: at once."""
    undecided: int = 0
    """The maximum number of undecided write pointers that the span lists."""
    as_of_ms: int | None = None
    """Read only what had been published by this moment; None: everything published so far.

    Messages published later get a later publish time. InvalidParameter: the moment is in the future.
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
    """A client's rollback is refused if the topic does not exist; one by the service or the janitor never is."""


@dataclass(slots=True)
class ClosePointers(Ask[None]):
    """Stop writes under these pointers: after the answer nothing is written unless they are enlisted again."""

    pointers: Sequence[int]


@dataclass(frozen=True, slots=True)
class PointerView:
    """A write pointer that the topic considers undecided."""

    pointer: int
    since_ms: int
    """When it was first used in the topic."""
    first: bytes | None
    """Position (10 bytes) of its first published row that is not rolled back; None if there is none."""
    messages: int
    """Published under it, stored messages included."""
    bytes: int
    stored: int
    """Stored and not published yet."""
    stored_bytes: int
    rolled_back: bool
    hidden: int
    """Messages of the topic that it hides from transactional readers: those from its first row on; 0 without rows."""


@dataclass(slots=True)
class ListPointers(Ask[list[PointerView]]):
    """List all undecided pointers of the topic, ordered by their first row."""


# --- staging: a producer stores messages in segments, and publishes the winning ones ---------------


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
    """A remembered request of a producer, with its positions."""

    first: int
    last: int
    """Its lowest and highest sequence id."""
    first_id: bytes
    last_id: bytes
    """Ids (20 bytes) of the rows of its first and last message."""
    response: PublishResponse | None
    """The answer if it was published under a write pointer, else None."""


@dataclass(frozen=True, slots=True)
class ProducerView:
    """A producer as a topic remembers it."""

    name: str
    epoch: int
    """The number of its latest session, ascending; 0 if it never opened one."""
    last_sequence_id: int
    """The highest durable id; -1: none."""
    pushed: int
    """The highest id accepted; above ``last_sequence_id`` only while a commit is under way."""
    generation: int
    enabled_from: bytes | None
    """Deduplication applies after this position (10 bytes); None: from the first message of the generation on."""
    active_ms: int
    """When it was last active."""
    expires_ms: int
    """When it is forgotten if it stays inactive."""
    recent: tuple[ResultView, ...] = ()
    """Its last requests, oldest first."""
    damaged: bool = False
    """Its row cannot be read; it can only be removed."""


@dataclass(slots=True)
class OpenProducer(Ask[ProducerView]):
    """Open a session of a producer; requests of its older sessions are refused from now on.

    Raises:
      TopicNotFound, GenerationChanged, DeduplicationDisabled, TooManyProducers, ProducerFenced (it must be new, and
      is not), InvalidParameter (``retention_ms`` over its bound), DamagedRow: nothing happened.
    """

    name: str
    retention_ms: int | None = None
    """Retention while inactive; None: unchanged, or the default. The default is also the minimum."""
    must_be_new: bool = False
    """Refuse if the producer exists; used for names that the service generates."""
    generation: int | None = None
    """The expected generation of the topic; None: any."""
    discard_staged: bool = False
    """Abandon its staged messages, such as those of failed attempts."""


@dataclass(slots=True)
class GetProducer(Ask[ProducerView]):
    """Show one producer of the last generation, even a deleted one.

    For older generations see ``actors.reading.producer_of``.

    Raises:
      TopicNotFound, ProducerNotFound, ProducerExpired (the generation and its producers are gone), GenerationChanged
      (``generation`` is an older one), DamagedRow.
    """

    name: str
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """The last snapshot of a topic's producers, and the replay after it at the last load."""

    position: bytes | None
    """10 bytes: the producers' rows are complete up to this position; None if nothing was published before it."""
    at_ms: int
    entries_since: int
    """Requests of producers since the snapshot."""
    replayed_entries: int
    replay_ms: int


@dataclass(frozen=True, slots=True)
class ProducerPage:
    """Some of a topic's producers, by name."""

    producers: tuple[ProducerView, ...]
    more: bool
    """True if more producers follow."""
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
    """See ``Create.dry_run``."""


# --- the topic itself ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Description:
    """A topic that exists."""

    metadata: Metadata
    time_ms: int


@dataclass(slots=True)
class Describe(Ask[Description]):
    """Return the topic's metadata. Raises TopicNotFound."""


@dataclass(slots=True)
class Create(Ask[Description]):
    """Create the topic; a new generation if it existed before."""

    properties: TopicProperties
    if_not_exists: bool = False
    """Accept an existing topic if it has the given properties."""
    dry_run: bool = False
    """Check and answer as usual, but change nothing."""
    creator: str = ""
    """The authenticated name; empty if no authentication is configured."""
    given: frozenset[str] | None = None
    """The explicitly given properties, by clients' names for them; the others are defaults. None: all are given."""


@dataclass(frozen=True, slots=True)
class TopicChange:
    """A change of a topic that exists or existed, with the topic's contents in the same step."""

    before: Metadata
    after: Metadata
    found: StatsView
    """The readable messages before the change, or after an ``Undelete``."""


@dataclass(slots=True)
class SetProperties(Ask[TopicChange]):
    """Replace all properties with the client's: a decoded JSON object, or None."""

    given: object
    default_ttl_s: int = DEFAULT_TTL_S
    """The time to live in seconds if ``given`` has none."""
    if_match: frozenset[str] | None = None
    """Proceed only if the topic has one of these etags; None: always."""
    dry_run: bool = False
    """See ``Create.dry_run``."""


@dataclass(slots=True)
class Remove(Ask[TopicChange]):
    """Delete the topic; its messages are invisible to every reader at once."""

    if_match: frozenset[str] | None = None
    """See ``SetProperties.if_match``."""
    dry_run: bool = False
    """See ``Create.dry_run``."""


@dataclass(slots=True)
class Undelete(Ask[TopicChange]):
    """Restore the deleted generation, while all its rows exist."""

    grace_ms: int | None = None
    """The time after its deletion in which it can be restored; None: until its first row is removed."""
    if_match: frozenset[str] | None = None
    """Proceed only if the deleted generation has one of these etags; a dry run returns its etag."""
    dry_run: bool = False
    """See ``Create.dry_run``."""
    creator: str = ""
    """See ``Create.creator``."""


@dataclass(slots=True)
class NoteSetAside(Ask[TopicChange]):
    """Record rows as set aside, before they are removed; from then on readers are notified of the range.

    Overlapping ranges are merged.
    """

    generation: int
    first: bytes
    """Positions (10 bytes) of the first and the last row."""
    last: bytes
    rows: int | None
    """The number of rows; None if some could not be read."""


class Slice(NamedTuple):
    """The counts of messages published from ``first_ms`` to ``last_ms``, both included."""

    first_ms: int
    last_ms: int
    messages: int
    bytes: int
    own_expiry_ms: int
    """When the first message with its own time to live expires; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class StatsView:
    """A topic's figures, from memory."""

    span: Span
    """Everything readable now."""
    slices: tuple[Slice, ...]
    """Counts, oldest first."""


@dataclass(slots=True)
class Stats(Ask[StatsView]):
    """Return the topic's figures without reading rows."""


# --- chains ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChainView:
    """The end of a topic's chain."""

    generation: int
    number: int
    """The number of the last entry, counted from 1."""
    position: bytes
    """The position of the last entry, 10 bytes."""
    link: bytes
    """The link of the last entry, 32 bytes."""
    prefix: bytes
    """The prefix of the keys of the topic's messages."""
    entries: bytes
    """The prefix of the keys of the chain's entries."""
    oldest_ms: int
    """Messages published before have expired."""
    now_ms: int
    undecided: tuple[int, ...]
    """Write pointers with messages here that may still be rolled back; up to ``DescribeChain.undecided``."""


@dataclass(slots=True)
class DescribeChain(Ask[ChainView]):
    """Return the end of the chain. Raises NotFound if the topic has none."""

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
    """List all readers of the topic that have not expired, by name."""


@dataclass(slots=True)
class SetReader(Ask[ReaderView]):
    """Set a reader's position; with ``compare``, only if it is ``expected`` now."""

    name: str
    position: bytes
    generation: int | None = None
    expected: bytes | None = None
    compare: bool = False
    """Check ``expected``, where None means that the reader has no position yet."""
    dry_run: bool = False
    """See ``Create.dry_run``."""


@dataclass(slots=True)
class RemoveReader(Ask[None]):
    """Forget a reader's position."""

    name: str
    dry_run: bool = False
    """See ``Create.dry_run``."""


# --- cleaning --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CleaningPlan:
    """The rows that readers can no longer see, once this is answered."""

    expired: tuple[bytes, bytes] | None = None
    """``[start, stop)`` of message keys, all expired."""
    due: tuple[tuple[int, int], ...] = ()
    """Slices ``(first_ms, last_ms)`` with expired messages that had their own time to live."""
    purge: tuple[int, int] | None = None
    """First and last generation to remove completely."""
    prefix: bytes = b""
    now_ms: int = 0
    orphans: tuple[tuple[int, bytes, bytes], ...] = ()
    """Pointers whose stored messages will never be published, each with ``[start, stop)`` of their keys."""
    forget: tuple[int, int] | None = None
    """First and last generation whose rows about producers may be removed."""
    entries: tuple[bytes, bytes] | None = None
    """``[start, stop)`` of keys of a chain's entries; all except the last may be removed."""


@dataclass(slots=True)
class PlanCleaning(Ask[CleaningPlan]):
    """Plan the rows to remove; the plan stays valid after a restart."""

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
