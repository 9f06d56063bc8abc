"""A topic with all kinds of rows, in the formats of store and cache, and the list of its messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.cache import CacheBudget, TopicCache
from actors.reading import feed_cached
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import FIRST_BOUND, LAST_BOUND, NO_PAYLOAD_PART, after, before, pack_id, pack_position
from plainsong.protocol.keys import generation_prefix
from plainsong.protocol.names import TopicName
from plainsong.protocol.page import HIDDEN_COUNTED, item
from plainsong.protocol.rows import MessageRow, Stored, encode_row
from plainsong.protocol.topic.asks import Span
from plainsong.protocol.topic.reading import Paging
from plainsong.protocol.transactions.view import AsOfView, Verdict, View
from storage.memory import MemoryTable

NAME = TopicName("ns", "t")
PREFIX = generation_prefix(NAME, 1)
START_MS = 1_700_000_000_000


@dataclass
class Payload:
    """One stored message; ``segment`` is an index."""

    payload: bytes
    ttl_s: int | None = None
    segment: int | None = None
    attributes: dict | None = None


@dataclass
class Entry:
    """One message row: plain, with a pointer, or (with ``stored``) a reference to payload rows."""

    ms: int
    sequence: int
    payload: bytes = b""
    pointer: int | None = None
    ttl_s: int | None = None
    stored: list[Payload] | None = None
    winners: list[int] | None = None
    orphans: int = 0
    """Number of rows stored under the pointer after the publish."""
    attributes: dict | None = None
    extras: dict = field(default_factory=dict)
    """The row's data about its request."""

    @property
    def position(self):
        return pack_position(self.ms, self.sequence)


@dataclass
class Message:
    """A message of the list."""

    message_id: bytes
    payload: bytes
    pointer: int
    expires_ms: int | None
    entry: Entry
    attributes: dict | None = None


class Topic:
    """Entries in topic order, in three forms."""

    def __init__(self, entries):
        self.entries = entries
        self.tables = {table: MemoryTable() for table in Table}
        self.messages = []
        for entry in entries:
            self._put(entry)

    def _put(self, entry):
        if entry.stored is None:
            extras = entry.extras | ({} if entry.attributes is None else {"a": entry.attributes})
            row = MessageRow(entry.payload, entry.pointer, entry.ttl_s, extras)
            self._add(entry, NO_PAYLOAD_PART, entry.payload, [entry.ttl_s], entry.attributes)
        else:
            row = self._store(entry)
        self.tables[Table.MESSAGE].put([PREFIX + entry.position], [encode_row(row)])

    def _store(self, entry):
        positions = [pack_position(entry.ms - 100 + index // 3, index % 3) for index in range(len(entry.stored) + 3)]
        prefix = PREFIX + abs(entry.pointer).to_bytes(8, "big")
        count = size = 0
        for position, one in zip(positions, entry.stored, strict=False):
            extras = {} if one.segment is None else {"s": one.segment}
            extras |= {} if one.attributes is None else {"a": one.attributes}
            value = encode_row(MessageRow(one.payload, ttl_s=one.ttl_s, extras=extras))
            self.tables[Table.PAYLOAD].put([prefix + position], [value])
            if entry.winners is None or one.segment in entry.winners:
                count, size = count + 1, size + len(one.payload)
                self._add(entry, position, one.payload, [entry.ttl_s, one.ttl_s], one.attributes)
        for position in positions[len(entry.stored) :][: entry.orphans]:
            self.tables[Table.PAYLOAD].put([prefix + position], [encode_row(MessageRow(b"orphan"))])
        winners = None if entry.winners is None else frozenset(entry.winners)
        stored = Stored(count, size, positions[0], positions[len(entry.stored) - 1], winners)
        return MessageRow(None, pointer=entry.pointer, ttl_s=entry.ttl_s, extras=stored.extras() | entry.extras)

    def _add(self, entry, payload_position, payload, ttls_s, attributes):
        own = [entry.ms + ttl_s * 1000 for ttl_s in ttls_s if ttl_s is not None]
        message_id = entry.position + payload_position
        pointer = entry.pointer or 0
        self.messages.append(Message(message_id, payload, pointer, min(own, default=None), entry, attributes))

    # --- three ways of reading ------------------------------------------------------------------

    def span(self, since=FIRST_BOUND, until=LAST_BOUND, now_ms=START_MS, oldest_ms=0):
        end = after(self.entries[-1].position + b"\xff" * 10) if self.entries else FIRST_BOUND
        return Span(1, PREFIX, since, min(until, end), now_ms, oldest_ms, None)

    def from_store(self, span, limit=10**6, max_bytes=10**9, view=None, *, chunk=3, pointers=False):
        paging = Paging(span, limit, max_bytes, view, with_pointers=pointers)
        walk_through(self.tables, paging, chunk)
        return paging.page()

    def cache(self, commit=5, turned=True):
        """Fill the scan cache as the topic's actor would: after the last reference, ``commit`` rows at a time.

        Rows that were rolled back are cached first and turned later.
        """
        cache = TopicCache(CacheBudget(1 << 30))
        last = max((index for index, each in enumerate(self.entries) if each.stored is not None), default=-1)
        since = FIRST_BOUND if last < 0 else after(self.entries[last].position + b"\xff" * 10)
        here = [each for each in self.entries[last + 1 :] if each.stored is None]
        for at in range(0, len(here), commit):
            rows = here[at : at + commit]
            expiries = {i: each.ms + each.ttl_s * 1000 for i, each in enumerate(rows) if each.ttl_s is not None}
            runs = [(i, i + 1, abs(each.pointer)) for i, each in enumerate(rows) if each.pointer]
            items = [item(each.position + NO_PAYLOAD_PART, each.payload) for each in rows]
            attributes = {i: each.attributes for i, each in enumerate(rows) if each.attributes}
            cache.append(PREFIX, items, expiries, since, runs, attributes)
            since = after(rows[-1].position + b"\xff" * 10)
        for each in here:
            if turned and each.pointer and each.pointer < 0:
                cache.roll_back(PREFIX, -each.pointer, each.position, each.position)
        return cache

    def from_cache(self, cache, span, limit=10**6, max_bytes=10**9, view=None, *, pointers=False):
        """Return the page; None if the cache does not contain all of it."""
        paging = Paging(span, limit, max_bytes, view, with_pointers=pointers)
        return paging.page() if feed_cached(cache, span, paging) else None

    def from_list(self, span, limit=10**6, max_bytes=10**9, view=None):
        """Return ``(messages, end, held by, held at, hidden)`` as specified, message by message."""
        out, size = [], 0
        living = [
            each
            for each in self.messages
            if span.start <= each.message_id < span.until
            and (each.expires_ms is None or each.expires_ms >= span.now_ms)
        ]
        for index, each in enumerate(living):
            verdict = verdict_of(view, each)
            if verdict is Verdict.SKIP:
                continue
            if verdict is Verdict.HOLD:
                hidden = sum(verdict_of(view, other) is not Verdict.SKIP for other in living[index:])
                held_at = max(each.entry.position + NO_PAYLOAD_PART, span.start)
                return out, "held", each.pointer, held_at, min(hidden, HIDDEN_COUNTED)
            size += len(item(each.message_id, each.payload))
            if len(out) == limit or (out and size > max_bytes):
                return out, "more", None, None, 0
            out.append(each)
        return out, "end", None, None, 0


def verdict_of(view, message):
    if isinstance(view, AsOfView) and not message.pointer:
        return Verdict.DELIVER if message.entry.ms <= view.at_ms else Verdict.SKIP
    return Verdict.DELIVER if view is None or not message.pointer else view.verdict(message.pointer)


def walk_through(tables, walk, chunk=3):
    """Feed a walk from tables, ``chunk`` rows at a time."""
    for table, start, stop, feed, reverse in walk.scans():
        rows = list(tables[table].walk(start, stop, reverse=reverse))
        for at in range(0, len(rows), chunk):
            if not feed(rows[at : at + chunk]):
                break


def check_page(topic, page, span, limit, max_bytes, view):
    """Assert that a page equals the list."""
    wanted, end, held_by, held_at, hidden = topic.from_list(span, limit, max_bytes, view)
    got = list(page.messages())
    assert got == [(each.message_id, each.payload) for each in wanted]
    assert page.attributes == {index: each.attributes for index, each in enumerate(wanted) if each.attributes}
    assert (page.count, page.payload_bytes, page.end) == (len(got), sum(map(len, page.parts)), end)
    if end == "more":
        assert page.last_id == got[-1][0]
        assert page.held is None
    elif end == "held":
        assert (page.held.write_pointer, page.held.hidden_messages) == (held_by, hidden)
        assert page.held.since_ms == int.from_bytes(held_at[:8], "big")
        assert after(page.last_id) == held_at, "resumed exclusively, the held row is the next one met"
    elif page.last_id is not None:
        rest = topic.from_list(topic.span(after(page.last_id), span.until, span.now_ms, span.oldest_ms), view=view)
        assert (rest[0], rest[1]) == ([], "end"), "nothing is behind the position to resume from"
        assert not got or got[-1][0] <= page.last_id
        assert after(page.last_id) <= max(span.since, span.until)


def same_page(one, other):
    """Assert that two pages are the same to their readers."""
    assert list(one.messages()) == list(other.messages())
    assert one.attributes == other.attributes
    assert (one.count, one.payload_bytes, one.last_id, one.end, one.held, dict(one.pointers)) == (
        other.count,
        other.payload_bytes,
        other.last_id,
        other.end,
        other.held,
        dict(other.pointers),
    )


def plain(ms, sequence=0, payload=b"plain", ttl_s=None):
    return Entry(START_MS + ms, sequence, payload, ttl_s=ttl_s)


def inline(ms, pointer, payload=b"inline", sequence=0, ttl_s=None):
    return Entry(START_MS + ms, sequence, payload, pointer, ttl_s)


def stored(ms, pointer, count, *, sequence=0, ttl_s=None, segments=None, winners=None, orphans=0, ttls_s=None):
    """A published store of ``count`` messages s0, s1 …"""
    payloads = [
        Payload(b"s%d" % index, ttls_s[index] if ttls_s else None, segments[index] if segments else None)
        for index in range(count)
    ]
    return Entry(START_MS + ms, sequence, b"", pointer, ttl_s, payloads, winners, orphans)


def committed(*pointers, read=1_000, open_=(), invalid=()):
    """Return a view of everything up to ``read`` except these pointers; ``pointers`` are its own."""
    return View(read, frozenset(open_), frozenset(invalid), frozenset(pointers))


def ids_around(topic):
    """Yield all relevant starting positions: at each message, just after it, at each row, and inside rows."""
    for each in topic.messages:
        yield each.message_id
        yield after(each.message_id)
        yield before(each.message_id)
    for entry in topic.entries:
        yield entry.position + NO_PAYLOAD_PART
        yield entry.position + b"\xff" * 10
        yield pack_id(entry.ms, entry.sequence, 7, 7)
