"""The codecs with a client's side for every encoding; the product's client sends and decodes only some of them.

Pages are decoded with fastavro and the standard library, independently of the codecs that wrote them.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from io import BytesIO
from typing import Any, NamedTuple

from fastavro import parse_schema, schemaless_reader

from plainsong.protocol import codec
from plainsong.protocol.codec import FramesOptions, frames_pieces
from plainsong.protocol.codec.avro import Avro2Codec, AvroCodec
from plainsong.protocol.codec.json import JsonCodec
from plainsong.protocol.page import Page
from plainsong.protocol.requests import PublishRequest, PublishResponse, Receipt

#: The Avro schemas of a page, of version 1 and 2. The codec writes pages without a schema.
_BYTES = [{"name": name, "type": "bytes"} for name in ("id", "payload")]
_ATTRIBUTES = {"name": "attributes", "type": {"type": "map", "values": "string"}}
PAGE = parse_schema({"type": "array", "items": {"type": "record", "name": "Message", "fields": _BYTES}})
PAGE_2 = parse_schema(
    {"type": "array", "items": {"type": "record", "name": "Message", "fields": [*_BYTES, _ATTRIBUTES]}}
)
_PUBLISH = {
    "transactionWritePointer": "write_pointer",
    "ttlSeconds": "ttl_s",
    "producer": "producer",
    "producerEpoch": "producer_epoch",
    "generation": "generation",
    "sequenceIds": "sequence_ids",
    "atomic": "atomic",
    "routingKey": "routing_key",
    "segment": "segment",
    "segments": "segments",
    "messageTtlsSeconds": "message_ttls_s",
    "attributes": "attributes",
}


class Message(NamedTuple):
    """A message in a decoded page."""

    message_id: bytes
    payload: bytes
    attributes: Mapping[str, str]


class Avro(AvroCodec):
    def decode_receipt(self, body: bytes) -> Receipt:
        return AVRO_2.decode_receipt(body)

    def decode_page(self, body: bytes) -> list[Message]:
        return [Message(each["id"], each["payload"], {}) for each in by_fastavro(PAGE, body)]


class Avro2(Avro2Codec):
    def decode_page(self, body: bytes) -> list[Message]:
        return [Message(each["id"], each["payload"], each["attributes"]) for each in by_fastavro(PAGE_2, body)]


class Json(JsonCodec):
    def decode_publish_response(self, body: bytes) -> PublishResponse:
        assert "startTimestamp" in json.loads(body)  # without any of the range it would be a rollback of everything
        return self.decode_rollback(body)

    def encode_publish(self, request: PublishRequest) -> bytes:
        found = {key: getattr(request, name) for key, name in _PUBLISH.items()}
        out = {key: value for key, value in found.items() if value is not None}
        if request.sequence_ids is not None:
            out["sequenceIds"] = list(request.sequence_ids)
        if request.attributes is not None:
            out["attributes"] = [dict(each) for each in request.attributes]
        out["messages"] = [_json_payload(each) for each in request.messages]
        return json.dumps(out, ensure_ascii=False).encode()

    def decode_receipt(self, body: bytes) -> Receipt:
        found = json.loads(body)
        first_id, last_id = (
            None if found[each] is None else bytes.fromhex(found[each]) for each in ("firstId", "lastId")
        )
        return Receipt(
            first_id,
            last_id,
            found["generation"],
            found["duplicate"],
            found["deduplicated"],
            found["lastSequenceId"],
            found.get("stored"),
            found.get("dropped"),
        )

    def decode_page(self, body: bytes) -> list[Message]:
        return [
            Message(bytes.fromhex(each["id"]), _payload(each["payload"]), each.get("attributes", {}))
            for each in json.loads(body)
        ]


AVRO, AVRO_2, JSON = Avro(), Avro2(), Json()
_BY_TYPE: Mapping[str, Avro | Avro2 | Json] = {each.content_type: each for each in (AVRO, AVRO_2, JSON)}


def codec_for(content_type: str) -> Avro | Avro2 | Json:
    """Return the codec of an answer."""
    return _BY_TYPE[codec.codec_for(content_type).content_type]


def by_fastavro(schema: Any, body: bytes) -> Any:
    """Decode a body that is one value of a schema."""
    left = BytesIO(body)
    found = schemaless_reader(left, schema, None)
    assert left.read() == b""
    return found


def encode_frames(page: Page, options: FramesOptions) -> bytes:
    return b"".join(frames_pieces(page, options))


def _json_payload(raw: bytes) -> str | dict[str, str]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(raw).decode()}


def _payload(given: str | dict[str, str]) -> bytes:
    return given.encode() if isinstance(given, str) else b64decode(given["base64"])
