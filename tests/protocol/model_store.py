"""A store as three dicts, and a topic loaded from it: the synchronous twin of ``actors/loading.py``."""

from __future__ import annotations

from plainsong.protocol.effects import Delete, Put, RollBack, Table, put_one
from plainsong.protocol.ids import after
from plainsong.protocol.keys import (
    HIGH_WATER,
    POINTER,
    PRODUCER,
    PRODUCERS,
    READER,
    DamagedRow,
    metadata_key,
    parse_pointer_key,
    stop_after,
    system_key,
)
from plainsong.protocol.names import TopicName
from plainsong.protocol.records import HighWater, Metadata, Reader
from plainsong.protocol.topic.chain import StoredRows, row_of
from plainsong.protocol.topic.chain_rules import chain_prefix, restore_chain
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.topic.producer_state import DeduplicationRecord, Producer
from plainsong.protocol.topic.reading import Paging, key_range
from plainsong.protocol.topic.state import TopicLimits, TopicState
from plainsong.protocol.topic.transactional import apply_known_decisions
from plainsong.protocol.topic.upkeep import torn_ranges
from plainsong.protocol.transactions.transaction import NoAuthority
from storage.base import rolled_back
from storage.cleaning import is_message, is_reference, payloads_of

NAME = TopicName("default", "t1")


def single_rows(operations):
    """Yield the rows of a commit in the order in which a power cut may leave a prefix of them."""
    for operation in operations:
        if isinstance(operation, Put):
            assert operation.value_bytes == sum(map(len, operation.values))
            for suffix, value in zip(operation.suffixes, operation.values, strict=True):
                yield put_one(operation.table, operation.prefix + suffix, value)
        elif isinstance(operation, RollBack):
            yield operation
        else:
            for key in operation.keys:
                yield Delete(operation.table, [key])


class ModelStore:
    """Applies commits whole or up to any row, and refuses to write a message key twice."""

    def __init__(self):
        self.tables = {table: {} for table in Table}
        #: Every message row ever written, across all generations.
        self.ever = {}
        #: The last message row of each generation, if it has not been removed.
        self._last = {}
        self._unsynced = []

    def write(self, operations, rows=None):
        """Apply ``operations``, or their first ``rows`` rows; return the rows applied."""
        applied = []
        for index, row in enumerate(single_rows(operations)):
            if rows is not None and index >= rows:
                return applied
            self._apply(row)
            applied.append(row)
        self._unsynced.clear()
        return applied

    def _apply(self, row):
        if isinstance(row, RollBack):
            messages = self.tables[Table.MESSAGE]
            messages.update(rolled_back(self.scan(Table.MESSAGE, row.start, row.stop), row.pointer))
            return
        table = self.tables[row.table]
        if isinstance(row, Delete):
            table.pop(row.keys[0], None)
            return
        if row.table is Table.MESSAGE:
            assert row.prefix not in self.ever, f"{row.prefix.hex()} is written twice"
            assert row.prefix > self._last_of(row.prefix[:-10]), "written before another"
            self.ever[row.prefix] = row.values[0]
            self._last[row.prefix[:-10]] = row.prefix
        table[row.prefix] = row.values[0]

    def _last_of(self, generation):
        """Return the key of the generation's last message row; empty if it has none."""
        messages = self.tables[Table.MESSAGE]
        last = self._last.get(generation)
        if last not in messages:
            last = max((key for key in messages if key[:-10] == generation), default=b"")
        return last

    def discard(self, table, keys):
        """Remove rows; a power cut before the next write brings them back."""
        for key in keys:
            if key in self.tables[table]:
                self._unsynced.append((table, key, self.tables[table].pop(key)))

    def power_cut(self):
        """Bring back the rows discarded since the last write."""
        for table, key, value in self._unsynced:
            self.tables[table][key] = value
        self._unsynced.clear()
        self._last.clear()

    def scan(self, table, start, stop):
        """Return the rows of a range, in order."""
        return sorted((key, value) for key, value in self.tables[table].items() if start <= key < stop)


def loaded_chain(state, store):
    """Load the last entry of the chain; return the position after which rows are not covered."""
    start = chain_prefix(state)
    rows = store.scan(Table.PAYLOAD, start, stop_after(start))
    try:
        return restore_chain(state, (rows[-1][0][len(start) :], rows[-1][1]) if rows else None)
    except DamagedRow:
        return None


def stored_rows(store, row):
    """Return the payload rows that a row publishes; none if it is not a reference."""
    return store.scan(Table.PAYLOAD, *payloads_of(row)) if is_reference(row) and is_message(row) else []


def stored_digests(store, rows):
    """Return the digest of stored messages by the position of the row that publishes them."""
    digests = {}
    for row in rows:
        found = row_of(row[0][-10:], row[1])
        if found.stored is not None:
            digest = StoredRows(found.position, found.stored)
            for key, value in stored_rows(store, row):
                digest.take(key[-10:], value)
            digests[found.position] = digest.digest()
    return digests


def loaded_state(store, name=NAME, limits=None, authority=None):
    """Load the topic from the store."""
    state = TopicState(name, limits or TopicLimits(), authority=NoAuthority() if authority is None else authority)
    value = store.tables[Table.METADATA].get(metadata_key(name))
    if value is None:
        return state
    metadata = Metadata.decode(value)
    mark = store.tables[Table.METADATA].get(system_key(HIGH_WATER, name, metadata.generation))
    start = state.begin(metadata, None if mark is None else HighWater.decode(mark))
    pointers = system_key(POINTER, name, metadata.generation)
    for key, value in store.scan(Table.METADATA, pointers, stop_after(pointers)):
        pointer = parse_pointer_key(key)[2]
        state.pending[pointer] = Pending.decode(pointer, value)
    if not metadata.partly_cleaned:
        load_producers(state, store, metadata.generation)
    state.replay(store.scan(Table.MESSAGE, start, stop_after(state.prefix)))
    readers = system_key(READER, name, metadata.generation)
    for key, value in store.scan(Table.METADATA, readers, stop_after(readers)):
        state.readers[key[len(readers) :].decode("ascii")] = Reader.decode(value)
    covered = (
        loaded_chain(state, store) if metadata.properties.chain != "none" and not metadata.partly_cleaned else None
    )
    state.loaded()
    if covered is not None:
        rows = store.scan(Table.MESSAGE, state.prefix + covered + b"\x00", stop_after(state.prefix))
        rows = [row for row in rows if row[0] not in state.torn]
        state.chain.cover(rows, stored_digests(store, rows))
    apply_known_decisions(state)
    for start, stop in torn_ranges(state):
        state.torn_payloads += [key for key, _ in store.scan(Table.PAYLOAD, start, stop)]
    return state


def load_producers(state, store, generation):
    """Load the topic's producers from the store."""
    record = store.tables[Table.METADATA].get(system_key(PRODUCERS, state.name, generation))
    if record is None:
        return
    start = system_key(PRODUCER, state.name, generation)
    found = {}
    for key, value in store.scan(Table.METADATA, start, stop_after(start)):
        name = key[len(start) :].decode()
        found[name] = Producer.decode(name, value)
    state.producers.load(DeduplicationRecord.decode(record), found)


def page_of(rows, span, limit=1000, max_bytes=1 << 20, chunk=3):
    """Return the page of ``span`` from ``rows``, fed a few at a time as stores do."""
    paging = Paging(span, limit, max_bytes)
    start, stop = key_range(span)
    wanted = [row for row in rows if start <= row[0] < stop] if span.start < span.until else []
    for at in range(0, len(wanted), chunk):
        if not paging.feed_rows(wanted[at : at + chunk]):
            break
    return paging.page()


def pages_of(rows, span, limit, max_bytes=1 << 20):
    """Yield page after page until the end."""
    while True:
        page = page_of(rows, span, limit, max_bytes)
        yield page
        if page.end == "end":
            return
        span.since = after(page.last_id)
