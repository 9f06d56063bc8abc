"""docs/format.md is correct about staging: its fourth example matches byte by byte."""

from __future__ import annotations

from test_format_doc import CLOCK_MS, dumps

from plainsong.protocol import keys
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.rows import Stamp, Stored, decode_row, position_of_staged
from plainsong.protocol.topic.asks import Create, Look, PublishStaged, StoreStaged
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.topic.reading import Paging
from plainsong.protocol.topic.state import Now, TopicState
from plainsong.protocol.transactions.view import View
from storage.memory import MemoryStore

NAME = TopicName("shop", "bulk")
POINTER = -((CLOCK_MS + 5) * 65_536)


def stored(segment, payload):
    return StoreStaged(PublishRequest([payload], producer="job", segment=segment, sequence_ids=[0]), len(payload))


class Example:
    """Runs the example's steps, and keeps the pointer's row from before the last one."""

    def __init__(self):
        self.core, self.store = TopicCore(TopicState(NAME)), MemoryStore()
        self.do(Create(TopicProperties(ttl_s=3600)), 0)
        self.do(stored("a", b"one"), 5)
        self.do(stored("b", b"lost"), 6)
        self.pointers = self.rows(Table.METADATA, keys.SYSTEM + keys.POINTER)
        self.receipt = self.do(
            PublishStaged(PublishRequest([], producer="job", sequence_ids=[3], segments=["a"]), 0), 9
        )

    def do(self, ask, after_ms):
        now = Now(CLOCK_MS + after_ms, 0.0)
        step = self.core.step([("ticket", ask)], now)
        self.store.apply(step.operations)
        ((_, answer),) = self.core.settled(step, now)
        assert not isinstance(answer, Exception), answer
        return answer

    def rows(self, table, start=b""):
        """Return the rows whose keys begin with ``start``, as (key, value) as LevelDB stores them."""
        found = self.store.tables[table].walk(start, start + b"\xff", reverse=False)
        return [(bytes([table]) + key, value) for key, value in found]


def documented(kind):
    """Return the page's rows of one kind, as (key, value)."""
    return [(row["key"], row["value"]) for row in dumps(rf"{kind}-\d")]


def test_the_example_is_what_the_topic_writes():
    example = Example()
    assert documented("staged") == example.pointers
    assert documented("kept") == example.rows(Table.PAYLOAD)
    assert documented("batch") == example.rows(Table.MESSAGE)
    assert example.rows(Table.METADATA, keys.SYSTEM + keys.POINTER) == []


def test_the_example_can_be_read_by_the_code():
    ((key, value),) = documented("staged")
    name, generation, pointer = keys.parse_pointer_key(key[1:])
    assert (name, generation, pointer) == (NAME, 1, POINTER)
    assert position_of_staged(pointer) == (CLOCK_MS + 5, 0)
    pending = Pending.decode(pointer, value)
    assert (pending.staged_by, pending.stored, pending.stored_bytes) == ("job", 2, 7)
    assert pending.stored_by == {("job", "a"): (0, 0), ("job", "b"): (0, 0)}
    payload_keys = [keys.parse_payload_key(key[1:]) for key, _ in documented("kept")]
    assert [each[2:] for each in payload_keys] == [(POINTER, CLOCK_MS + 5, 0), (POINTER, CLOCK_MS + 6, 0)]
    ((_, value),) = documented("batch")
    row = decode_row(value)
    first, last = (key[-10:] for key, _ in documented("kept"))
    assert Stored.of(row) == Stored(1, 3, first, last, frozenset((0,)), POINTER)
    assert (row.pointer, Stamp.of(row)) == (None, Stamp("job", 0, range(3, 4), 1))


def test_the_example_is_read_as_the_page_says():
    example = Example()
    for view in (None, View(0, frozenset(), frozenset())):
        paging = Paging(example.do(Look(FIRST_BOUND), 20), 100, 1 << 20, view)
        for scan in paging.scans():
            scan.feed(list(example.store.tables[scan.table].walk(scan.start, scan.stop, reverse=False)))
        ((message_id, payload),) = paging.page().messages()
        assert (message_id, payload) == (dumps("id-staged")[0]["id"], b"one")
        assert example.receipt.first_id < message_id < example.receipt.last_id
