"""The example of the layout in HBase in docs/format.md matches the code, byte by byte."""

from __future__ import annotations

import re
from pathlib import Path

from plainsong.protocol.keys import generation_prefix, metadata_key, pointer_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import MessageRow, decode_row, encode_row
from storage.hbase.cells import SlotPair, cell_of, slot_of, value_in
from storage.hbase.layout import (
    CELL,
    PRESENT,
    Head,
    Stamp,
    hashed,
    pack,
    removing_columns,
    rolling_column,
    unpack,
)

NAME = TopicName("shop", "orders")
OWNER, BEFORE = Stamp(9, 3), Stamp(4, 12)
POINTER = 1_480_000_000_000_000_001
KEYS = [generation_prefix(NAME, 1) + position.to_bytes(10, "big") for position in (0x1580000, 0x1580001)]
VALUES = [encode_row(MessageRow(b"one", POINTER)), encode_row(MessageRow(b"two"))]


def example() -> dict[str, bytes]:
    """Return the rows of the page's example as the code writes them."""
    (packed,) = pack(KEYS, VALUES, OWNER, 1000)
    return {
        "head row": hashed(metadata_key(NAME)),
        "d:h": Head(OWNER, BEFORE).encode(),
        "message row": hashed(packed.key),
        "d:v": packed.cell,
        "rolled": rolling_column(packed.cell, POINTER, KEYS[0], KEYS[0]),
        "removed": removing_columns(packed.cell, KEYS, {KEYS[1]})[0],
        "pointer row": pointer_key(NAME, 1, POINTER),
        "d:a": slot_of(Stamp(9, 2), b"old"),
        "d:b": slot_of(OWNER, b"new"),
        "gone": slot_of(Stamp(9, 4), None),
        "plain": cell_of(9, b"value"),
    }


def test_the_example_of_the_page_is_what_the_code_writes():
    page = (Path(__file__).parents[2] / "docs/format.md").read_text(encoding="utf-8")
    section = page.split("\n## HBase\n")[1].split("\n## ")[0]
    shown = dict(re.findall(r"^([a-z:]+(?: row)?) +((?:[0-9a-f]{2} ?)+)$", section, re.MULTILINE))
    assert {name: bytes.fromhex(text) for name, text in shown.items()} == example()


def test_the_example_says_what_the_page_says_of_it():
    shown = example()
    columns = {CELL: shown["d:v"], shown["rolled"]: PRESENT, shown["removed"]: PRESENT}
    (row,) = unpack(shown["message row"][1:], columns)
    assert decode_row(row[1]) == MessageRow(b"one", -POINTER)
    head = Head.decode(shown["d:h"], {})
    assert SlotPair(shown["d:a"], shown["d:b"]).value(head) == b"new"
    assert SlotPair(shown["gone"], shown["d:b"]).value(head) == b"new"
    assert SlotPair(shown["gone"], shown["d:b"]).value(head.committed()) is None
    assert value_in(shown["plain"]) == b"value"
