"""The state of a topic except its messages; its message positions; and how a load restores it.

``actors/loading.py`` builds it from disk, and only the rules of this package change it. When a write fails it is
discarded, and read from disk again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import TopicNotFound
from plainsong.protocol.ids import (
    FIRST_BOUND,
    ID_BYTES,
    POSITION_BYTES,
    SEQUENCES_PER_MS,
    after,
    ordinal,
    pack_position,
    position_at,
    published_ms,
)
from plainsong.protocol.keys import HIGH_WATER, DamagedRow, generation_prefix, system_key
from plainsong.protocol.records import HighWater, Metadata, Reader
from plainsong.protocol.requests import in_the_future
from plainsong.protocol.rows import (
    BATCH,
    HAS_EXTRAS,
    HAS_POINTER,
    HAS_TTL,
    NO_PAYLOAD,
    STAMP,
    Stamp,
    Stored,
    decode_row,
    own_ttl_s,
    position_of_staged,
)
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.topic.producer_state import INHERITED, Producer, ProducerTable, Result
from plainsong.protocol.topic.usage import ROW_BYTES, Usage
from plainsong.protocol.transactions.transaction import NoAuthority

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plainsong.protocol.effects import Put
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.chain import Chain
    from plainsong.protocol.topic.producer_state import NamespacePolicy
    from plainsong.protocol.transactions.transaction import Authority


class Now(NamedTuple):
    """The time and other external facts, read once per step."""

    wall_ms: int
    """The machine's clock; may jump."""
    mono_s: float
    """A monotonic clock, for deadlines."""
    low_space: bool = False
    """True if the disk is nearly full: publishes are refused."""
    decided: tuple[int, ...] = ()
    """Write pointers that were committed or aborted since the last step."""
    deduplication: NamespacePolicy = INHERITED
    """The setting of the topic's namespace."""


@dataclass(frozen=True, slots=True)
class TopicLimits:
    """Bounds of one topic; see the settings of the same names for the behaviour beyond them."""

    max_message_bytes: int = 8 << 20
    message_bound: str = "topic.max_message_bytes"
    """The setting that decides ``max_message_bytes``; a store may impose a lower bound."""
    max_request_messages: int = 1 << 20
    max_parked_polls: int = 10_000
    checkpoint_rows: int = 10_000
    max_readers: int = 1_000
    readers_retention_ms: int = 90 * 24 * 3600 * 1000
    max_pending: int = 65_536
    """Undecided write pointers."""
    max_segments: int = 10_000
    """Segments of one write pointer."""
    max_lifetime_ms: int = 90_000_000
    """The maximum age of a write pointer; 0: unlimited."""
    max_ahead_ms: int = 0
    """The maximum by which an unknown write pointer may be ahead of the topic's clock; 0: unlimited."""
    issues_pointers: bool = False
    """True if the authority issues every write pointer: one that it did not issue is refused."""
    deduplication_default: bool = True
    """True if producers are remembered when neither topic nor namespace decides."""
    snapshot_entries: int = 1000
    """Producers' requests after which a snapshot of the producers is written."""
    snapshot_interval_ms: int = 120_000
    """The longest time between a change and the snapshot that includes it."""
    producer_retention_ms: int = 7 * 24 * 3600 * 1000
    """The default retention of an inactive producer; ``max_retention_ms``: the longest that it may request."""
    max_retention_ms: int = 180 * 24 * 3600 * 1000
    max_producers: int = 10_000
    max_long_producers: int = 1_000
    """Producers among them with a longer retention than ``producer_retention_ms``."""
    producer_active_ms: int = 600_000
    """Time after its last activity in which a producer is not evicted for a new one."""
    max_atomic_messages: int = 1 << 16
    max_atomic_bytes: int = 16 << 20
    """Bounds of one atomic request: messages, and bytes of their payloads."""


# --- positions -------------------------------------------------------------------------------------
#
#     ts  = the later of the topic's time and the last timestamp assigned
#     seq = 0 when ts grew, else the last plus one; a full millisecond continues in the next
#
# Never from the clock alone: after a restart the last position is recovered from the table and the high-water mark, so
# that no key is ever written twice.


class Run(NamedTuple):
    """Consecutive positions within one millisecond: ``(ts, first)`` to ``(ts, first + length - 1)``."""

    ts_ms: int
    first: int
    length: int


class PositionSequence:
    """Assigns the positions of one generation, each once."""

    __slots__ = ("last_sequence_id", "last_ts_ms")

    def __init__(self, last_ts_ms: int = 0, last_sequence_id: int = -1) -> None:
        self.last_ts_ms = last_ts_ms
        self.last_sequence_id = last_sequence_id

    def __repr__(self) -> str:
        return f"<PositionSequence {self.last_ts_ms}:{self.last_sequence_id}>"

    def advance_past(self, ts_ms: int, sequence_id: int) -> None:
        """Assign only positions after this one from now on."""
        if (ts_ms, sequence_id) > (self.last_ts_ms, self.last_sequence_id):
            self.last_ts_ms, self.last_sequence_id = ts_ms, sequence_id

    def take(self, now_ms: int, count: int) -> list[Run]:
        """Assign ``count`` new positions, in order; more than one run if a millisecond is full."""
        ts, seq = self.last_ts_ms, self.last_sequence_id + 1
        if now_ms > ts:
            ts, seq = now_ms, 0
        if 0 < count <= SEQUENCES_PER_MS - seq:  # the common case
            self.last_ts_ms, self.last_sequence_id = ts, seq + count - 1
            return [Run(ts, seq, count)]
        runs = []
        while count:
            if seq == SEQUENCES_PER_MS:
                ts, seq = ts + 1, 0
            taken = min(count, SEQUENCES_PER_MS - seq)
            runs.append(Run(ts, seq, taken))
            seq += taken
            count -= taken
        self.last_ts_ms, self.last_sequence_id = ts, seq - 1
        return runs


# --- the state -------------------------------------------------------------------------------------

#: Flags of rows that have a pointer or refer to stored messages.
_UNDER_POINTERS = HAS_POINTER | NO_PAYLOAD


#: How far the topic's time may be ahead of the durable one while messages expire. Without this slack, a topic in which
#: messages expire every millisecond would write a mark for every poll.
MAX_LAG_MS = 1_000


@dataclass(slots=True)
class TopicState:
    """The state of a topic name: that of its living or last generation."""

    name: TopicName
    limits: TopicLimits = field(default_factory=TopicLimits)
    metadata: Metadata | None = None
    sequence: PositionSequence = field(default_factory=PositionSequence)
    usage: Usage = field(default_factory=Usage)
    time_ms: int = 0
    """The topic's time: the clock, except that it never goes back, so that expired messages stay expired."""
    watermark: bytes | None = None
    """The position (10 bytes) up to which readers may read."""
    _until: bytes | None = field(default=None, init=False, repr=False, compare=False)
    """The bound after the watermark, computed on demand."""
    readers: dict[str, Reader] = field(default_factory=dict)
    authority: Authority = field(default_factory=NoAuthority)
    """Returns the standing of write pointers."""
    enlistment: Enlistment | None = None
    """The pointers that may be written under, if another instance decides them; None if the authority is local."""
    pending: dict[int, Pending] = field(default_factory=dict)
    """All undecided write pointers with rows in the last generation; negative ones have staged messages."""
    staged: dict[str, int] = field(default_factory=dict)
    """Producer → the pointer under which it stages; without abandoned ones."""
    appended: int = 0
    """Messages ever published in the generation."""
    stored_bytes: int = 0
    """Bytes of all messages stored and not published."""
    changed: set[int] = field(default_factory=set)
    """Pointers of ``pending`` whose rows the next commit has to write."""
    forgotten: set[int] = field(default_factory=set)
    """Write pointers whose rows the next commit removes."""
    rows_since_mark: int = 0
    marked: bool = False
    """True if the load found a high-water mark: replay begins after it, not at the first row."""
    marked_own_expiry_ms: int = 0
    marked_ms: int = 0
    """The topic's time in the last high-water mark."""
    producers: ProducerTable = field(default_factory=lambda: ProducerTable(0))
    torn: list[bytes] = field(default_factory=list)
    """Keys of the message rows of an incomplete atomic request, last one first; the next step removes them."""
    torn_bytes: int = 0
    """Bytes of these rows."""
    torn_payloads: list[bytes] = field(default_factory=list)
    """Keys of payload rows that an interrupted commit left; the next step removes them."""
    epoch: int = 0
    """The epoch of the owner that loaded it; 0 if the store has a single writer."""
    chain: Chain | None = None
    """The end of the last generation's chain; None if it has none."""
    replaying: Replay | None = None
    """During a load: the producers' requests in rows after the mark."""

    def __post_init__(self) -> None:
        self.producers = ProducerTable(self.limits.producer_retention_ms)

    def __repr__(self) -> str:
        alive = self.metadata is not None and self.metadata.deleted_ms is None
        return f"<TopicState {self.name} {'alive' if alive else 'absent'} {self.sequence!r} {self.usage!r}>"

    # --- loading -------------------------------------------------------------------------------

    def begin(self, metadata: Metadata, mark: HighWater | None) -> bytes:
        """Start from the rows of the metadata table. Returns the message key from which rows must be replayed."""
        self.metadata = metadata
        self.marked = mark is not None
        mark = mark or HighWater()
        self.appended = mark.appended
        self.sequence = PositionSequence(*mark.floor)
        self.usage = Usage(mark.buckets, mark.last_sequence_ids, mark.last_dropped)
        if not mark.last_sequence_ids and mark.last_dropped is None and self.appended > self.usage.messages:
            # The mark is of an older version, without the position of the last expired message.
            self.usage.last_dropped = mark.before_buckets
        self.time_ms = max(self.time_ms, mark.time_ms)
        self.marked_ms = mark.time_ms
        self.marked_own_expiry_ms = self.usage.own_expiry_ms()
        if mark.last_sequence_id < 0:
            self.producers.snapshot_written(None, mark.time_ms)
            return self.prefix
        self.producers.snapshot_written(pack_position(mark.last_ts_ms, mark.last_sequence_id), mark.time_ms)
        return self.prefix + pack_position(mark.last_ts_ms, mark.last_sequence_id) + b"\x00"

    def replay(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Count rows written after the high-water mark, in key order."""
        ttl_ms = self.living_or_last().properties.ttl_ms
        key_bytes = len(self.prefix) + ROW_BYTES
        producers = self.replaying = self.replaying or Replay(self)
        for key, value in rows:
            if len(key) != key_bytes:
                continue  # not a message row: `store explain` reports it
            ts_ms = int.from_bytes(key[-10:-2], "big")
            own_s = own_ttl_s(value)
            own_expiry_ms = 0 if own_s is None else ts_ms + own_s * 1000
            sequence_id = int.from_bytes(key[-2:], "big")
            self.sequence.advance_past(ts_ms, sequence_id)
            messages, size = 1, len(value) + ROW_BYTES
            if value and value[0] & _UNDER_POINTERS:
                messages, size = self._replay_under(key[-10:], value)
            if producers.is_open or (value and value[0] & HAS_EXTRAS):
                producers.take(key, value, size)
            self.usage.add(ts_ms, messages, size, ttl_ms, own_expiry_ms, sequence_id)
            self.appended += messages
            self.rows_since_mark += 1

    def _replay_under(self, position: bytes, value: bytes) -> tuple[int, int]:
        """Replay a row with a write pointer or a reference to stored messages. Returns its messages and their bytes.

        If a commit was interrupted before its pointer rows, this reconstructs them.
        """
        try:
            row = decode_row(value)
            stored = Stored.of(row) if row.payload is None else None
        except DamagedRow:
            return 1, len(value) + ROW_BYTES
        messages, size = 1, len(value) + ROW_BYTES
        if stored is not None:
            messages, size = stored.messages, stored.payload_bytes + ROW_BYTES * stored.messages
            if stored.staged is not None and self.pending.pop(stored.staged, None) is not None:
                self.forgotten.add(stored.staged)
        if self.marked and row.pointer is not None and row.pointer > 0:
            pending = self.pending.get(row.pointer)
            if pending is None:
                ts_ms = published_ms(position)
                pending = self.pending[row.pointer] = Pending(row.pointer, ts_ms, ts_ms)
            if pending.replay_row(position, row.payload, stored, self.appended):
                self.changed.add(row.pointer)
        return messages, size

    def loaded(self) -> None:
        """Complete the load after all rows were replayed: everything on disk is readable."""
        if self.replaying is not None:
            self.replaying.end()
            self.replaying = None
        self.producers.loaded()
        for pending in self.pending.values():
            if pending.pointer < 0:
                self._found_staged(pending)
        self.stored_bytes = sum(pending.stored_bytes for pending in self.pending.values())
        self.appended = max([self.appended, *(each.runs[-1].before for each in self.pending.values() if each.runs)])
        self.time_ms = max(self.time_ms, self.sequence.last_ts_ms)
        self.advance_watermark()

    def _found_staged(self, pending: Pending) -> None:
        """Restore a staged pointer: reserve its position, and assign it to its producer unless it is abandoned."""
        self.sequence.advance_past(*position_of_staged(pending.pointer))
        if pending.last_stored is None:
            pending.orphaned = True  # a commit was interrupted, and may have left rows that were never acknowledged
        if pending.staged_by is not None and not pending.orphaned:
            self.staged[pending.staged_by] = pending.pointer

    # --- queries -------------------------------------------------------------------------------

    def living(self) -> Metadata:
        """Return the topic's metadata. Raises TopicNotFound if it does not exist or is deleted."""
        if self.metadata is None or self.metadata.deleted_ms is not None:
            raise TopicNotFound(f"topic {self.name} does not exist", hint="create it with PUT, or check the name")
        return self.metadata

    def living_or_last(self) -> Metadata:
        """Return the metadata of the last generation, deleted or not. Raises TopicNotFound if there never was one."""
        if self.metadata is None:
            raise TopicNotFound(f"topic {self.name} has never existed")
        return self.metadata

    @property
    def prefix(self) -> bytes:
        """The prefix of the message keys of the last generation."""
        return generation_prefix(self.name, self.living_or_last().generation)

    @property
    def until(self) -> bytes:
        """The bound after everything readable."""
        if self.watermark is None:
            return FIRST_BOUND
        if self._until is None:
            self._until = after(self.watermark + b"\xff" * (ID_BYTES - len(self.watermark)))
        return self._until

    @property
    def oldest_ms(self) -> int:
        """The first publish time that has not expired."""
        metadata = self.living_or_last()
        return max(0, metadata.floor_ms, self.time_ms - metadata.properties.ttl_ms)

    def advance_watermark(self) -> None:
        """Let readers read up to the last assigned position; all rows up to it are durable."""
        last = self.sequence
        if last.last_sequence_id >= 0:
            self.watermark = pack_position(last.last_ts_ms, last.last_sequence_id)
            self._until = None

    def mark(self) -> Put:
        """Return the operation that writes the present high-water mark."""
        self.rows_since_mark = 0
        self.marked_ms = self.time_ms
        self.marked_own_expiry_ms = self.usage.own_expiry_ms()
        last = self.sequence
        usage = self.usage
        mark = HighWater(
            self.time_ms,
            last.last_ts_ms,
            last.last_sequence_id,
            usage.stored(),
            self.appended,
            usage.last_sequence_ids(),
            usage.last_dropped,
        )
        key = system_key(HIGH_WATER, self.name, self.living_or_last().generation)
        return put_one(Table.METADATA, key, mark.encode())

    def follows(self, policy: NamespacePolicy) -> bool:
        """Return True if a namespace's policy for producers, and the topic's own, have been applied."""
        metadata, producers = self.metadata, self.producers
        if metadata is None or metadata.deleted_ms is not None:
            return True
        applied = producers.applied
        return (
            applied is not None
            and (applied.policy is policy or applied.policy == policy)
            and applied.generation == metadata.generation
            and applied.own == metadata.properties.deduplication
            and not producers.obsolete
        )

    def needs_mark(self) -> bool:
        """Return True if a replay from the last mark would be too long, or would miss a due expiry."""
        own = self.usage.own_expiry_ms()
        earlier = own != 0 and (self.marked_own_expiry_ms == 0 or own < self.marked_own_expiry_ms)
        many = self.rows_since_mark >= self.limits.checkpoint_rows
        return many or earlier or self.producers.entries >= self.limits.snapshot_entries

    def expires_ahead(self) -> bool:
        """Return True if messages have expired by a time that is not durable yet.

        Another owner, or this one after a restart, may have a clock that is behind, and must not show them again.
        """
        durable_ms = max(self.marked_ms, self.sequence.last_ts_ms)
        if self.time_ms - durable_ms < MAX_LAG_MS or self.metadata is None or self.metadata.deleted_ms is not None:
            return False
        return self.usage.expires_between(durable_ms, self.time_ms, self.metadata.properties.ttl_ms)

    def close_moment(self, at_ms: int, wall_ms: int) -> bool:
        """Assign only publish times after a moment from now on. Returns True if a mark has to make that durable.

        Another owner, or this one after a restart, may have a clock that is behind. Raises InvalidParameter: the moment
        is in the future, both by the topic's time and by the clock.
        """
        if self.metadata is None or self.metadata.deleted_ms is not None:
            return False
        if at_ms >= self.time_ms:
            if at_ms > wall_ms:
                raise in_the_future(at_ms, self.time_ms)
            self.time_ms = at_ms + 1
        return at_ms >= max(self.marked_ms, self.sequence.last_ts_ms)


class Enlistment(Protocol):
    """The write pointers for which one owner of a topic is enlisted; ends with that ownership."""

    def holds(self, pointer: int) -> bool:
        """Return True if the topic is enlisted for a pointer."""
        ...

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        """Return all write pointers that the transaction of an enlisted pointer had at the enlistment."""
        ...

    def close(self, pointers: Iterable[int]) -> None:
        """End the enlistment for pointers, including requests for it that are still under way."""
        ...


# --- replaying producers and batches ---------------------------------------------------------------
#
# A load recovers producers and batches from the requests after the high-water mark.
#
# Rows of one request have consecutive positions, and a commit that was cut off lacks its last rows. So only the last
# request can be incomplete. A producer's request counts with the rows that exist, and the positions of the missing
# ones are skipped, so that later rows are not attributed to it; an atomic request has to be removed. If the mark was
# lost, the topic is read from its first row, and rows may also be missing because they expired: the producers' rows
# have their information, and nothing is removed.

#: First keys of the extras of rows that begin a request, packed.
_BEGINNINGS = (b"\xa1" + STAMP.encode(), b"\xa1" + BATCH.encode())


class Replay:
    """Restores producers and finds torn batches during one load: ``take`` rows in key order, then ``end``."""

    def __init__(self, state: TopicState) -> None:
        self._state = state
        self._open: _Request | None = None
        record = state.producers.record
        #: The position up to which stamps are void; None if all are.
        self._from = record.counts_from() if record is not None and record.on else None

    @property
    def is_open(self) -> bool:
        """True if the next row may belong to the same request as the last; it must then be taken."""
        return self._open is not None

    def take(self, key: bytes, value: bytes, size: int) -> None:
        """Take a row, with its ``size`` in usage; rows without extras may be skipped unless ``is_open``."""
        if _begins(value):
            self._begin(key, value, size)
        elif self._open is not None:
            self._follow(self._open, key, size)

    def _begin(self, key: bytes, value: bytes, size: int) -> None:
        try:
            row = decode_row(value)
            stamp = Stamp.of(row)
        except DamagedRow:
            return  # readers of the row report the damage
        batch = row.extras.get(BATCH) if row.payload is not None else None
        atomic = isinstance(batch, int)
        if stamp is None and not atomic:
            return
        self.end()
        rows = stamp.rows if stamp is not None else int(str(batch))
        self._open = _Request(ordinal(key[-POSITION_BYTES:]), rows, stamp, abs(row.pointer or 0), atomic)
        self._open.keys.append(key)
        self._open.size = size
        if rows <= 1:
            self.end()

    def _follow(self, request: _Request, key: bytes, size: int) -> None:
        index = ordinal(key[-POSITION_BYTES:]) - request.first
        if index < request.rows:
            request.seen = index + 1
            if request.atomic:
                request.keys.append(key)
                request.size += size
        if index + 1 >= request.rows:
            self.end()

    def end(self) -> None:
        """Apply the current request, which has no more rows."""
        request, self._open = self._open, None
        if request is None:
            return
        state = self._state
        cut_off = request.seen < request.rows
        if cut_off:
            state.sequence.advance_past(*divmod(request.first + request.rows - 1, SEQUENCES_PER_MS))
        if cut_off and request.atomic and state.marked:
            state.torn = request.keys[::-1]
            state.torn_bytes = request.size
        elif request.stamp is not None:
            self._apply(request, request.stamp, request.seen)

    def _apply(self, request: _Request, stamp: Stamp, seen: int) -> None:
        """Remember the request of a stamp, with the ``seen`` rows that were found."""
        producers, last = self._state.producers, request.first + seen - 1
        ts_ms = request.first // SEQUENCES_PER_MS
        first_position = position_at(request.first)
        if self._from is None or first_position <= self._from or stamp.producer in producers.damaged:
            return
        # The reference row before the request's own messages has no sequence id.
        stored = len(stamp.ids) - (stamp.rows - seen)
        producers.entries += 1
        producers.replayed_entries += 1
        if stored <= 0:
            return
        producer = producers.known.get(stamp.producer)
        if producer is None:
            producer = Producer(stamp.producer)
            producers.add(producer)
        producer.epoch = max(producer.epoch, stamp.epoch)
        producer.active_ms = max(producer.active_ms, ts_ms)
        high = stamp.ids[stored - 1]
        if high > producer.pushed:
            producer.record(Result(stamp.ids[0], high, first_position, position_at(last), request.pointer))
            producer.persisted = producer.pushed
            producers.changed.add(producer.name)


@dataclass(slots=True)
class _Request:
    """The request whose rows are being replayed."""

    first: int
    rows: int
    stamp: Stamp | None
    pointer: int
    atomic: bool
    seen: int = 1
    """Rows up to the last one found, by position."""
    keys: list[bytes] = field(default_factory=list)
    size: int = 0
    """Bytes of the rows of ``keys``, in usage."""


def _begins(value: bytes) -> bool:
    """Return True if a row may begin a request, by the first key of its extras."""
    flags = value[0] if value else 0
    if not flags & HAS_EXTRAS:
        return False
    if flags & NO_PAYLOAD:
        return True
    at = 5 + (8 if flags & HAS_POINTER else 0) + (4 if flags & HAS_TTL else 0)
    return value[at + 1 : at + 3] in _BEGINNINGS
