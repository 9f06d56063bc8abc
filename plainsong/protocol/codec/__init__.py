"""Codecs, and how a request's headers select the one that reads it and writes its answer."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from plainsong.protocol.codec.avro import AVRO_END, Avro2Codec, AvroCodec, avro_block_pieces
from plainsong.protocol.codec.base import (
    DEFAULT_OPTIONS,
    Codec,
    PageOptions,
    gathered,
    rollback_of_all,
    rolls_back_all,
)
from plainsong.protocol.codec.json import JsonCodec
from plainsong.protocol.codec.media import (
    FramesOptions,
    accept_frames,
    frames_pieces,
    parse_media_type,
)
from plainsong.protocol.errors import UnsupportedMediaType

if TYPE_CHECKING:
    from typing import Final

__all__ = [
    "AVRO",
    "AVRO_2",
    "AVRO_END",
    "DEFAULT_OPTIONS",
    "JSON",
    "Codec",
    "FramesOptions",
    "PageOptions",
    "accept_frames",
    "avro_block_pieces",
    "codec_for",
    "frames_pieces",
    "gathered",
    "rollback_of_all",
    "rolls_back_all",
]
AVRO: Final = AvroCodec()
AVRO_2: Final = Avro2Codec()
JSON: Final = JsonCodec()
_CODECS: dict[tuple[str, str], Codec] = {
    ("avro/binary", "1"): AVRO,
    ("avro/binary", "2"): AVRO_2,
    ("application/json", "1"): JSON,
    ("application/json", "2"): JSON,
}
_CHARSETS = ("utf-8", "utf8", "us-ascii")
_READ_HERE = "avro/binary and application/json are accepted here"
_ADD_HEADER = "add the header Content-Type: application/json (or avro/binary)"
#: curl's default for ``--data``.
_CURL = "application/x-www-form-urlencoded"


@lru_cache(maxsize=64)
def codec_for(content_type: str | None) -> Codec:
    """The codec for a request's ``Content-Type``; the answer is written by the same one.

    Raises:
      UnsupportedMediaType: it is missing or not supported; the hint names the header to add.
    """
    if not content_type or not content_type.strip():
        raise UnsupportedMediaType(f"there is no Content-Type; {_READ_HERE}", hint=_ADD_HEADER)
    name, parameters = parse_media_type(content_type)
    version = parameters.get("version", "1")
    codec = _CODECS.get((name, version))
    if codec is None:
        raise _unsupported(name, version)
    charset = parameters.get("charset", "utf-8")
    if codec is JSON and charset.lower() not in _CHARSETS:
        raise UnsupportedMediaType(f"JSON in {charset[:40]!r}; {_READ_HERE}", hint="send JSON in UTF-8")
    return codec


def _unsupported(name: str, version: str) -> UnsupportedMediaType:
    if (name, "1") in _CODECS:
        detail = f"{name} has no version {version[:40]!r}; {_READ_HERE}"
        return UnsupportedMediaType(detail, hint="versions 1 (the default) and 2 are known")
    hint = _ADD_HEADER
    if name == _CURL:
        hint = "curl sends this type with --data unless told otherwise: add -H 'Content-Type: application/json'"
    return UnsupportedMediaType(f"{name[:80]!r} is not accepted; {_READ_HERE}", hint=hint)
