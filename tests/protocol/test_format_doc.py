"""docs/format.md is correct: its worked example is decoded from the page and compared with the code's output."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import plyvel
import pytest

from plainsong.protocol import keys, rows
from plainsong.protocol.codec import AVRO
from plainsong.protocol.effects import Ask, Table
from plainsong.protocol.ids import ID_BYTES
from plainsong.protocol.names import TopicName
from plainsong.protocol.page import Page
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import ChainEnd, HighWater, Metadata, NamespaceProperties, Reader, SetAside
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import Create, Look, Publish, PublishStaged, SetReader, StoreStaged
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.pending import Pending, Segment
from plainsong.protocol.topic.producer_state import DeduplicationRecord, Producer, Result
from plainsong.protocol.topic.reading import Paging, key_range
from plainsong.protocol.topic.state import Now, TopicState
from storage.directory import FORMAT_NAME, read_format, write_format
from storage.leveldb import LevelDBStore
from storage.memory import MemoryStore

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "format.md").read_text(encoding="utf-8")

CLOCK_MS = 1_700_000_000_000
NAME = TopicName("shop", "orders")
#: A line of a dump: an optional label, bytes, and after two spaces their description.
DUMP_LINE = re.compile(r"(?P<label>\w+)?\s+(?P<hex>[0-9a-f]{2}(?: [0-9a-f]{2})*)\s{2,}(?P<words>\S.*)")


def dumps(name: str) -> list[dict[str, bytes]]:
    """Return the bytes by label in the blocks fenced as ``hex name``."""
    found = []
    for block in re.findall(rf"^```hex {name}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
        parts: dict[str, bytes] = {}
        label = ""
        for line in block.splitlines():
            said = DUMP_LINE.fullmatch(line)
            assert said, line
            label = said["label"] or label
            parts[label] = parts.get(label, b"") + bytes.fromhex(said["hex"])
        found.append(parts)
    return found


def documented_rows() -> list[tuple[bytes, bytes]]:
    """Return key and value of each row of the example, as in LevelDB."""
    return [(row["key"], row["value"]) for row in dumps("(?:high-water mark|reader|metadata|message)")]


class Example:
    """The three steps of the example, on a settable clock."""

    def __init__(self) -> None:
        self.core = TopicCore(TopicState(NAME))
        self.commits: list[Any] = []
        self.do(Create(TopicProperties(ttl_s=3600)), CLOCK_MS)
        request = PublishRequest([b"paid 17", b"hurry"], message_ttls_s=[None, 60])
        receipt = self.do(Publish(request, 32), CLOCK_MS + 5)
        self.do(SetReader("billing", receipt.first_id), CLOCK_MS + 9)

    def do(self, ask: Ask[Any], at_ms: int) -> Any:
        now = Now(at_ms, 0.0)
        step = self.core.step([("ticket", ask)], now)
        if step.operations:
            self.commits.append(step.operations)
        ((_, answer),) = self.core.settled(step, now)
        assert not isinstance(answer, Exception), answer
        return answer

    def page(self, at_ms: int) -> Page:
        """Read all messages from the rows."""
        store = MemoryStore()
        for operations in self.commits:
            store.apply(operations)
        span = self.do(Look(bytes(ID_BYTES)), at_ms)
        paging = Paging(span, 100, 1 << 20)
        paging.feed_rows(list(store.tables[Table.MESSAGE].walk(*key_range(span), reverse=False)))
        return paging.page()


def full_pending() -> Pending:
    """Return an undecided pointer with every field in use."""
    at = bytes(10)
    pending = Pending(1, 2, 3, messages=1, size=1, stored=1, stored_bytes=1, first_stored=at, last_stored=at)
    pending.add(at, at, 0)
    pending.segments["s"] = Segment(0, 1, 1)
    pending.published = (at, at)
    pending.stored_by["p", "s"] = (1, 2)
    pending.record_ids("p", 1, 2)
    pending.rolled_back = pending.orphaned = True
    pending.staged_by = "p"
    pending.listed_digest = bytes(8)
    pending.link = bytes(32)
    return pending


async def test_the_example_is_what_leveldb_holds(tmp_path: Path):
    async with await LevelDBStore.open(tmp_path / "data") as store:
        claim = await store.claim(NAME)
        for operations in Example().commits:
            await store.write(operations, claim=claim)
    found = []
    for folder in ("metadata", "volumes/00000001"):
        with plyvel.DB(str(tmp_path / "data" / folder)) as database:
            # The store's own keys are not in the example.
            found += [row for row in database if row[0][:1] != b"\x00"]
    assert documented_rows() == found
    table = re.findall(r"^\| `([\w.]+/?)` \|", TEXT.split("### Volumes")[0], re.MULTILINE)
    there = {path.name + ("/" if path.is_dir() else "") for path in (tmp_path / "data").iterdir()}
    assert there == set(table) - {"FORMAT.tmp"}


def test_the_page_alone_suffices_to_read_the_example():
    high_water, reader, metadata, first, second = documented_rows()
    topic = b"shop:orders:" + struct.pack(">i", 1)
    assert high_water[0] == b"\x01\x00h" + topic
    assert reader[0] == b"\x01\x00r" + topic + b"billing"
    assert metadata[0] == b"\x01shop:orders:"
    at_ms = CLOCK_MS + 5
    assert first[0] == b"\x02" + topic + struct.pack(">qH", at_ms, 0)
    assert second[0] == b"\x02" + topic + struct.pack(">qH", at_ms, 1)
    assert first[1] == bytes([0x00, 2 * 7]) + b"paid 17"
    assert second[1] == bytes([0x02]) + struct.pack(">I", 60) + bytes([2 * 5]) + b"hurry"
    slices = [[at_ms, at_ms, 2, len(first[1]) + len(second[1]) + 20, at_ms + 60_000]]
    assert unpacked(high_water[1]) == {"t": at_ms, "s": [at_ms, 1], "b": slices, "n": 2, "q": [1]}
    assert unpacked(reader[1]) == {"p": first[0][-10:] + bytes(10), "c": CLOCK_MS + 9}
    assert unpacked(metadata[1])["p"]["ttl"] == 3600


def unpacked(value: bytes) -> Any:
    assert value[0] == 1
    return msgpack.unpackb(value[1:])


def test_the_example_is_read_by_the_code_too():
    high_water, reader, metadata, first, second = documented_rows()
    assert keys.parse_system_key(high_water[0][1:]) == (b"h", NAME, 1, b"")
    assert keys.parse_system_key(reader[0][1:]) == (b"r", NAME, 1, b"billing")
    assert keys.topic_of(metadata[0][1:]) == (NAME, b"")
    assert keys.parse_message_key(second[0][1:]) == (NAME, 1, CLOCK_MS + 5, 1)
    assert HighWater.decode(high_water[1]).last_sequence_id == 1
    assert Reader.decode(reader[1]).changed_ms == CLOCK_MS + 9
    stored = Metadata.decode(metadata[1])
    assert stored.properties.ttl_s == 3600
    assert not Metadata.is_of_deleted(metadata[1])
    assert Metadata.is_of_deleted(replace(stored, deleted_ms=CLOCK_MS).encode())
    assert rows.decode_row(first[1]).payload == b"paid 17"
    assert rows.decode_row(second[1]).ttl_s == 60


def test_the_answer_is_what_a_poll_gives_until_the_second_message_expires():
    (answer,) = dumps("answer")
    at_its_end_ms = CLOCK_MS + 60_005
    assert AVRO.encode_page(Example().page(at_its_end_ms)) == answer["body"]
    left = Example().page(at_its_end_ms + 1)
    assert [payload for _, payload in left.messages()] == [b"paid 17"]


def test_the_format_file_is_as_shown(tmp_path: Path):
    write_format(tmp_path)
    (shown,) = re.findall(r"^```json FORMAT\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    written = (tmp_path / FORMAT_NAME).read_text(encoding="ascii")
    assert list(json.loads(shown)) == list(json.loads(written))
    assert json.loads(shown)["format"] == read_format(tmp_path)
    assert shown.count("\n") == written.count("\n")


def test_every_flag_table_and_kind_of_the_code_is_on_the_page():
    flags = {name: int(number, 16) for number, name in re.findall(r"^\| `(\w\w)` \| ([A-Z_]+) \|", TEXT, re.MULTILINE)}
    in_code = {name: value for name, value in vars(rows).items() if name in flags or name.startswith("HAS_")}
    assert flags == in_code
    tables = re.findall(r"^\| `(\d\d)` \| ([a-z]+) \|", TEXT, re.MULTILINE)
    assert {(int(number), name.upper()) for number, name in tables} == {(table.value, table.name) for table in Table}
    kinds = {letter.encode() for letter in re.findall(r"^\| [\w -]+ \| `(\w)` \| ", TEXT, re.MULTILINE)}
    assert kinds == {value for value in vars(keys).values() if isinstance(value, bytes) and value.isalpha()}


@pytest.mark.parametrize(
    ("title", "record"),
    [
        (
            "Metadata",
            Metadata(
                3,
                TopicProperties(max_bytes=9),
                1,
                2,
                deleted_ms=3,
                partly_cleaned=True,
                floor_ms=4,
                creator="billing",
                set_aside=(SetAside(bytes(10), bytes(10), 1),),
                chain_end=ChainEnd(bytes(10), 1, bytes(32)),
                restored=bytes(10),
            ),
        ),
        ("High-water mark", HighWater(1, 2, 3, [[1, 2, 3, 4, 5]], 6, [0], bytes(10), 7)),
        ("Pointer", full_pending()),
        ("Reader", Reader(bytes(ID_BYTES), 1)),
        (
            "Producer",
            Producer("p", highest_transactional=0, retention_ms=1, recent=(Result(0, 0, bytes(10), bytes(10), 0),)),
        ),
        ("Producers", DeduplicationRecord(since=bytes(10), forgotten=bytes(10))),
        ("Namespace", NamespaceProperties()),
    ],
)
def test_every_key_of_a_record_is_on_the_page(title: str, record: Any):
    section = re.split(rf"^\*\*{title}\*\*", TEXT, flags=re.MULTILINE)[1].split("\n\n")[1]
    assert set(re.findall(r"^\| `(\w)` \|", section, re.MULTILINE)) == set(unpacked(record.encode()))


class ChainExample:
    """The steps of the example of a chain, and the rows they leave in the payload table."""

    def __init__(self) -> None:
        core, store = TopicCore(TopicState(TopicName("shop", "ledger"))), MemoryStore()
        won = PublishRequest([b"in 5", b"out 2"], producer="job", segment="a", sequence_ids=[0, 1])
        lost = PublishRequest([b"lost"], producer="job", segment="b", sequence_ids=[0])
        asks: list[tuple[Ask[Any], int]] = [
            (Create(TopicProperties(ttl_s=3600, chain="sha256")), 0),
            (Publish(PublishRequest([b"in 100", b"out 30"]), 32), 5),
            (StoreStaged(won, 9), 7),
            (StoreStaged(lost, 4), 8),
            (PublishStaged(PublishRequest([], producer="job", sequence_ids=[0], segments=["a"]), 0), 9),
        ]
        for ask, after_ms in asks:
            now = Now(CLOCK_MS + after_ms, 0.0)
            step = core.step([("ticket", ask)], now)
            store.apply(step.operations)
            ((_, answer),) = core.settled(step, now)
            assert not isinstance(answer, Exception), answer
        self._store = store

    def rows(self, pointers: bytes) -> list[tuple[bytes, bytes]]:
        """Return keys and values, as in LevelDB, of keys whose pointers begin with ``pointers``."""
        start = b"shop:ledger:" + struct.pack(">i", 1) + pointers
        found = self._store.tables[Table.PAYLOAD].walk(start, start + b"\xff" * 10, reverse=False)
        return [(bytes((Table.PAYLOAD,)) + key, value) for key, value in found]


def test_the_example_of_a_chain_is_what_a_chained_topic_writes_and_what_its_bytes_hash_to():
    entries = dumps(r"chain-\d")
    (digested,) = dumps("digested")
    shown = [(each["key"], each["value"] + each["link"] + each["record"]) for each in entries]
    assert shown == ChainExample().rows(bytes(8))
    before = bytes(32)
    for entry in entries:
        assert entry["link"] == hashlib.sha256(before + entry["key"][-10:] + entry["record"]).digest()
        before = entry["link"]
    record = msgpack.unpackb(entries[1]["record"])
    assert record["d"] == hashlib.sha256(digested["count"] + digested["item"]).digest()


def test_the_example_of_stored_messages_in_a_chain_is_what_is_written_and_what_its_bytes_hash_to():
    stored, (digested,) = dumps(r"linked-\d"), dumps("digested-stored")
    won, lost = ChainExample().rows(b"\xfe")[:-1], ChainExample().rows(b"\xfe")[-1]
    assert [(each["key"], each["value"]) for each in stored] == won
    assert lost[1].endswith(b"lost")
    before = bytes(32)
    for each in stored:
        assert each["link"] == hashlib.sha256(before + each["key"][-10:] + each["value"]).digest()
        before = each["link"]
    assert msgpack.unpackb(digested["says"])[-2:] == [[0], [[0, before]]]
    entry = dumps(r"chain-\d")[-1]
    assert digested["at"] == entry["key"][-10:]
    assert msgpack.unpackb(entry["record"])["d"] == hashlib.sha256(b"".join(digested.values())).digest()
