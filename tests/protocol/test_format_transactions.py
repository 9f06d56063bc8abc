"""docs/format.md is correct about transactions: its second example byte by byte, and every key of the service."""

from __future__ import annotations

import re

import msgpack
import pytest
from test_format_doc import CLOCK_MS, DOCS, dumps

from plainsong.protocol import keys
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import pack_record
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.rows import MessageRow, Stored, decode_row
from plainsong.protocol.topic.asks import Create, Look, PublishUnder, RollBackPointer, StoreUnder
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.topic.reading import Paging
from plainsong.protocol.topic.state import Now, TopicState
from plainsong.protocol.transactions import ledger_rows
from plainsong.protocol.transactions.ledger_rows import ChangeSet, Head, LastPass, Record, service_key
from plainsong.protocol.transactions.transaction import TransactionType
from plainsong.protocol.transactions.view import View
from storage.memory import MemoryStore

NAME = TopicName("shop", "audit")
P = CLOCK_MS * 1_000_000
Q = P + 1
SECTION = (DOCS / "format.md").read_text(encoding="utf-8").split("### Rows of the transaction service")[1]


class Example:
    """The five steps of the example."""

    def __init__(self):
        self.core, self.store = TopicCore(TopicState(NAME)), MemoryStore()
        self.do(Create(TopicProperties(ttl_s=3600)), 0)
        self.do(StoreUnder(PublishRequest([b"line 1", b"line 2"], P, segment="a"), 12), 5)
        self.do(PublishUnder(PublishRequest([b"paid 18"], P, segments=["a"]), 7), 9)
        self.do(PublishUnder(PublishRequest([b"void"], Q), 4), 12)
        self.do(RollBackPointer(Q), 15)

    def do(self, ask, after_ms):
        now = Now(CLOCK_MS + after_ms, 0.0)
        step = self.core.step([("ticket", ask)], now)
        self.store.apply(step.operations)
        ((_, answer),) = self.core.settled(step, now)
        assert not isinstance(answer, Exception), answer
        return answer

    def rows(self, table):
        """Return keys and values, as in LevelDB."""
        stored = self.store.tables[table].walk(b"", b"\xff", reverse=False)
        return [(bytes([table]) + key, value) for key, value in stored]

    def read(self, view=None):
        """Return all messages, with ids, that a reader with ``view`` gets."""
        paging = Paging(self.do(Look(FIRST_BOUND), 20), 100, 1 << 20, view)
        for scan in paging.scans():
            scan.feed(list(self.store.tables[scan.table].walk(scan.start, scan.stop, reverse=False)))
        return list(paging.page().messages())


def documented(kind):
    """Return keys and values of the page's rows of one kind."""
    return [(row["key"], row["value"]) for row in dumps(rf"{kind}-\d")]


def unpacked(value):
    assert value[0] == 1
    return msgpack.unpackb(value[1:])


def transactions():
    """Return the rows of the service in the example."""
    begun = Record(P, TransactionType.SHORT, "billing", CLOCK_MS, CLOCK_MS + 30_000, P - 1, P - 1)
    return [
        (service_key(ledger_rows.HEAD), Head(Q, P - 1, P).encode()),
        (service_key(ledger_rows.PASS), LastPass(CLOCK_MS, P - 1).encode()),
        (service_key(ledger_rows.TRANSACTION, P), begun.encode()),
    ]


def test_the_example_is_what_the_topic_writes():
    example = Example()
    assert documented("message") == example.rows(Table.MESSAGE)
    assert documented("payload") == example.rows(Table.PAYLOAD)
    pointer = bytes([Table.METADATA]) + keys.SYSTEM + keys.POINTER
    assert documented("pointer") == [row for row in example.rows(Table.METADATA) if row[0].startswith(pointer)]


def test_the_example_can_be_read_by_the_code():
    (reference, inline, rolled_back) = (decode_row(value) for _, value in documented("message"))
    assert Stored.of(reference) == Stored(
        2, 12, documented("payload")[0][0][-10:], documented("payload")[1][0][-10:], frozenset((0,))
    )
    assert (inline.pointer, inline.payload) == (P, b"paid 18")
    assert rolled_back == MessageRow(b"void", -Q)
    assert [keys.parse_payload_key(key[1:])[2:] for key, _ in documented("payload")] == [
        (P, CLOCK_MS + 5, 0),
        (P, CLOCK_MS + 5, 1),
    ]
    assert [decode_row(value).extras for _, value in documented("payload")] == [{"s": 0}, {"s": 0}]
    first, second = (Pending.decode(keys.parse_pointer_key(key[1:])[2], value) for key, value in documented("pointer"))
    assert (first.pointer, first.messages, first.size, first.rolled_back) == (P, 3, 19, False)
    assert (second.pointer, second.messages, second.runs, second.rolled_back) == (Q, 1, [], True)


def test_the_example_is_read_as_the_page_says():
    example = Example()
    (identifier,) = dumps(r"id-\d")
    everything = example.read()
    assert [payload for _, payload in everything] == [b"line 1", b"line 2", b"paid 18", b"void"]
    assert everything[1][0] == identifier["id"]
    assert example.read(View(Q, frozenset((P,)), frozenset())) == []
    assert example.read(View(Q, frozenset(), frozenset())) == everything[:3]


def test_the_service_writes_its_rows_as_the_page_shows_them():
    assert documented("service") == [(bytes([Table.METADATA]) + key, value) for key, value in transactions()]
    letters = re.findall(r"^\| `(\w)` \|", SECTION.split("**Head**")[0], re.MULTILINE)
    in_code = {
        getattr(ledger_rows, name).decode()
        for name in ("HEAD", "TRANSACTION", "CHANGES", "ENLISTED", "PASS", "AUTHORITY")
    }
    assert set(letters) == in_code


FULL = {
    "Head": Head(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11).encode(),
    "Transaction": Record(
        1, TransactionType.LONG, "c", 1, 2, 3, 4, (1, 5), True, True, "invalid", 6, 7, (1, 5), tephra=True, owner="shop"
    ).encode(),
    "Change set": ChangeSet(1, "c", frozenset((b"k",)), 2).encode(),
    "Enlisted topic": pack_record({"m": 1}),
    "Last complete pass": LastPass(1, 2).encode(),
    "Authority": pack_record({"a": "off"}),
}


@pytest.mark.parametrize("title", FULL)
def test_every_key_of_a_row_of_the_service_is_on_the_page(title):
    section = re.split(rf"^\*\*{title}\*\*", SECTION, flags=re.MULTILINE)[1].split("\n\n")[1]
    assert set(re.findall(r"^\| `(\w)` \|", section, re.MULTILINE)) == set(unpacked(FULL[title]))
