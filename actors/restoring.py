"""A backup, presented as the store to restore: decided transactions stay, open ones are undone, time moves on.

    messages    unchanged, up to a line; those of undone transactions are rolled back
    payloads    except those that only undone transactions, or publishes after the line, refer to
    a topic     as its owner would load it from these rows, with the current time as its last position, and producer
                epochs that no earlier client has
    service     open transactions are invalid; pointers up to the current time count as decided; a new identity

This module writes nothing: `RestoreRun` copies this store into an empty one, as `plainsong copy` copies any other.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import trio

from actors.loading import load_topic
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES, SEQUENCES_PER_MS, pack_position
from plainsong.protocol.keys import (
    CHAIN_POINTER,
    HIGH_WATER,
    POINTER,
    PRODUCER,
    PRODUCERS,
    SYSTEM,
    DamagedRow,
    generation_prefix,
    metadata_key,
    parse_pointer_key,
    parse_system_key,
    system_key,
    topic_of,
    topic_prefix,
)
from plainsong.protocol.names import TopicName
from plainsong.protocol.records import unpack_record
from plainsong.protocol.rows import HAS_POINTER, NO_PAYLOAD, Stored, decode_row
from plainsong.protocol.topic.producer_state import DeduplicationRecord, Producer
from plainsong.protocol.topic.state import TopicLimits
from plainsong.protocol.transactions.ledger import ManagerNow, TransactionSettings
from plainsong.protocol.transactions.ledger_rows import (
    AUTHORITY,
    HEAD,
    PASS,
    TRANSACTION,
    Head,
    Record,
    lost_begins,
    parse_service_key,
    service_key,
)
from plainsong.protocol.transactions.manager import LedgerLoader
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS
from storage.base import Claim, StoreError, StoreStatistics, StoreTraits, StoreUnusable, chunks
from storage.copy_parts import Contents, contents_of, parts_of
from storage.copying import CopyRun
from storage.spawned import SpawnsWrites
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from plainsong.protocol.effects import Expect, Operation
    from plainsong.protocol.topic.state import TopicState
    from plainsong.protocol.transactions.transaction import Authority
    from storage.backup.folder import BackupFolder
    from storage.base import RawRow, Row, StoreView
    from storage.copy_parts import Part

#: Added to every producer epoch on restore, so that sessions opened after the backup stay fenced.
EPOCHS = 1_000_000
#: Topics whose metadata rows are cached: a copy reads them once for each kind.
_KEPT_TOPICS = 64
_LAST_SEQUENCE_ID = SEQUENCES_PER_MS - 1
#: Kinds of a topic's rows that a restore creates.
_MADE = (HIGH_WATER, POINTER, PRODUCER, PRODUCERS)


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Selects the part of a backup to restore."""

    at_ms: int | None = None
    """Omit everything published later; None: restore all."""
    topics: tuple[TopicName, ...] | None = None
    """By their names in the backup; None: all."""
    renamed: TopicName | None = None
    """The new name of the only topic; None: unchanged."""

    @property
    def wanted(self) -> tuple[TopicName, ...] | None:
        """The topics by their names in the target; None: all."""
        return self.topics if self.renamed is None else (self.renamed,)


@dataclass(slots=True)
class _Topic:
    """A topic of the backup."""

    name: TopicName
    """In the target."""
    generation: int | None
    old: bytes
    """Its metadata key in the backup, with which all of its keys begin."""
    new: bytes
    objects: dict[str, list[Mapping[str, Any]]]
    """By table, in key order."""
    line: bytes | None = None
    """The last position to restore; None: no limit."""
    discarded: set[int] = field(default_factory=set)
    """Pointers of staged messages that were published after the line."""
    listed_to: bytes | None = None
    """The last position assigned when the backup had listed the topic's messages; None if there was none."""
    exact: bool = True
    """True if the backup is of a single moment."""

    @property
    def last_entry(self) -> bytes | None:
        """The last position up to which chain entries are restored, as their messages are; None: all."""
        if self.line is not None or self.exact:
            return self.line
        return self.listed_to


class RestoredStore(SpawnsWrites):
    """Implements ``storage.base.Store`` for the restored state of a backup; read-only."""

    traits = StoreTraits("backup", "it is only read", None, whole_commits=True)
    waker = None
    topics_number = None

    def __init__(self, folder: BackupFolder, manifest: Mapping[str, Any], request: RestoreRequest, now_ms: int) -> None:
        """Use ``open``."""
        self._folder = folder
        self._manifest = manifest
        self._request = request
        self._now_ms = now_ms
        self._lock = trio.CapacityLimiter(1)
        self._topics: dict[bytes, _Topic] = {}
        #: Pointers of undone transactions.
        self._undone: set[int] = set()
        #: Above this pointer only those in ``_counted`` are valid: topics were read after the service, and may have
        #: rows of transactions that began in between. None if the backup is of a single moment.
        self._undone_above: int | None = None
        self._counted: frozenset[int] = frozenset()
        self._service: list[Row] = []
        self._namespaces: list[Row] = []
        self._authority: Authority | None = None
        self._about: OrderedDict[bytes, list[Row]] = OrderedDict()
        self._making = trio.Lock()
        #: For topics that were ahead of the clock: ids up to this time may have been assigned. See ``given_ms``.
        self._given_ms: dict[TopicName, int] = {}

    @classmethod
    async def open(
        cls, folder: BackupFolder, manifest: Mapping[str, Any], request: RestoreRequest, now_ms: int
    ) -> RestoredStore:
        """Open a backup: read the rows of the service, and with ``at_ms`` those of later messages.

        Raises:
          StoreUnusable: a topic is not in the backup, or the service's rows cannot be read.
          DamagedObject.
        """
        store = cls(folder, manifest, request, now_ms)
        await in_thread(store._open, limiter=store._lock)
        return store

    def _open(self) -> None:
        every = [self._topic_of(each) for each in self._manifest["topics"]]
        self._namespaces = sorted(
            row for entry in self._manifest["metadata"] for row in self._folder.rows(entry["sha256"])
        )
        others, _ = self._folder.manifests()
        self._given_ms = given_ms([self._manifest, *others.values()], self._now_ms)
        chosen = self._chosen(every)
        rows = [row for entry in self._manifest["service"] for row in self._folder.rows(entry["sha256"])]
        if self._request.at_ms is not None:
            for topic in every:
                self._draw_line(topic, self._request.at_ms)
        try:
            self._restore_service(rows)
        except DamagedRow as error:
            raise StoreUnusable(f"the transaction service cannot be restored: {error.detail}") from error
        self._topics = {topic.new: topic for topic in chosen}

    def _topic_of(self, entry: Mapping[str, Any]) -> _Topic:
        name = TopicName(entry["namespace"], entry["topic"])
        objects: dict[str, list[Mapping[str, Any]]] = {"metadata": [], "messages": [], "payloads": []}
        for each in entry["objects"]:
            objects[each["table"]].append(each)
        key = metadata_key(name)
        line = entry.get("line")
        topic = _Topic(name, entry["generation"], key, key, objects, exact=bool(self._manifest["exact"]))
        topic.listed_to = None if line is None else bytes.fromhex(line)
        return topic

    def _chosen(self, every: list[_Topic]) -> list[_Topic]:
        wanted = self._request.topics
        if wanted is None:
            return every
        by_name = {topic.name: topic for topic in every}
        for name in wanted:
            if name not in by_name:
                raise StoreUnusable(
                    f"backup {self._manifest['id']} has no topic {name}",
                    hint="`plainsong backup list` shows its topics",
                )
        chosen = [by_name[name] for name in wanted]
        renamed = self._request.renamed
        if renamed is not None:
            (topic,) = chosen
            topic.name, topic.new = renamed, metadata_key(renamed)
        return chosen

    # --- what is undone ----------------------------------------------------------------------------

    def _draw_line(self, topic: _Topic, at_ms: int) -> None:
        """Set the topic's line, and note the transactions and staged messages that were published after it.

        A request continues into the next millisecond only if the first is full. If the rows show such a transition, the
        line is drawn before the whole burst, since the rows do not show where a request began.
        """
        if topic.generation is None or not any(each["toMs"] > at_ms for each in topic.objects["messages"]):
            return
        prefix = topic.old + generation_prefix(topic.name, topic.generation)[len(metadata_key(topic.name)) :]
        line_ms = at_ms
        while self._has(topic, prefix + pack_position(line_ms, _LAST_SEQUENCE_ID)) and self._has(
            topic, prefix + pack_position(line_ms + 1, 0)
        ):
            line_ms -= 1
        topic.line = pack_position(line_ms, _LAST_SEQUENCE_ID)
        for entry in topic.objects["messages"]:
            if entry["toMs"] <= line_ms:
                continue
            for key, value in self._folder.rows(entry["sha256"]):
                if key[-POSITION_BYTES:] > topic.line and value and value[0] & (HAS_POINTER | NO_PAYLOAD):
                    self._leave_out(topic, value)

    def _leave_out(self, topic: _Topic, value: bytes) -> None:
        if value[0] & HAS_POINTER and (pointer := _pointer_in(value)) > 0:
            self._undone.add(pointer)
        if value[0] & NO_PAYLOAD:
            try:
                stored = Stored.of(decode_row(value))
            except DamagedRow:
                return
            if stored.staged is not None:
                topic.discarded.add(stored.staged)

    def _has(self, topic: _Topic, key: bytes) -> bool:
        at_ms = int.from_bytes(key[-POSITION_BYTES:-2], "big")
        for entry in topic.objects["messages"]:
            if entry["fromMs"] <= at_ms <= entry["toMs"] and any(
                row[0] == key for row in self._folder.rows(entry["sha256"])
            ):
                return True
        return False

    def _restore_service(self, rows: Sequence[Row]) -> None:
        """Compute the service's rows, the undone transactions, and the authority that decides pointers."""
        records: dict[int, Record] = {}
        head: Head | None = None
        authority = ""
        kept: list[Row] = []
        for key, value in rows:
            kind, pointer = parse_service_key(key)
            if kind == HEAD:
                head = Head.decode(value)
            elif kind == TRANSACTION:
                records[pointer] = Record.decode(pointer, value)
            elif kind == AUTHORITY:
                authority = str(unpack_record(value, "authority").get("a"))
                kept.append((key, value))
            elif kind == PASS:
                kept.append((key, value))
            # Change sets and enlistments only matter for open transactions, and none stays open.
        if authority not in ("", "embedded"):
            # A foreign authority continues to decide pointers.
            self._service = sorted(rows)
            return
        now_pointer = self._now_ms * POINTERS_PER_MS
        known = [pointer for record in records.values() for pointer in (*record.pointers, record.decided_at)]
        head = head or Head()
        # If pointers were ahead of the clock at the backup, assume that they stayed so until the restore.
        since_ms = max(0, self._now_ms - self._manifest["cutMs"])
        last = max(now_pointer, max(head.last, head.reserved) + 1 + since_ms * POINTERS_PER_MS, *known, 0)
        if not self._manifest["exact"]:
            # The head was read first, so every pointer up to it has a record in the backup, or was decided long ago.
            self._undone_above, self._counted = head.last, frozenset(known)
        records |= lost_begins(head, records, last)
        for record in records.values():
            if record.state == "in_progress" or not self._undone.isdisjoint(record.pointers):
                record.state, record.listed, record.aborting = "invalid", record.pointers, False
                record.decided_ms, record.decided_at = self._now_ms, last
            if record.listed or record.state in ("invalid", "aborted"):
                self._undone.update(record.pointers)
            kept.append((service_key(TRANSACTION, record.transaction_id), record.encode()))
        head = Head(
            last=last,
            read_pointer=last,
            # Pointers from the first one on count as decided, including those issued after the cut, which left no
            # record: their clients may still be running, and must get an error.
            first=head.first or self._manifest["cutMs"] * POINTERS_PER_MS,
            forgotten=last,
            unchecked=0,
            restored=last,
        )
        kept.append((service_key(HEAD), head.encode()))
        self._service = sorted(kept)
        loader = LedgerLoader()
        loader.feed(self._service)
        self._authority = loader.core(TransactionSettings(), ManagerNow(self._now_ms, 0.0))

    def _is_undone(self, pointer: int) -> bool:
        above = self._undone_above
        return pointer in self._undone or (above is not None and pointer > above and pointer not in self._counted)

    # --- reading -----------------------------------------------------------------------------------

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """See ``Reads.get``."""
        found: list[bytes] = []

        def take(rows: Sequence[Row]) -> bool:
            found.append(rows[0][1])
            return False

        await self.scan(table, key, key + b"\x00", take, first_chunk=1)
        return found[0] if found else None

    async def scan(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        feed: Callable[[Sequence[Row]], bool],
        *,
        reverse: bool = False,
        first_chunk: int = 64,
        values: bool = True,
    ) -> None:
        """See ``Reads.scan``; only payloads in reverse, and metadata only in ranges about one topic, the service or
        namespaces."""
        if reverse and table is not Table.PAYLOAD:
            raise NotImplementedError("a backup is read upwards")
        if table is Table.METADATA:
            rows: Iterable[Row] = await self._metadata(start, stop)
        else:
            rows = self._rows(table, start, stop, reverse=reverse)

        def read() -> None:
            for chunk in chunks(iter(rows), first_chunk):
                if not feed(chunk if values else [(key, b"") for key, _ in chunk]):
                    return

        await in_thread(read, limiter=self._lock)

    async def _metadata(self, start: bytes, stop: bytes) -> list[Row]:
        prefix = topic_prefix(start[2:] if start[:1] == SYSTEM else start)
        topic = self._topics.get(prefix)
        rows = self._service + self._namespaces if topic is None else await self.about(topic)
        return [row for row in rows if start <= row[0] < stop]

    async def about(self, topic: _Topic) -> list[Row]:
        """Return the restored metadata rows of a topic."""
        async with self._making:
            rows = self._about.get(topic.new)
            if rows is None:
                rows = self._about[topic.new] = await self._made(topic)
            self._about.move_to_end(topic.new)
            while len(self._about) > _KEPT_TOPICS:
                self._about.popitem(last=False)
            return rows

    async def _made(self, topic: _Topic) -> list[Row]:
        found = await in_thread(self._kept_about, topic, limiter=self._lock)
        if topic.generation is None:
            return found
        # Load the topic from the rows of the backup, as its owner would.
        raw = _AsItWas(self, found)
        limits = TopicLimits(max_pending=1 << 62, max_producers=1 << 62)
        try:
            state = await load_topic(topic.name, raw, limits, self._authority)
        except DamagedRow as error:
            raise StoreUnusable(
                f"{topic.name}: {error.detail}", hint="restore the other topics by their names"
            ) from error
        # A renamed topic may replace an earlier topic of its new name.
        before = topic_of(topic.old)[0]
        floor_ms = max(self._now_ms, *(self._given_ms.get(name, 0) for name in (topic.name, before)))
        return restored_rows(state, found, topic.generation, floor_ms)

    def _kept_about(self, topic: _Topic) -> list[Row]:
        """Return the topic's metadata rows in the backup, except void ones. Call in a thread."""
        found: list[Row] = []
        for entry in topic.objects["metadata"]:
            for key, value in self._folder.rows(entry["sha256"]):
                own = value
                if key[:1] != SYSTEM:
                    new = topic.new
                else:
                    kind, rest = key[1:2], key[2 + len(topic.old) :]
                    new = key[:2] + topic.new + rest
                    if int.from_bytes(rest[:4], "big") == topic.generation:
                        trimmed = self._trimmed(topic, kind, key, value)
                        if trimmed is None:
                            continue
                        own = trimmed
                found.append((new, own))
        return sorted(found)

    def _trimmed(self, topic: _Topic, kind: bytes, key: bytes, value: bytes) -> bytes | None:
        """Return a row of the last generation as of the topic's line; None if nothing in it is still valid."""
        try:
            if kind == POINTER and self._is_undone(parse_pointer_key(key)[2]):
                return None
            if topic.line is None:
                return value
            if kind == HIGH_WATER:
                return None  # the mark counts messages that are left out
            if kind == PRODUCER:
                return _producer_up_to(parse_system_key(key).rest.decode("utf-8", "replace"), value, topic.line)
        except DamagedRow:
            pass  # loading the topic reports it
        return value

    def _rows(self, table: Table, start: bytes, stop: bytes, *, reverse: bool = False) -> Iterator[Row]:
        topic = self._topics.get(topic_prefix(start))
        if topic is None:
            return
        objects = topic.objects["messages" if table is Table.MESSAGE else "payloads"]
        for entry in reversed(objects) if reverse else objects:
            if table is Table.MESSAGE and not _may_have(entry, topic, start, stop):
                continue
            rows = self._folder.rows(entry["sha256"])
            for key, value in reversed(list(rows)) if reverse else rows:
                new = topic.new + key[len(topic.old) :]
                if not start <= new < stop:
                    continue
                if table is Table.PAYLOAD:
                    pointer = int.from_bytes(key[-POSITION_BYTES - 8 : -POSITION_BYTES], "big", signed=True)
                    if pointer == CHAIN_POINTER and topic.last_entry is not None:
                        if key[-POSITION_BYTES:] <= topic.last_entry:
                            yield new, value
                        continue
                    if not self._is_undone(pointer) and pointer not in topic.discarded:
                        yield new, value
                elif topic.line is None or key[-POSITION_BYTES:] <= topic.line:
                    yield new, self._decided(value)

    def _decided(self, value: bytes) -> bytes:
        """Return a message's row, rolled back if its transaction is undone."""
        if value and value[0] & HAS_POINTER and (pointer := _pointer_in(value)) > 0 and self._is_undone(pointer):
            return value[:1] + (-pointer).to_bytes(8, "big", signed=True) + value[9:]
        return value

    # --- what a copy needs of its source -------------------------------------------------------------

    def contents(self) -> Contents:
        """Return the topics and the kinds of their rows."""
        kinds = {
            row[0][1:2]
            for topic in self._topics.values()
            for entry in topic.objects["metadata"]
            for row in self._folder.rows(entry["sha256"])
            if row[0][:1] == SYSTEM
        }
        return Contents(set(self._topics), kinds | set(_MADE))

    async def claim(self, name: TopicName) -> Claim:
        """See ``Store.claim``; always succeeds, as there are no other owners."""
        await trio.lowlevel.checkpoint()
        return Claim(name, 0)

    async def check(self, claim: Claim) -> None:
        """See ``Store.check``; always succeeds."""
        del claim
        await trio.lowlevel.checkpoint()

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> NoReturn:
        """See ``Store.write``; refused."""
        raise _only_read()

    async def discard(self, table: Table, keys: Sequence[bytes]) -> NoReturn:
        """See ``Store.discard``; refused."""
        raise _only_read()

    async def drop(self, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> NoReturn:
        """See ``Store.drop``; refused."""
        raise _only_read()

    def may_have(self, table: Table, start: bytes, stop: bytes) -> bool:
        """See ``Store.may_have``."""
        del table
        return start < stop

    async def file_of(self, table: Table, key: bytes) -> None:
        """See ``Store.file_of``; None, as a row is made from several objects."""
        del table, key
        await trio.lowlevel.checkpoint()

    async def begin_files(self) -> NoReturn:
        """See ``Store.begin_files``; refused."""
        raise _only_read()

    async def scan_raw(self, table: Table, start: bytes, stop: bytes, take: Callable[[list[RawRow]], object]) -> None:
        """See ``Store.scan_raw``; yields nothing, even for damaged objects."""
        del table, start, stop, take
        await trio.lowlevel.checkpoint()

    async def reclaim(self, table: Table, start: bytes, stop: bytes) -> NoReturn:
        """See ``Store.reclaim``; refused."""
        raise _only_read()

    async def tidy(self) -> NoReturn:
        """See ``Store.tidy``; refused."""
        raise _only_read()

    async def pin(self, max_s: float) -> StoreView:
        """See ``Store.pin``; refused, as this store never changes."""
        raise _only_read()

    def statistics(self) -> StoreStatistics:
        """See ``Store.statistics``."""
        return StoreStatistics(bytes=None, free_bytes=None)

    async def aclose(self) -> None:
        """See ``Store.aclose``; there is nothing to release."""
        await trio.lowlevel.checkpoint()


def _only_read() -> StoreError:
    return StoreError("a backup can only be read")


class _AsItWas(RestoredStore):
    """The same messages, with the original metadata rows of one topic."""

    def __init__(self, restored: RestoredStore, about: list[Row]) -> None:
        self._restored = restored
        self._found = about
        self._lock = restored._lock

    async def _metadata(self, start: bytes, stop: bytes) -> list[Row]:
        return [row for row in self._found if start <= row[0] < stop]

    def _rows(self, table: Table, start: bytes, stop: bytes, *, reverse: bool = False) -> Iterator[Row]:
        return self._restored._rows(table, start, stop, reverse=reverse)


class RestoreRun(CopyRun):
    """One run of a restore: a copy whose source is a backup."""

    async def _parts(self) -> list[Part]:
        assert isinstance(self._source, RestoredStore)
        contents = self._source.contents()
        there = await contents_of(self._target)
        return parts_of(contents, self._request.topics, contents.kinds | there.kinds)


# --- restored rows -----------------------------------------------------------------------------------


def given_ms(manifests: Iterable[Mapping[str, Any]], now_ms: int) -> dict[TopicName, int]:
    """Return for each topic the latest time of ids that it may have assigned until now, as far as backups show.

    A topic assigns ids of the current time, or just above its last id if that is ahead of the clock. Ids that are ahead
    of the clock advance more slowly than the clock. Backups with a later time than now are ignored.
    """
    found: dict[TopicName, int] = {}
    for manifest in manifests:
        since_ms = now_ms - manifest["cutMs"]
        for topic in manifest["topics"]:
            if topic.get("line") and since_ms >= 0:
                name = TopicName(topic["namespace"], topic["topic"])
                last_ms = int(topic["line"][:16], 16) + since_ms
                found[name] = max(last_ms, found.get(name, 0))
    return found


def _settled(state: TopicState, found: list[Row], generation: int, now_ms: int) -> list[Row]:
    """Return the metadata rows of a loaded topic, with its time advanced and all producer sessions fenced."""
    state.time_ms = max(state.time_ms, now_ms)
    state.sequence.advance_past(now_ms, _LAST_SEQUENCE_ID)
    name = state.name
    made = {kind: system_key(kind, name, generation) for kind in _MADE}
    rows = {key: value for key, value in found if not key.startswith(tuple(made.values()))}
    before = dict(found)
    mark = state.mark()
    rows[mark.prefix + mark.suffixes[0]] = mark.values[0]
    for pointer, pending in state.pending.items():
        key = made[POINTER] + pointer.to_bytes(8, "big", signed=True)
        rows[key] = before[key] if pending.damaged else pending.encode()
    producers = state.producers
    record = producers.record or DeduplicationRecord(on=False)
    rows[made[PRODUCERS]] = replace(record, epochs=record.epochs + EPOCHS).encode()
    for producer in producers.known.values():
        rows[made[PRODUCER] + producer.name.encode()] = replace(producer, epoch=producer.epoch + EPOCHS).encode()
    for damaged in producers.damaged:
        key = made[PRODUCER] + damaged.encode()
        if key in before:
            rows[key] = before[key]
    return sorted(rows.items())


def restored_rows(state: TopicState, found: list[Row], generation: int, now_ms: int) -> list[Row]:
    """Return the metadata rows of a loaded topic after a restore at ``now_ms``."""
    rows = _settled(state, found, generation, now_ms)
    was_chained = state.chain is not None or (state.metadata is not None and state.metadata.chain_end is not None)
    return _says_restored(state, rows) if was_chained else rows


def _says_restored(state: TopicState, rows: list[Row]) -> list[Row]:
    """Mark a chained topic as restored, so that its owner adds an entry about the restore to the chain at the first load.

    If the chain was switched off, the owner does so when it is switched on again; until then it cannot be verified.
    """
    assert state.metadata is not None
    end, chain = state.metadata.chain_end, state.chain
    if end is not None and chain is not None and chain.position < end.position:
        end = None  # the end of the chain is after the line
    metadata = replace(state.metadata, restored=state.watermark or bytes(POSITION_BYTES), chain_end=end)
    key = metadata_key(state.name)
    return sorted((row_key, metadata.encode() if row_key == key else value) for row_key, value in rows)


def _producer_up_to(name: str, value: bytes, line: bytes) -> bytes | None:
    """Return a producer's row as of a line. None: the row had only later requests, and a load reads older ones from
    the stamps of its messages.
    """
    producer = Producer.decode(name, value)
    recent = tuple(result for result in producer.recent if result.last <= line)
    if len(recent) == len(producer.recent):
        return value
    if not recent:
        return None
    high = recent[-1].high
    highest = min(producer.highest_transactional, high)
    return replace(producer, recent=recent, pushed=high, persisted=high, highest_transactional=highest).encode()


def _pointer_in(value: bytes) -> int:
    return int.from_bytes(value[1:9], "big", signed=True)


def _may_have(entry: Mapping[str, Any], topic: _Topic, start: bytes, stop: bytes) -> bool:
    """Return True if an object of messages can have rows of a range before the topic's line."""
    if topic.line is not None and pack_position(entry["fromMs"], 0) > topic.line:
        return False
    if topic.generation is None:
        return True
    prefix = generation_prefix(topic.name, topic.generation)
    low, high = prefix + pack_position(entry["fromMs"], 0), prefix + pack_position(entry["toMs"], _LAST_SEQUENCE_ID)
    return low < stop and start <= high
