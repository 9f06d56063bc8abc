"""Pages written in pieces: the joined pieces equal the page, and no piece takes long."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.codec import FramesOptions, PageOptions, frames_pieces, gathered
from plainsong.protocol.codec.base import PIECE_BYTES
from plainsong.protocol.codec.cloud_events import events_pieces
from plainsong.protocol.codec.json import text_pieces
from plainsong.protocol.page import Page, item
from tests.codecs import AVRO, AVRO_2, JSON

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ID = bytes(4) + bytes(range(16))
#: Text with characters of one to four bytes, some of which get cut; and bytes that are not text.
LONG = {
    "text": b"x" * (3 * PIECE_BYTES + 1),
    "one byte, then four each": b"x" + "\N{MUSICAL SYMBOL G CLEF}".encode() * PIECE_BYTES,
    "one byte, then three each": b"x" + "\N{EURO SIGN}".encode() * PIECE_BYTES,
    "quotes and line ends": b'"\n' * PIECE_BYTES,
    "no text from its first byte on": b"\xff" * (2 * PIECE_BYTES + 2),
    "no text at its last byte": b"x" * (2 * PIECE_BYTES) + b"\xe2",
}
WRITERS: dict[str, Callable[[Page], Iterator[bytes]]] = {
    "avro": AVRO.page_pieces,
    "avro 2": AVRO_2.page_pieces,
    "json": JSON.page_pieces,
    "json, base64": lambda page: JSON.page_pieces(page, PageOptions(payload_base64=True)),
    "frames": lambda page: frames_pieces(page, FramesOptions()),
    "frames with every field": lambda page: frames_pieces(page, FramesOptions(pointers=True, attributes=True)),
    "events": lambda page: events_pieces(page, "/here"),
}


def page_of(*payloads: bytes) -> Page:
    items = [item(ID, payload) for payload in payloads]
    attributes = {0: {"color": "red"}} if payloads else {}
    return Page([b"".join(items)] if items else [], len(items), sum(map(len, items)), ID, attributes=attributes)


@pytest.mark.parametrize("writer", [name for name in WRITERS if name != "events"])
@pytest.mark.parametrize("what", LONG)
def test_no_piece_is_much_longer_than_its_limit(writer: str, what: str) -> None:
    for piece in WRITERS[writer](page_of(b"short", LONG[what], b"", LONG[what])):
        assert len(piece) <= 3 * PIECE_BYTES  # in JSON a line end takes two bytes, and base64 four for three


@pytest.mark.parametrize("writer", WRITERS)
def test_a_page_of_many_short_messages_is_many_pieces(writer: str) -> None:
    pieces = list(WRITERS[writer](page_of(*[b""] * 10_000)))
    assert len(pieces) > 1
    assert max(map(len, pieces)) <= 3 * PIECE_BYTES


@pytest.mark.parametrize("codec", [AVRO, AVRO_2, JSON])
@pytest.mark.parametrize("what", LONG)
def test_a_long_message_round_trips(codec: object, what: str) -> None:
    assert codec in (AVRO, AVRO_2, JSON)
    page = page_of(b"before", LONG[what], b"behind")
    found = codec.decode_page(b"".join(codec.page_pieces(page)))  # type: ignore[attr-defined]
    assert [message.payload for message in found] == [b"before", LONG[what], b"behind"]


@given(st.lists(st.binary(max_size=30)), st.booleans())
def test_a_page_in_json_is_the_same_however_it_is_split(payloads: list[bytes], payload_base64: bool) -> None:
    options = PageOptions(payload_base64=payload_base64)
    with pytest.MonkeyPatch.context() as patch:
        for short in (1, 3, 7):
            for name in ("base.PIECE_BYTES", "json.PIECE_BYTES", "json._BASE64_PIECE"):
                patch.setattr(f"plainsong.protocol.codec.{name}", max(3, short // 3 * 3) if "64" in name else short)
            cut = JSON.encode_page(page_of(*payloads), options)
            patch.undo()
            assert json.loads(cut) == json.loads(JSON.encode_page(page_of(*payloads), options))


@given(st.text())
def test_a_string_is_the_same_however_it_is_split(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plainsong.protocol.codec.json.PIECE_BYTES", 2)
        assert json.loads(b"".join(text_pieces(text))) == text


@given(st.lists(st.binary(max_size=3)))
def test_pieces_put_together_are_the_same_bytes(pieces: list[bytes]) -> None:
    assert b"".join(gathered(pieces)) == b"".join(pieces)
