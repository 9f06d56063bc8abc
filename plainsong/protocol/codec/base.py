"""The interface of a codec: one encoding of the requests and answers of a topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from plainsong.protocol.ids import MAX_TIMESTAMP_MS, SEQUENCES_PER_MS
from plainsong.protocol.requests import PublishResponse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from plainsong.protocol.page import Page
    from plainsong.protocol.requests import PollRequest, PublishRequest, Receipt

#: A page is written in pieces, so that other requests wait about a millisecond at most. A piece ends with the message
#: that brings it to either bound. A long payload is several pieces.
PIECE_BYTES = 128 << 10
PIECE_MESSAGES = 1024


def cut(payload: bytes) -> Iterator[bytes]:
    """Yield the payload, cut if it is longer than a piece."""
    if len(payload) <= PIECE_BYTES:
        yield payload
        return
    for at in range(0, len(payload), PIECE_BYTES):
        yield payload[at : at + PIECE_BYTES]


#: Maximum number of messages in one request; with a byte each, they take fifty times the memory of the body.
MAX_MESSAGES = 1 << 20
#: The most values in all its lists and objects: four per message, the number that an item of JSON needs.
MAX_VALUES = 4 * MAX_MESSAGES


def gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join short pieces; an empty one, which only takes time to make, is passed on."""
    out: list[bytes] = []
    size = 0
    for piece in pieces:
        if not piece:
            yield piece
            continue
        out.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES or len(out) >= PIECE_MESSAGES:
            yield b"".join(out)
            out, size = [], 0
    if out:
        yield b"".join(out)


@dataclass(frozen=True, slots=True)
class PageOptions:
    """The client's choices of representation, in encodings that have any (JSON)."""

    payload_base64: bool = False
    """Every payload as ``{"base64": …}``, even if it is text."""
    longs_as_strings: bool = False
    """Write pointers as strings, for readers with numbers of 53 bits."""


#: The defaults.
DEFAULT_OPTIONS = PageOptions()


class Codec(Protocol):
    """One encoding, as the daemon uses it. Every ``decode_`` takes a whole body.

    They raise ``MalformedBody`` with the position or the field, or a more specific ``BadRequest``; nothing of the
    body has been used then. ``RequestTooLarge``: more than ``MAX_MESSAGES``. The ``encode_`` methods cannot fail.
    """

    @property
    def content_type(self) -> str:
        """The exact ``Content-Type`` of an answer."""
        ...

    @property
    def bounded(self) -> bool:
        """True if polls are pages; otherwise they are streamed to the end of the topic (Avro version 1)."""
        ...

    def decode_publish(self, body: bytes) -> PublishRequest:
        """The body of publish and store."""
        ...

    def decode_poll(self, body: bytes) -> PollRequest:
        """The body of poll."""
        ...

    def decode_rollback(self, body: bytes) -> PublishResponse:
        """The body of rollback: the answer to a publish. See ``rolls_back_all``."""
        ...

    def encode_publish_response(self, response: PublishResponse, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """The answer to a publish with a write pointer."""
        ...

    def encode_receipt(self, receipt: Receipt, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """The answer to a publish without a write pointer, if requested."""
        ...

    def encode_page(self, page: Page, options: PageOptions = DEFAULT_OPTIONS) -> bytes:
        """The whole answer to a poll."""
        ...

    def page_pieces(self, page: Page, options: PageOptions = DEFAULT_OPTIONS) -> Iterator[bytes]:
        """Yield the answer in pieces of about ``PIECE_BYTES``, encoded lazily; pieces may be empty."""
        ...


def rollback_of_all(write_pointer: int | None) -> PublishResponse:
    """A rollback of a whole pointer without a range: all its rows in the topic, and its stored messages."""
    return PublishResponse(write_pointer, 0, 0, MAX_TIMESTAMP_MS, SEQUENCES_PER_MS - 1)


def rolls_back_all(response: PublishResponse) -> bool:
    """True if this is a ``rollback_of_all``; no publish has such a range."""
    return response.end_timestamp_ms == MAX_TIMESTAMP_MS and response.start_timestamp_ms == 0
