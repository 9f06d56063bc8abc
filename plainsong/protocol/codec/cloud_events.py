"""CloudEvents 1.0.2 over HTTP: events as messages, and messages as events.

A message that arrived as an event has the event's data as its payload, and its other attributes as ``ce_id``,
``ce_source`` and so on; ``datacontenttype`` is ``content-type``, the name that other programs look for.
"""

from __future__ import annotations

import json
import re
from binascii import b2a_base64
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from urllib.parse import unquote_to_bytes

from plainsong.protocol.codec import json_values as values
from plainsong.protocol.codec.base import MAX_MESSAGES, PIECE_BYTES
from plainsong.protocol.codec.media import parse_accept, parse_media_type
from plainsong.protocol.errors import InvalidParameter, MalformedBody, RequestTooLarge, UnsupportedMediaType
from plainsong.protocol.ids import unpack_position
from plainsong.protocol.page import messages_of
from plainsong.protocol.requests import PublishRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from plainsong.protocol.page import Page

#: The cost of events, in publishes and pages, relative to plain JSON; and their overhead in bytes of JSON each.
TIMES_JSON = 8
BYTES_EACH = 1000
#: Events per piece of a page; see ``PIECE_MESSAGES``.
_PIECE_EVENTS = 64
EVENT_TYPE = "application/cloudevents+json"
BATCH_TYPE = "application/cloudevents-batch+json"
#: The modes of events in a request: one as JSON, many as JSON, or one as a body and headers.
Mode = Literal["structured", "batch", "binary"]
Kind = Literal["json", "text", "binary", "encoded"]
#: The longest content type to cache.
MAX_KNOWN = 100
REQUIRED = ("specversion", "id", "source", "type")
#: Any one of these headers makes a request an event in binary mode.
BINARY_MODE_HEADERS = frozenset(f"ce-{name}" for name in REQUIRED)
#: The id of the message, on every event of a poll.
ID_EXTENSION = "plainsongid"
#: The event type of a message that was not published as an event.
MESSAGE_TYPE = "plainsong.message"
VERSION = "1.0"
CONTENT_TYPE = "content-type"
_PREFIX = "ce_"
_NEEDED = "an event needs specversion, id, source and type"
_NAME = re.compile(r"[a-z0-9]+")
#: Attributes that are strings, and nothing else.
_STRINGS = frozenset({*REQUIRED, "datacontenttype", "dataschema", "subject", "time"})
#: Members of the envelope that cannot be names of attributes.
_NO_ATTRIBUTES = frozenset({"data", "datacontenttype"})
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TEXT_CHARSETS = ("utf-8", "utf8", "us-ascii")
#: Data of these types is not text, even where its bytes could be read as such.
_BINARY = re.compile(r"(image|audio|video|font)/|application/octet-stream")


def event_mode(headers: Mapping[str, str]) -> Mode | None:
    """Return the mode of a publish's events, from its headers (names in lower case); None if it has no events.

    Raises:
      UnsupportedMediaType: JSON in a charset other than UTF-8.
    """
    content_type = headers.get(CONTENT_TYPE, "")
    if "cloudevents" in content_type.lower():
        name, parameters = parse_media_type(content_type)
        if name in (EVENT_TYPE, BATCH_TYPE):
            charset = parameters.get("charset", "utf-8")
            if charset.lower() not in _TEXT_CHARSETS:
                raise UnsupportedMediaType(f"JSON in {charset[:40]!r}", hint="send JSON in UTF-8")
            return "structured" if name == EVENT_TYPE else "batch"
        if name.startswith("application/cloudevents"):
            return None  # an event in a format that is not read here
    return None if BINARY_MODE_HEADERS.isdisjoint(headers) else "binary"


def decode_events(mode: Mode, headers: Mapping[str, str], body: bytes) -> PublishRequest:
    """Decode the events in a publish request.

    Raises:
      InvalidParameter: an attribute is missing, or has a name or value that is not allowed.
      MalformedBody: the body is not JSON, or does not contain events. RequestTooLarge: more than ``MAX_MESSAGES``.
    """
    if mode == "binary":
        return PublishRequest([body], attributes=[_attributes_in_headers(headers)])
    value = values.parse_json(body)
    if mode == "structured":
        events = [values.as_object(value)]
    elif isinstance(value, list):
        events = value
    else:
        raise MalformedBody(f"the body is {values.kind_of(value)}, not a list", hint=f"one event is {EVENT_TYPE}")
    if len(events) > MAX_MESSAGES:
        raise RequestTooLarge(f"{len(events)} events", hint=f"send at most {MAX_MESSAGES} at a time")
    messages, attributes = [], []
    for index, (event, data) in enumerate(zip(events, _data_texts(body.decode(), events), strict=True)):
        where = "" if mode == "structured" else f"[{index}]."
        attributes.append(_attributes_in_event(event, where))
        messages.append(_data(event, data, where))
    return PublishRequest(messages, attributes=attributes)


# --- attributes ------------------------------------------------------------------------------------


def _attributes_in_headers(headers: Mapping[str, str]) -> dict[str, str]:
    found = {name[3:]: _header_value(name, value) for name, value in headers.items() if name.startswith("ce-")}
    for name in found.keys() & _NO_ATTRIBUTES:
        hint = "use Content-Type" if name == "datacontenttype" else "the body is the data"
        raise InvalidParameter(f"the header ce-{name} is not an attribute of an event", hint=hint)
    return _as_message(found, headers.get(CONTENT_TYPE) or None, "ce-")


def _header_value(name: str, value: str) -> str:
    """Decode a header's value: remove its quotes, and percent-decode it once."""
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    try:
        return unquote_to_bytes(value.encode("latin-1")).decode()
    except UnicodeError:
        raise InvalidParameter(f"the header {name[:80]} is not UTF-8", hint="percent-encode its UTF-8 bytes") from None


def _attributes_in_event(event: Mapping[str, Any], where: str) -> dict[str, str]:
    found = {}
    content_type = None
    for name, value in event.items():
        if value is None or name in ("data", "data_base64"):
            continue  # null counts as absent
        if name in _STRINGS and not isinstance(value, str):
            raise InvalidParameter(f"{where}{name} is {values.kind_of(value)}", hint="it is a string")
        text = _canonical(value, where + name)
        if name == "datacontenttype":
            content_type = text or _refuse_empty(where + name)
        else:
            found[name] = text
    return _as_message(found, content_type, where)


def _canonical(value: Any, name: str) -> str:
    """Return the text of an attribute's value: a string, a boolean or a number of 32 bits."""
    if isinstance(value, str):
        values.utf8(value, name[:80])
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and -(1 << 31) <= value < 1 << 31:
        return str(value)
    raise InvalidParameter(
        f"{name[:80]} is {values.kind_of(value)}", hint="attributes are strings, booleans, or whole numbers of 32 bits"
    )


def _as_message(found: Mapping[str, str], content_type: str | None, where: str) -> dict[str, str]:
    """Convert an event's attributes to those of a message. Raises InvalidParameter."""
    for name in REQUIRED:
        if not found.get(name):
            raise InvalidParameter(f"{where}{name} is missing", hint=_NEEDED)
    if found["specversion"] != VERSION:
        raise InvalidParameter(
            f"{where}specversion is {found['specversion'][:40]!r}", hint=(f"{VERSION} is supported here")
        )
    for name in found:
        if not _NAME.fullmatch(name):
            raise InvalidParameter(f"{where}{name[:80]} is not the name of an attribute", hint="use a to z and 0 to 9")
    for name in ("subject", "dataschema"):
        if found.get(name) == "":
            _refuse_empty(where + name)
    if "time" in found and not _is_time(found["time"]):
        raise InvalidParameter(f"{where}time is {found['time'][:40]!r}", hint="such as 2026-04-05T17:31:00Z (RFC 3339)")
    attributes = {_PREFIX + name: value for name, value in found.items()}
    if content_type is not None:
        attributes[CONTENT_TYPE] = content_type
    return attributes


def _refuse_empty(name: str) -> NoReturn:
    raise InvalidParameter(f"{name} is empty", hint="leave it out")


def _is_time(text: str) -> bool:
    text = text.upper()
    if not _TIME.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


# --- data ------------------------------------------------------------------------------------------


_decode = json.JSONDecoder().raw_decode
_SPACE = re.compile(r"[ \t\n\r]*")


def _data_texts(text: str, events: list[Any]) -> list[str | None]:
    """Return the ``data`` of each event, as written in a body that is known to be JSON.

    It is copied, not encoded again: ``1.10`` would become ``1.1``, and invalidate a signature over the data.
    """
    at = _skip(text, 0)
    if text[at] == "{":
        return [_data_text(text, at)[0]]
    found = []
    at = _skip(text, at + 1)
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            raise MalformedBody(f"[{index}] is {values.kind_of(event)}, not an event", hint='it starts with "{"')
        data, at = _data_text(text, at)
        found.append(data)
        at = _skip(text, _skip(text, at) + 1)  # after the comma
    return found


def _data_text(text: str, at: int) -> tuple[str | None, int]:
    """Return the text of ``data`` in the object that begins at ``at``, and the position after that object."""
    found = None
    at = _skip(text, at + 1)
    try:
        while text[at] != "}":
            name, at = _decode(text, at)
            start = _skip(text, _skip(text, at) + 1)
            _, end = _decode(text, start)
            if name == "data":
                found = text[start:end]
            at = _skip(text, end)
            if text[at] == ",":
                at = _skip(text, at + 1)
    except RecursionError:  # the stack is a few calls deeper here than when the body was first parsed
        raise MalformedBody("the body is nested too deeply") from None
    return found, at + 1


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None  # the pattern also matches the empty string
    return found.end()


def _data(event: Mapping[str, Any], text: str | None, where: str) -> bytes:
    """Return the event's data in bytes. Raises InvalidParameter."""
    encoded = event.get("data_base64")
    if encoded is not None:
        if text is not None:
            raise InvalidParameter(f"{where}data and {where}data_base64 exclude each other", hint="give one of them")
        if not isinstance(encoded, str):
            values.refuse(f"{where}data_base64", encoded, "a string")
        return values.binary(encoded, f"{where}data_base64")
    if text is None:
        return b""
    content_type = event.get("datacontenttype")
    kind = _kind(content_type)
    if kind == "json":
        return text.encode()
    data = event["data"]
    if data is None:
        return b""
    if not isinstance(data, str) or kind == "encoded":
        raise InvalidParameter(
            f"{where}data is {values.kind_of(data)}, and datacontenttype {str(content_type)[:80]!r}",
            hint="give the bytes as data_base64; data is JSON, or text in UTF-8",
        )
    return values.utf8(data, f"{where}data")


def _kind(content_type: str | None) -> Kind:
    """Classify data by its type: JSON (also without a type), text in UTF-8 or another charset, or bytes."""
    if content_type is None:
        return "json"
    # A long type is unlikely to recur, and must not fill the cache.
    return _kind_of_type(content_type) if len(content_type) <= MAX_KNOWN else _kind_of_type.__wrapped__(content_type)


@lru_cache(maxsize=256)
def _kind_of_type(content_type: str) -> Kind:
    name, parameters = parse_media_type(content_type)
    if name.endswith(("/json", "+json")):
        return "json"
    if parameters.get("charset", "utf-8").lower() not in _TEXT_CHARSETS:
        return "encoded"
    return "binary" if _BINARY.match(name) else "text"


# --- polls -----------------------------------------------------------------------------------------


def accepts_events(accept: str | None) -> bool:
    """True if an ``Accept`` header lists the type of event batches, at any position."""
    if not accept or "cloudevents-batch" not in accept.lower():
        return False
    return any(each.name == BATCH_TYPE for each in parse_accept(accept))


def events_pieces(page: Page, source: str, *, payload_base64: bool = False) -> Iterator[bytes]:
    """Encode the messages of a page as a batch of events, lazily, in pieces of about ``PIECE_BYTES``.

    Args:
      source: the ``source`` of messages that were not published as events.
      payload_base64: write all data as base64.
    """
    attributes = page.attributes
    none: Mapping[str, str] = {}
    out: list[str] = []
    size = 0
    before = "["
    for index, (message_id, payload) in enumerate(messages_of(page)):
        event = _event(message_id, payload, attributes.get(index, none), source, payload_base64=payload_base64)
        out.append(before + event)
        before = ","
        size += len(event)
        if size >= PIECE_BYTES or len(out) >= _PIECE_EVENTS:
            yield "".join(out).encode()
            out, size = [], 0
    yield ("".join(out) + ("[]" if before == "[" else "]")).encode()


def _event(
    message_id: bytes, payload: bytes, attributes: Mapping[str, str], source: str, *, payload_base64: bool
) -> str:
    content_type = attributes.get(CONTENT_TYPE) or None
    if _is_event(attributes):
        members = {
            name: value
            for key, value in attributes.items()
            if key.startswith(_PREFIX) and _may_stand(name := key.removeprefix(_PREFIX), value)
        }
        data = _member(payload, content_type, payload_base64=payload_base64)
    else:
        known = {
            "specversion": VERSION,
            "id": message_id.hex(),
            "source": source,
            "type": MESSAGE_TYPE,
            "time": _time_of(message_id),
        }
        members = {name: value for name, value in attributes.items() if _may_stand(name, value)} | known
        data = _member(payload, content_type, payload_base64=payload_base64)
        if content_type is None and data.startswith('"data_base64"') and not payload_base64:
            text = _member(payload, "text/plain", payload_base64=False)
            if text.startswith('"data"'):
                content_type, data = "text/plain", text
    if content_type is not None:
        members["datacontenttype"] = content_type
    members[ID_EXTENSION] = message_id.hex()
    head = values.compact(members)
    return f"{head[:-1]},{data}}}" if data else head


def _is_event(attributes: Mapping[str, str]) -> bool:
    """True if a message was published as an event, or has the attributes of one."""
    return attributes.get("ce_specversion") == VERSION and all(attributes.get(_PREFIX + name) for name in REQUIRED)


def _may_stand(name: str, value: str) -> bool:
    """True if an attribute is valid in an event; for an invalid one, readers would refuse the whole batch."""
    if not _NAME.fullmatch(name) or name in _NO_ATTRIBUTES:
        return False
    if name in ("subject", "dataschema"):
        return bool(value)
    return name != "time" or _is_time(value)


def _time_of(message_id: bytes) -> str:
    published_ms, _ = unpack_position(message_id[:10])
    text = (_EPOCH + timedelta(milliseconds=published_ms)).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"


def _member(payload: bytes, content_type: str | None, *, payload_base64: bool) -> str:
    """Return the payload as a member of an event: JSON unchanged, text as a string, anything else as base64."""
    if not payload:
        return ""
    if not payload_base64:
        try:
            text = payload.decode()
        except UnicodeDecodeError:
            pass
        else:
            kind = _kind(content_type)
            if kind == "json" and _is_json(text):
                return f'"data":{text}'
            if kind == "text":
                return f'"data":{encode_basestring(text)}'
    return f'"data_base64":"{b2a_base64(payload, newline=False).decode()}"'


_BEGINS_JSON = re.compile(r'[ \t\n\r]*["{\[0-9tfn-]')


def _is_json(text: str) -> bool:
    if not _BEGINS_JSON.match(text):
        return False  # true of most text, and much faster than the parser
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
