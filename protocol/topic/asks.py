"""What a topic's actor can be asked, each with the type of its answer.

``Ask[A]`` says that the answer is an ``A``; the mailbox's ``ask`` is typed by it. Plain data, made by
routes and the janitor, taken apart by the core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from protocol.errors import PlainsongError
from protocol.ids import before, bound_at
from protocol.properties import DEFAULT_TTL_S
from protocol.requests import Receipt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.properties import TopicProperties
    from protocol.records import Metadata, Reader
    from protocol.requests import PublishRequest

A = TypeVar("A")


class Ask(Generic[A]):
    """A request whose answer is an ``A``. ``size`` is what it holds in memory, in bytes, as far as it counts."""

    __slots__ = ()
    size = 0


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
