"""A walk delivers rows of every kind in lists exactly as the specification says for each row."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
from model_store import NAME

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import FIRST_BOUND, LAST_BOUND, NO_PAYLOAD_PART, after, pack_position, published_ms
from plainsong.protocol.keys import generation_prefix
from plainsong.protocol.page import item, items_in
from plainsong.protocol.rows import MessageRow, Stored, decode_row, encode_row
from plainsong.protocol.topic import visibility
from plainsong.protocol.topic.asks import Span
from plainsong.protocol.topic.reading import Walk
from plainsong.protocol.transactions.view import Verdict, View

PREFIX = generation_prefix(NAME, 1)
#: Rows were published up to two seconds earlier: a TTL of a second is over for some, a TTL of a minute for none.
NOW_MS = 1_000_000
SEEDS = 24
#: Pointers: visible, invalid, undecided, later than the view, the reader's own.
SEEN, INVALID, OPEN, LATER, OWN = 3, 5, 6, 9, 11
VIEWS = (
    None,
    View(8, frozenset({OPEN}), frozenset({INVALID}), frozenset({OWN})),
    View(100, frozenset(), frozenset({INVALID})),
    View(100, frozenset(), frozenset()),
)
#: Possible extras, with and without attributes. The last one's attributes are invalid.
EXTRAS = (
    {"i": 1},
    {"d": ["p", 0, 3, 4], "b": 2},
    {"a": {"colour": "red"}},
    {"a": {"colour": "blue", "size": "x" * 300}},
    {"i": 2, "a": {"of": "one"}},
    {"a": {}},
)
#: Attributes that are not strings, which only a reader of attributes detects.
UNREADABLE = {"a": {"number": 5}}
GARBLED = (
    b"",
    b"\x80\x00",
    b"\x01\x00\x00",
    b"\x04\x00\x00\x00\x09\x81",
    b"\x05" + bytes(7) + b"\x03\x00\x00\x01\x00\x81",
)


@dataclass
class Case:
    """A topic's rows, and the expected messages of each."""

    rows: list[tuple[bytes, bytes]] = field(default_factory=list)
    payload_rows: list[tuple[bytes, bytes]] = field(default_factory=list)
    #: For each row its position, the row itself (of a reference, its pointer and end), and its messages.
    entries: list[tuple[bytes, MessageRow | bytes, list[tuple[bytes, MessageRow | bytes]]]] = field(
        default_factory=list
    )

    def scan(self, table, start, stop):
        rows = self.rows if table is Table.MESSAGE else self.payload_rows
        return [row for row in rows if start <= row[0] < stop]


def drawn(seed):
    """Return a topic with runs of similar rows, interrupted by others."""
    rng, case = Random(seed), Case()
    kinds = ["plain", "pointer", "extras", "both", "ttl", "reference", "staged"] + ["garbled"] * (seed % 3 == 0)
    position = 0
    while position < 40:
        kind, pointers = (
            rng.choice(kinds),
            rng.choice([[SEEN], [SEEN, OWN], [SEEN, INVALID, -SEEN], [SEEN, OPEN, LATER]]),
        )
        extras = rng.sample(EXTRAS, 2) + [UNREADABLE] * (seed % 4 == 1)
        for _ in range(1 if kind == "garbled" else rng.randrange(1, 7)):
            position += 1
            _add(case, rng, kind, pointers, extras, pack_position(999_000 - 1_000 + position * 30, position))
    case.payload_rows.sort()
    return case


def _add(case, rng, kind, pointers, extras, position):
    pointer = rng.choice(pointers) if kind in ("pointer", "both", "reference") or rng.random() < 0.1 else None
    payload = rng.choice([b"", b"x", b"%d" % rng.randrange(99), b"y" * 100])
    if kind in ("reference", "staged"):
        _add_stored(case, rng, None if kind == "staged" else pointer, extras, position)
        return
    if kind == "garbled":
        entry = rng.choice(GARBLED)
    else:
        own_ttl_s = rng.choice([None, 0, 1, 60]) if kind == "ttl" else None
        entry = MessageRow(payload, pointer, own_ttl_s, rng.choice(extras) if kind in ("extras", "both") else {})
    case.rows.append((PREFIX + position, entry if isinstance(entry, bytes) else encode_row(entry)))
    case.entries.append((position, entry, []))


def _add_stored(case, rng, pointer, extras, position):
    """Add a reference and its stored messages, some similar, some of losing segments."""
    kept_under = -int.from_bytes(position, "big") % (1 << 40) - (1 << 41) if pointer is None else abs(pointer)
    ttl_s = rng.choice([None, None, 0, 1, 60])
    winners = rng.choice([None, [1], [1, 2], []])
    with_segments = winners is not None or rng.random() < 0.3
    with_ttls, with_attributes = rng.random() < 0.3, rng.random() < 0.5
    found = []
    for number in range(rng.randrange(1, 6)):
        own = {"s": rng.choice([1, 1, 2, 3])} if with_segments else {}
        own |= {"a": rng.choice([*extras, {}]).get("a", {"of": "a stored one"})} if with_attributes else {}
        own_ttl_s = rng.choice([None, 0, 60]) if with_ttls else None
        payload = rng.choice([b"", b"s", b"s" * 70])
        # Unique to the reference, so that references under one pointer share no payload rows.
        stored_at = position[:7] + bytes([position[7], position[9], number])
        found.append((stored_at, MessageRow(payload, None, own_ttl_s, own)))
    segments, staged = None if winners is None else frozenset(winners), kept_under if pointer is None else None
    reference = Stored(len(found), 9, found[0][0], found[-1][0], segments, staged)
    row = MessageRow(None, pointer, ttl_s, reference.extras())
    case.rows.append((PREFIX + position, encode_row(row)))
    prefix = PREFIX + struct.pack(">q", kept_under)
    case.payload_rows += [(prefix + at, encode_row(each)) for at, each in found]
    case.entries.append((position, row, found))


class Reader(Walk):
    """Records everything, and continues after unreadable rows."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        #: Each message's id, payload, pointer, end and attributes; only the id of an unreadable one.
        self.told = []

    def _take(self, items, pointers, expiries):
        assert items
        assert pointers is None or (self.with_pointers and len(pointers) == len(items))
        for index, each in enumerate(items):
            [(message_id, payload)] = items_in(each)
            assert each == item(message_id, payload)
            pointer = pointers[index] if pointers else 0
            ends_ms = expiries[index] if expiries else 0
            self.told.append((message_id, payload, pointer, ends_ms, self.attributes.get(message_id)))
        return True

    def _damaged(self, message_id, damage):
        self.told.append(message_id)
        return True


class WithAttributes(Reader):
    with_attributes = True


def read(case, reader, chunk):
    for scan in reader.scans():
        rows = case.scan(scan.table, scan.start, scan.stop)
        for at in range(0, len(rows), chunk):
            if not scan.feed(rows[at : at + chunk]):
                break


class Specified:
    """The deliveries according to the specification, message by message."""

    def __init__(self, case, reader):
        self.span, self.view, self.hidden_limit = reader.span, reader.view, reader._hidden_limit
        self.with_pointers, self.with_attributes = reader.with_pointers, reader.with_attributes
        self.told, self.hidden, self.expired, self.passed = [], 0, 0, False
        self.held_by, self.held_at = None, b""
        for position, entry, stored in case.entries:
            goes_on = self._reference(position, entry, stored) if stored else self._message(position, entry)
            if not goes_on:
                return

    def _message(self, position, row):
        message_id = position + NO_PAYLOAD_PART
        return not self._is_within(message_id) or self._one(message_id, row, row, message_id)

    def _reference(self, position, reference, stored):
        within = [(position + at, row) for at, row in stored if self._is_within(position + at)]
        if within and is_over(position, reference.ttl_s):
            self.expired += len(stored)
        elif within and self._verdict(reference.pointer) is Verdict.SKIP:
            self.passed = True
        else:
            held_at = max(position + NO_PAYLOAD_PART, self.span.start)
            return all(self._one(message_id, row, reference, held_at) for message_id, row in within)
        return True

    def _one(self, message_id, row, carrier, held_at):
        """Deliver one message, given its own row and the row with its pointer; return True if the reader continues."""
        strings = None if isinstance(row, bytes) else row.extras.get("a")
        if isinstance(row, bytes) or (self.with_attributes and strings == UNREADABLE["a"]):
            if self.held_by is None:
                self.told.append(message_id)
            return self.held_by is None
        winners = carrier.extras.get("g")
        if winners is not None and row.extras.get("s") not in winners:
            return True
        ttls_s = [each.ttl_s for each in (row, carrier) if each.ttl_s is not None]
        if ttls_s and is_over(message_id, min(ttls_s)):
            self.expired += 1
            return True
        verdict = self._verdict(carrier.pointer)
        if verdict is Verdict.SKIP:
            self.passed = True
            return True
        if verdict is Verdict.HOLD and self.held_by is None:
            self.held_by, self.held_at = carrier.pointer, held_at
            if not self.hidden_limit:
                return False
        if self.held_by is not None:
            self.hidden += 1
            return self.hidden < self.hidden_limit
        self.passed = False
        ends_ms = published_ms(message_id) + min(ttls_s) * 1000 if ttls_s else 0
        pointer = (carrier.pointer or 0) if self.with_pointers else 0
        shown = strings if self.with_attributes and strings else None
        self.told.append((message_id, row.payload, pointer, ends_ms, shown))
        return True

    def _is_within(self, message_id):
        return self.span.start <= message_id < self.span.until

    def _verdict(self, pointer):
        return Verdict.DELIVER if self.view is None or pointer is None else self.view.verdict(pointer)


def is_over(message_id, ttl_s):
    return ttl_s is not None and published_ms(message_id) + ttl_s * 1000 < NOW_MS


def bounds_of(case):
    """Yield the bounds of the whole topic, and bounds at and inside references."""
    yield FIRST_BOUND, LAST_BOUND
    inside = [position + at for position, _, stored in case.entries for at, _ in stored]
    if inside:
        yield after(inside[len(inside) // 2]), LAST_BOUND
        yield inside[0], inside[-1]
    ids = [position + NO_PAYLOAD_PART for position, _, _ in case.entries]
    yield ids[3], after(ids[-3])


def readers_of(case):
    """Yield readers of each kind with each of those bounds."""
    for since, until in bounds_of(case):
        for view in VIEWS:
            for kind, with_pointers, hidden_limit in (
                (WithAttributes, True, 0),
                (Reader, False, 3),
                (Reader, True, 1000),
            ):
                span = Span(1, PREFIX, since, until, NOW_MS, 0, None)
                yield partial(kind, span, view, with_pointers=with_pointers, hidden_limit=hidden_limit)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_walk_delivers_holds_counts_and_skips_each_row_as_a_single_decision_would(seed):
    case = drawn(seed)
    for begin in readers_of(case):
        wanted = Specified(case, begin())
        for chunk in (1, 4, 100):
            reader = begin()
            read(case, reader, chunk)
            assert reader.told == wanted.told, (begin, chunk)
            assert (reader.held_by, reader.held_at, reader.hidden) == (wanted.held_by, wanted.held_at, wanted.hidden)
            if reader.held_by is None:
                assert reader.expired == wanted.expired
                if not any(isinstance(each, bytes) for each in wanted.told):
                    assert reader.passed == wanted.passed


def test_the_topics_of_this_test_have_everything_a_walk_distinguishes():
    counts = Counter[str]()
    for case in map(drawn, range(SEEDS)):
        for begin in readers_of(case):
            wanted = Specified(case, begin())
            counts["held"] += wanted.held_by is not None
            counts["full"] += wanted.hidden == wanted.hidden_limit > 0
            counts["expired"] += wanted.expired > 0
            counts["passed"] += wanted.passed
            for each in wanted.told:
                counts["damaged"] += isinstance(each, bytes)
                counts["with attributes"] += not isinstance(each, bytes) and each[4] is not None
                counts["with a pointer"] += not isinstance(each, bytes) and each[2] != 0
    assert min(counts[each] for each in ("held", "full", "expired", "passed", "damaged")) >= 50, counts
    assert min(counts[each] for each in ("with attributes", "with a pointer")) >= 50, counts


@pytest.fixture
def decoded(monkeypatch):
    """The values that were decoded row by row."""
    found = []

    def noting(value):
        found.append(value)
        return decode_row(value)

    monkeypatch.setattr(visibility, "decode_row", noting)
    return found


def told_of(case, kind=Reader, view=None):
    reader = kind(Span(1, PREFIX, FIRST_BOUND, LAST_BOUND, NOW_MS, 0, None), view, with_pointers=True)
    read(case, reader, 100)
    return [payload for _, payload, *_ in reader.told]


@pytest.mark.parametrize("kind", [Reader, WithAttributes])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("extras", [{}, {"i": 1}, {"a": {"of": "one"}}])
@pytest.mark.parametrize("pointers", [[None], [SEEN, OWN], [None, SEEN]])
def test_rows_that_differ_in_pointers_and_extras_only_are_delivered_without_decoding_any(
    decoded, pointers, extras, view, kind
):
    case = Case()
    for number in range(8):
        own = extras if number % 3 else {}
        row = MessageRow(b"%d" % number, pointers[number % len(pointers)], None, own)
        case.rows.append((PREFIX + pack_position(NOW_MS - 10, number), encode_row(row)))
    assert told_of(case, kind, view) == [b"%d" % number for number in range(8)]
    assert decoded == []


@pytest.mark.parametrize("kind", [Reader, WithAttributes])
def test_stored_rows_of_equal_extras_are_decoded_once(decoded, kind):
    case, position = Case(), pack_position(NOW_MS - 10, 0)
    stored_at = [pack_position(NOW_MS - 20, number) for number in range(6)]
    reference = Stored(6, 6, stored_at[0], stored_at[-1], frozenset({1}))
    case.rows.append((PREFIX + position, encode_row(MessageRow(None, SEEN, None, reference.extras()))))
    for number, at in enumerate(stored_at):
        row = MessageRow(b"%d" % number, None, None, {"s": number % 2, "a": {"of": "one"}})
        case.payload_rows.append((PREFIX + struct.pack(">q", SEEN) + at, encode_row(row)))
    assert told_of(case, kind) == [b"1", b"3", b"5"]
    assert len(decoded) == 2


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_row_that_ends_inside_its_pointer_is_reported_at_its_place_among_rows_of_other_pointers(cut):
    case = Case()
    values = [encode_row(MessageRow(b"seen", SEEN)), encode_row(MessageRow(b"gone", -SEEN))]
    values.insert(1, (values[0][:1] + b"\x01" * 8)[:cut])
    case.rows = [(PREFIX + pack_position(NOW_MS - 10, number), value) for number, value in enumerate(values)]
    reader = Reader(Span(1, PREFIX, FIRST_BOUND, LAST_BOUND, NOW_MS, 0, None), View(8, frozenset(), frozenset()))
    read(case, reader, 100)
    seen, damaged = reader.told
    assert seen[1] == b"seen"
    assert damaged == pack_position(NOW_MS - 10, 1) + NO_PAYLOAD_PART
