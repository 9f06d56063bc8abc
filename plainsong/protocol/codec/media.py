"""Media types of ``Content-Type`` and ``Accept`` headers, and pages written as frames for clients that accept them."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from plainsong.protocol.codec.base import PIECE_BYTES, PIECE_MESSAGES, cut
from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.frames import FRAMES_END, FRAMES_TYPE, NO_ATTRIBUTES_PACKED
from plainsong.protocol.page import messages_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from plainsong.protocol.page import Page

#: Splits at commas or semicolons outside of quotes.
_RANGES = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*+"?)+')
_PARTS = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.)*+"?)+')


class MediaType(NamedTuple):
    """One media type."""

    name: str
    """``type/subtype``, lower case."""
    parameters: dict[str, str]
    """Names in lower case, values without quotes; of a repeated parameter the last."""


def parse_media_type(header: str) -> MediaType:
    """The media type in a header; malformed parameters are ignored."""
    name, *parts = _PARTS.findall(header) or [""]
    parameters = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if equals:
            parameters[key.strip().lower()] = _unquoted(value.strip())
    return MediaType(name.strip().lower(), parameters)


def parse_accept(header: str) -> list[MediaType]:
    """The types of an ``Accept`` list that are not refused (``q=0``), in the order given."""
    accepted = [parse_media_type(each) for each in _RANGES.findall(header)]
    return [each for each in accepted if not _refused(each.parameters.pop("q", "1"))]


def _refused(quality: str) -> bool:
    try:
        return float(quality) <= 0
    except ValueError:
        return False


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value


# --- frames: ``plainsong.protocol.frames`` has the format ------------------------------------------


_SIZE = struct.Struct(">I")
_POINTER_AND_SIZE = struct.Struct(">qI")
#: The cost of a message in addition to its payload, in bytes of payload.
_OVERHEAD_BYTES = PIECE_BYTES // PIECE_MESSAGES


@dataclass(frozen=True, slots=True)
class FramesOptions:
    """The optional fields of frames."""

    pointers: bool = False
    """Each message's write pointer (``fields=pointer``)."""
    attributes: bool = False
    """Each message's attributes (``version=2``)."""

    @property
    def content_type(self) -> str:
        """The exact ``Content-Type`` of the answer."""
        return FRAMES_TYPE + "; version=2" * self.attributes + "; fields=pointer" * self.pointers


def accept_frames(accept: str | None) -> FramesOptions | None:
    """The frames that an ``Accept`` header lists, in any position; None if it lists none.

    Raises:
      InvalidParameter: it lists frames with unsupported parameters only.
    """
    if not accept or FRAMES_TYPE not in accept.lower():
        return None
    refused = None
    for name, parameters in parse_accept(accept):
        if name == FRAMES_TYPE:
            fields, version = parameters.get("fields", ""), parameters.get("version", "1")
            if fields in ("", "pointer") and version in ("1", "2"):
                return FramesOptions(pointers=fields == "pointer", attributes=version == "2")
            refused = f"frames with fields={fields[:40]!r} and version={version[:40]!r} are not supported here"
    if refused:
        raise InvalidParameter(refused, hint="use fields=pointer and version=1 or 2")
    return None


def frames_pieces(page: Page, options: FramesOptions) -> Iterator[bytes]:
    """A page as frames, in pieces of about ``PIECE_BYTES``, each made on demand."""
    if options.pointers or (options.attributes and page.attributes):
        frames = _rich(page, options)
    else:
        frames = _plain(page, NO_ATTRIBUTES_PACKED if options.attributes else b"")
    yield from frames
    yield FRAMES_END + _SIZE.pack(page.count)


def _plain(page: Page, tail: bytes) -> Iterator[bytes]:
    """Messages with only id and payload; ``tail`` follows each."""
    out: list[bytes] = []
    bytes_out = 0
    last_size = -1
    head = b""
    for message_id, payload in messages_of(page):
        size = len(payload)
        if size != last_size:  # sizes often repeat
            head = _SIZE.pack(size)
            last_size = size
        out += (message_id, head, payload, tail)
        bytes_out += size + _OVERHEAD_BYTES
        if bytes_out >= PIECE_BYTES:
            yield from _pieces(out, bytes_out)
            out, bytes_out = [], 0
    yield b"".join(out)


def _rich(page: Page, options: FramesOptions) -> Iterator[bytes]:
    pointers = page.pointers
    out: list[bytes] = []
    bytes_out = 0
    for index, (message_id, payload) in enumerate(messages_of(page)):
        size = len(payload)
        head = _POINTER_AND_SIZE.pack(pointers.get(index, 0), size) if options.pointers else _SIZE.pack(size)
        out += (message_id, head, payload)
        if options.attributes:
            out.append(_attributes(page.attributes.get(index)))
        bytes_out += size + _OVERHEAD_BYTES
        if bytes_out >= PIECE_BYTES:
            yield from _pieces(out, bytes_out)
            out, bytes_out = [], 0
    yield b"".join(out)


def _pieces(parts: list[bytes], size: int) -> Iterator[bytes]:
    """Parts as one piece; those of a long payload in several."""
    if size <= 2 * PIECE_BYTES:
        yield b"".join(parts)
        return
    for part in parts:
        yield from cut(part)


def _attributes(attributes: Mapping[str, str] | None) -> bytes:
    if not attributes:
        return NO_ATTRIBUTES_PACKED
    packed: bytes = msgpack.packb(dict(attributes))
    return _SIZE.pack(len(packed)) + packed
