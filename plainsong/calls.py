"""The HTTP calls of a client: how each request is built, how its answer is decoded, and whether it may be repeated."""

from __future__ import annotations

import json
from base64 import b64decode
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import quote, urlencode

from plainsong.errors import problem_error
from plainsong.loading import load
from plainsong.messages import BatchPlace, Message, MessageId, Origin, Page, Receipt, Seen, TopicOptions
from plainsong.protocol.codec import AVRO, AVRO_2, JSON
from plainsong.protocol.errors import MalformedBody, NotFound, PlainsongError, nearest
from plainsong.protocol.frames import FRAMES_TYPE, decode_frames
from plainsong.protocol.ids import pack_id
from plainsong.protocol.names import instance_name, namespace_name, reader_name, topic_name
from plainsong.protocol.page import Held
from plainsong.protocol.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from plainsong.chains import ChainHead
    from plainsong.protocol.answers.messages import ReaderRow
    from plainsong.protocol.answers.service import ClusterView, FindingRow, ReplicationState
    from plainsong.protocol.answers.topics import (
        ChainPage,
        ChangeReport,
        DeletedTopic,
        DrainReport,
        History,
        NamespaceDescription,
        Offsets,
        ProducerList,
        ProducerState,
        TopicPage,
        TopicStats,
        UndeletedTopic,
    )
    from plainsong.protocol.codec.avro import Avro2Codec, AvroCodec
    from plainsong.protocol.requests import Isolation, PollRequest, PublishRequest

T = TypeVar("T")
C = TypeVar("C", covariant=True)


class Request(NamedTuple):
    """One HTTP request, without its server."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


class Answer(NamedTuple):
    """A complete answer. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Failure(NamedTuple):
    """A request without a complete answer."""

    kind: Literal["connect", "lost", "timeout"]
    """``connect``: nothing was sent. ``lost``, ``timeout``: the daemon may have executed the request."""
    detail: str
    cause: Exception | None = None


class StopsRequests(Protocol):
    """Lets another thread end requests of the synchronous client."""

    def watch(self, connection: Any) -> None:
        """Set the connection to close on a stop; None if there is none."""
        ...


class Send(NamedTuple):
    """A request to ``url``. ``timeout_s`` limits the whole exchange, unless ``longest_s`` extends it."""

    url: str
    request: Request
    connect_timeout_s: float
    timeout_s: float
    stop: StopsRequests | None = None
    """Can end the request early; None if nothing can."""
    longest_s: float | None = None
    """If set, each piece of the response restarts ``timeout_s``, up to this many seconds in total."""


#: The effect of a second attempt: none (``reading``), the same state (``harmless``), or a second change (``twice``).
Repeat = Literal["reading", "harmless", "twice"]


class Call(NamedTuple, Generic[C]):
    """A request, the decoder of its answer, and the effect of sending it again."""

    request: Request
    read: Callable[[Answer], C]
    repeat: Repeat = "reading"
    wait_s: float = 0.0
    """Seconds that the daemon may wait before it responds; extends every time limit."""
    waits_for_service: bool = False
    """Retry while the transaction service is unavailable: True inside a transaction, which proves that it was running."""
    again: Callable[[PlainsongError], Call[Any] | None] | None = None
    """Called after each failed attempt; returns the call to send instead, or None to send the same again."""
    in_pieces: bool = False
    """The time limit applies to the gap between two pieces of the response, not to the whole."""


def transaction_service() -> Request:
    """``GET /readyz``, answered 200 or 503 with the same fields; ``service_of`` reads it."""
    return Request("GET", "/readyz")


def service_of(answer: Answer | Failure) -> str:
    """Return the transaction service: ``embedded``, ``tephra`` or ``off``; empty if the response does not name it."""
    if isinstance(answer, Failure):
        return ""
    try:
        return str(json_of(answer)["transactions"]["service"])
    except (ValueError, KeyError, TypeError):
        return ""


def waiting_for_service(call: Call[T]) -> Call[T]:
    """Return the same call, retried while the transaction service is unavailable."""
    return call._replace(waits_for_service=True)


_JSON = (("Content-Type", "application/json"),)


_RECEIPT = ("Prefer", "return=representation")


def namespace_path(namespace: str) -> str:
    """Raises InvalidName."""
    return f"/v1/namespaces/{namespace_name(namespace)}"


def topic_path(namespace: str, topic: str, rest: str = "") -> str:
    """Raises InvalidName."""
    topic_name(namespace, topic)
    return f"/v1/namespaces/{namespace}/topics/{topic}{rest}"


def json_of(answer: Answer) -> Any:
    """The body as JSON. Raises ValueError."""
    return json.loads(answer.body)


def nothing(answer: Answer) -> None:
    """Reads an answer without a body."""


def as_json(value: Any) -> bytes:
    """Encodes a request body."""
    return json.dumps(value, separators=(",", ":")).encode()


# --- topics --------------------------------------------------------------------------------------


#: Keyword arguments → properties as the daemon names them.
_PROPERTIES = {name: "ttl" if name == "ttl_s" else name for name in TopicOptions.__annotations__}


def checked_properties(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keyword arguments to the daemon's form: ``ttl_s`` becomes ``ttl``. Raises TypeError: an unknown one."""
    for name in properties:
        if name not in _PROPERTIES:
            says = "did you mean 'ttl_s'?" if name == "ttl" else nearest(name, _PROPERTIES)
            raise TypeError(f"unexpected keyword argument {name!r}; {says}")
    return {_PROPERTIES[name]: value for name, value in properties.items()}


def changed_properties(current: Mapping[str, str], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return all properties after a change of some, in the daemon's form; None restores a default."""
    kept = {name: value for name, value in current.items() if name in _PROPERTIES.values()}
    return {name: value for name, value in {**kept, **changes}.items() if value is not None}


def create_topic(namespace: str, topic: str, properties: Mapping[str, Any], *, if_not_exists: bool) -> Call[None]:
    """``PUT /{t}``. Repeated after an unknown outcome only with ``if_not_exists``, where an existing topic is not an error."""
    path = topic_path(namespace, topic, "?ifNotExists=true" if if_not_exists else "")
    return Call(Request("PUT", path, _JSON, as_json(properties)), nothing, "harmless" if if_not_exists else "twice")


def set_properties(
    namespace: str, topic: str, properties: Mapping[str, Any], if_match: str | None = None
) -> Call[ChangeReport]:
    """``PUT /{t}/properties``, answered with its effects."""
    headers = _JSON if if_match is None else (*_JSON, ("If-Match", if_match))
    path = topic_path(namespace, topic, "/properties")
    return Call(Request("PUT", path, headers, as_json(properties)), effect_of, "harmless")


def is_changed(current: Mapping[str, str], given: Mapping[str, Any]) -> bool:
    """True if setting ``given`` would change anything."""
    kept = {name: value for name, value in current.items() if name in _PROPERTIES.values()}
    return kept != {name: str(value) for name, value in given.items()}


def describe_topic(namespace: str, topic: str) -> Call[dict[str, str]]:
    """``GET /{t}``."""
    return Call(Request("GET", topic_path(namespace, topic)), _properties)


def describe_topic_state(namespace: str, topic: str) -> Call[tuple[dict[str, str], str | None]]:
    """``GET /{t}``, with its etag; None if the daemon has version 0.1."""

    def read(answer: Answer) -> tuple[dict[str, str], str | None]:
        return _properties(answer), answer.headers.get("etag")

    return Call(Request("GET", topic_path(namespace, topic)), read)


def _properties(answer: Answer) -> dict[str, str]:
    """Accepts both forms in which daemons answer properties."""
    found = json_of(answer)
    properties = found["properties"] if isinstance(found.get("properties"), dict) else found
    return {str(key): str(value) for key, value in properties.items()}


def list_topics(namespace: str) -> Call[list[str]]:
    """``GET`` of all topic names, sorted."""
    return Call(Request("GET", namespace_path(namespace) + "/topics"), list_of(str))


def deleted_topics(namespace: str) -> Call[list[DeletedTopic]]:
    """``GET`` of the deleted topics, by name."""
    return Call(Request("GET", namespace_path(namespace) + "/topics?deleted=true"), list_of(dict))


def topics_page(query: Mapping[str, Any]) -> Call[TopicPage]:
    """``GET /v1/topics``: a page of the topics of all namespaces."""
    given = {name: value for name, value in query.items() if value is not None}
    return Call(Request("GET", "/v1/topics" + ("?" + urlencode(given) if given else "")), object_of)


def topic_history(namespace: str, topic: str) -> Call[History]:
    """``GET /{t}/history``."""
    return Call(Request("GET", topic_path(namespace, topic, "/history")), object_of)


def attention() -> Call[list[FindingRow]]:
    """``GET /v1/attention``."""
    return Call(Request("GET", "/v1/attention"), list_of(dict))


def replication() -> Call[ReplicationState]:
    """``GET /v1/replication``."""
    return Call(Request("GET", "/v1/replication"), object_of)


def events_path(namespace: str, topics: Iterable[str], kinds: Iterable[str]) -> str:
    """``GET /v1/events`` of these topics, each ``topic`` or ``namespace:topic``.

    Without kinds: all of them, but ``topics`` only if topics are given.

    Raises:
      InvalidName.
    """
    named = []
    for each in topics:
        where, colon, topic = each.partition(":")
        named.append(str(topic_name(where, topic) if colon else topic_name(namespace, each)))
    wanted = list(kinds) or [*(["topics"] if named else []), "transactions", "attention", "cluster"]
    query = {"topics": ",".join(named), "kinds": ",".join(wanted)}
    return "/v1/events?" + urlencode({name: value for name, value in query.items() if value}, safe=":,")


def dry_run(call: Call[Any]) -> Call[ChangeReport]:
    """Return the call as a dry run, answered with its effects; it changes nothing."""
    request = call.request
    path = request.path + ("&" if "?" in request.path else "?") + "dryRun=true"
    return Call(request._replace(path=path), object_of)


def object_of(answer: Answer) -> Any:
    """Return the body, an object, typed as the call's answer. Raises ValueError, TypeError."""
    return dict(json_of(answer))


def list_of(read: Callable[[Any], Any]) -> Callable[[Answer], Any]:
    """Return a function that reads a body which is a list, each entry by ``read``, typed as the call's answer."""
    return lambda answer: [read(each) for each in json_of(answer)]


def effect_of(answer: Answer) -> Any:
    """Return the effects of a change, typed as the call's answer; empty from a daemon of 0.1."""
    return object_of(answer) if answer.body else {}


def delete_topic(namespace: str, topic: str, if_match: str | None = None) -> Call[ChangeReport]:
    """``DELETE /{t}``, answered with its effects."""
    headers = () if if_match is None else (("If-Match", if_match),)
    return Call(Request("DELETE", topic_path(namespace, topic), headers), effect_of, "twice")


def undelete_topic(namespace: str, topic: str) -> Call[UndeletedTopic]:
    """``POST /{t}/undelete``, answered with the topic and the effects."""
    return Call(Request("POST", topic_path(namespace, topic, "/undelete")), effect_of, "twice")


def set_aside(namespace: str, topic: str, first: str, last: str) -> Call[ChangeReport]:
    """``POST /{t}/set-aside``; doing it again finds nothing."""
    body = as_json({"from": first, "to": last})
    return Call(Request("POST", topic_path(namespace, topic, "/set-aside"), _JSON, body), effect_of, "twice")


def chain_head(namespace: str, topic: str) -> Call[ChainHead]:
    """``GET /{t}/chain``."""

    from plainsong.chains import ChainHead

    def read(answer: Answer) -> ChainHead:
        return ChainHead.of(json_of(answer))

    return Call(Request("GET", topic_path(namespace, topic, "/chain")), read)


def chain_entries(namespace: str, topic: str, after: str | None, *, messages: bool) -> Call[ChainPage]:
    """``GET /{t}/chain/entries``: a page of the entries and messages that a verification needs."""
    query = urlencode({"messages": str(messages).lower()} | ({} if after is None else {"after": after}))
    return Call(Request("GET", topic_path(namespace, topic, "/chain/entries?" + query)), object_of)


def topic_stats(namespace: str, topic: str, reader: str | None = None) -> Call[TopicStats]:
    """``GET /{t}/stats``."""
    query = "?" + urlencode({"reader": reader}) if reader is not None else ""
    return Call(Request("GET", topic_path(namespace, topic, "/stats" + query)), object_of)


def topic_offsets(namespace: str, topic: str, bounds: Mapping[str, Any]) -> Call[Offsets]:
    """``POST /{t}/offsets``: where a bounded read would end."""
    return Call(Request("POST", topic_path(namespace, topic, "/offsets"), _JSON, as_json(bounds)), object_of)


# --- readers -------------------------------------------------------------------------------------


def reader_path(namespace: str, topic: str, reader: str) -> str:
    """Raises InvalidName."""
    return topic_path(namespace, topic, "/readers/" + reader_name(reader))


def list_readers(namespace: str, topic: str) -> Call[list[ReaderRow]]:
    """``GET /{t}/readers``."""
    return Call(Request("GET", topic_path(namespace, topic, "/readers")), list_of(dict))


def show_reader(namespace: str, topic: str, reader: str) -> Call[ReaderRow]:
    """``GET /{t}/readers/{name}``."""
    return Call(Request("GET", reader_path(namespace, topic, reader)), object_of)


def set_reader(
    namespace: str, topic: str, reader: str, position: bytes, *, compare: bool = False, expected: bytes | None = None
) -> Call[None]:
    """``PUT /{t}/readers/{name}``; with ``compare`` only if its position is ``expected`` (None: if it does not exist)."""
    body: dict[str, Any] = {"position": position.hex()}
    if compare:
        body["expected"] = None if expected is None else expected.hex()
    return Call(Request("PUT", reader_path(namespace, topic, reader), _JSON, as_json(body)), nothing, "harmless")


def delete_reader(namespace: str, topic: str, reader: str) -> Call[None]:
    """``DELETE /{t}/readers/{name}``."""
    return Call(Request("DELETE", reader_path(namespace, topic, reader)), nothing, "twice")


def position_of(shown: Mapping[str, Any]) -> MessageId:
    """The position in an answer of ``show_reader``. Raises KeyError, InvalidMessageId."""
    return MessageId(str(shown["position"]))


def checked_position(position: bytes | str) -> MessageId:
    """Raises InvalidMessageId."""
    return MessageId(position)


def is_missing_reader(error: NotFound) -> bool:
    """True if a 404 is about the reader, not its topic."""
    return error.code == NotFound.code


# --- publish -------------------------------------------------------------------------------------


def publish(namespace: str, topic: str, request: PublishRequest, *, retry_unknown: bool = False) -> Call[Receipt]:
    """``POST /{t}/publish``, answered with a receipt. Prefers codec version 1, which the daemon decodes faster."""
    codec = avro_of(request)
    count = len(request.messages)

    def read(answer: Answer) -> Receipt:
        return read_receipt(answer, count)

    path = topic_path(namespace, topic, "/publish")
    headers = (("Content-Type", codec.content_type), _RECEIPT)
    return Call(
        Request("POST", path, headers, codec.encode_publish(request)), read, "harmless" if retry_unknown else "twice"
    )


def avro_of(request: PublishRequest) -> AvroCodec | Avro2Codec:
    """Return the codec for a publish or a store: version 1 if possible, since the daemon decodes it faster."""
    load("fastavro")
    return AVRO if is_plain(request) else AVRO_2


def is_plain(request: PublishRequest) -> bool:
    """True if codec version 1 has a field for everything in the request."""
    return (
        request.ttl_s is None
        and request.message_ttls_s is None
        and request.producer is None
        and request.generation is None
        and not request.atomic
        and request.routing_key is None
        and request.segment is None
        and request.segments is None
        and request.attributes is None
    )


def read_receipt(answer: Answer, count: int) -> Receipt:
    """The receipt in an answer. Raises MalformedBody."""
    if not answer.body:
        raise MalformedBody("the receipt is missing")
    fields = AVRO_2.decode_receipt(answer.body)
    return Receipt(
        None if fields.first_id is None else MessageId(fields.first_id),
        None if fields.last_id is None else MessageId(fields.last_id),
        count,
        fields.generation,
        fields.duplicate,
        fields.deduplicated,
        fields.last_sequence_id,
        fields.stored,
        fields.dropped,
    )


# --- polls ---------------------------------------------------------------------------------------


_POLL_HEADERS = (("Content-Type", AVRO_2.content_type), ("Accept", FRAMES_TYPE + "; version=2"))


_ENDS = ("end", "more", "held")


def poll(namespace: str, origin: Origin, request: PollRequest) -> Call[Page[Any]]:
    """``POST /{t}/poll``, answered with frames."""
    load("fastavro")
    body = AVRO_2.encode_poll(request)
    path = topic_path(namespace, origin.topic, "/poll")
    if request.as_of_ms is not None:
        path += f"?as_of_ms={request.as_of_ms}"  # Avro's schema has no field for it
    return Call(
        Request("POST", path, _POLL_HEADERS, body), partial(_read_page, origin), wait_s=(request.wait_ms or 0) / 1000
    )


def _read_page(origin: Origin, answer: Answer) -> Page[Any]:
    content_type = answer.headers.get("content-type", "")
    if not content_type.startswith(FRAMES_TYPE):
        raise MalformedBody(f"expected frames, got {content_type[:80]!r}")
    messages = decode_frames(answer.body, partial(Message, origin), attributes="version=2" in content_type)
    end = answer.headers.get("plainsong-end", "end")
    if end not in _ENDS:
        raise MalformedBody(f"Plainsong-End is {end[:20]!r}")
    last_id = answer.headers.get("plainsong-last-id")
    held = _held(answer.headers) if end == "held" else None
    set_aside = int(answer.headers.get("plainsong-set-aside", 0))
    return Page(messages, None if last_id is None else MessageId(last_id), end, held, set_aside)  # type: ignore[arg-type] # checked


def _held(headers: Mapping[str, str]) -> Held | None:
    """The transaction that blocks the poll, from the answer's headers."""
    if "plainsong-held-by" not in headers:
        return None
    return _held_by(
        headers["plainsong-held-by"], headers.get("plainsong-held-since"), headers.get("plainsong-hidden-messages")
    )


def _held_by(pointer: int | str, since_ms: int | str | None, hidden: int | str | None) -> Held:
    counted = None if hidden is None else str(hidden)
    return Held(
        int(pointer),
        None if since_ms is None else int(since_ms),
        None if counted is None else int(counted.rstrip("+")),
        counted is not None and counted.endswith("+"),
    )


def poll_many(
    namespace: str,
    origins: Mapping[str, Origin],
    topics: Mapping[str, PollRequest],
    *,
    wait_ms: int,
    limit: int,
    max_bytes: int | None = None,
    isolation: Isolation | None = None,
) -> Call[dict[str, Page[Any] | PlainsongError]]:
    """``POST /poll`` of a namespace: a page or an error for each topic."""
    polls = {topic: json.loads(JSON.encode_poll(_without_isolation(request))) for topic, request in topics.items()}
    more = {"maxBytes": max_bytes, "isolation": isolation}
    given = {name: value for name, value in more.items() if value is not None}
    body = as_json({"topics": polls, "waitMs": wait_ms, "limit": limit} | given)

    def read(answer: Answer) -> dict[str, Page[Any] | PlainsongError]:
        fields = json_of(answer)["topics"]
        return {topic: _page_of_many(origins[topic], fields[topic]) for topic in topics}

    path = namespace_path(namespace) + "/poll?payload=base64"
    return Call(Request("POST", path, _JSON, body), read, wait_s=wait_ms / 1000)


def _without_isolation(request: PollRequest) -> PollRequest:
    """Removes the isolation: the body has one for all topics."""
    request.isolation = None
    return request


def _page_of_many(origin: Origin, fields: Mapping[str, Any]) -> Page[Any] | PlainsongError:
    if "error" in fields:
        return problem_error(fields["error"])
    if fields["end"] not in _ENDS:
        raise MalformedBody("a page with an unknown end")
    messages = [
        Message(origin, bytes.fromhex(each["id"]), _payload(each["payload"]), 0, each.get("attributes") or {})
        for each in fields["messages"]
    ]
    held = None
    if "heldBy" in fields:
        held = _held_by(fields["heldBy"], fields.get("heldSince"), fields.get("hiddenMessages"))
    last_id = None if fields["lastId"] is None else MessageId(fields["lastId"])
    return Page(messages, last_id, fields["end"], held, int(fields.get("setAside", 0)))


def _payload(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else b64decode(value["base64"], validate=True)


def look(
    namespace: str,
    topic: str,
    start: bytes | int | None,
    until: bytes | int | None,
    limit: int | None,
    *,
    newest_first: bool = False,
    payload_bytes: int | None = None,
    containing: str | None = None,
) -> Call[Sequence[Seen]]:
    """``GET /{t}/messages``."""
    query: dict[str, Any] = {"payload": "base64"}
    for name, bound in (("from", start), ("to", until)):
        if bound is not None:
            query[name] = bound.hex() if isinstance(bound, bytes) else bound
    more = {"limit": limit, "order": "desc" if newest_first else None, "payloadBytes": payload_bytes}
    query |= {name: value for name, value in {**more, "filter": containing}.items() if value is not None}
    return Call(Request("GET", topic_path(namespace, topic, "/messages?" + urlencode(query))), list_of(_seen))


def look_at_one(namespace: str, topic: str, message_id: str) -> Call[Seen]:
    """``GET /{t}/messages/{id}``."""
    path = topic_path(namespace, topic, f"/messages/{message_id}?payload=base64")
    return Call(Request("GET", path), lambda answer: _seen(json_of(answer)))


def _seen(fields: Mapping[str, Any]) -> Seen:
    is_set_aside = fields["state"] == "set-aside"
    message_id = MessageId(fields["from" if is_set_aside else "id"])
    payload = _payload(fields["payload"]) if "payload" in fields else b""
    batch = fields.get("batch")
    return Seen(
        id=message_id,
        state=fields["state"],
        payload=payload,
        publish_time_ms=message_id.publish_time_ms,
        expires_ms=fields.get("expiresMs"),
        size=fields.get("size", len(payload)),
        write_pointer=fields.get("writePointer"),
        attributes=fields.get("attributes") or {},
        producer=fields.get("producer"),
        sequence_id=fields.get("sequenceId"),
        batch=None if batch is None else BatchPlace(batch["index"], batch["count"]),
        detail=f"{_rows(fields['rows'])} up to {fields['to']}" if is_set_aside else fields.get("detail", ""),
    )


def _rows(count: int | None) -> str:
    if count is None:
        return "rows, some of them unreadable,"
    return counted(count, "row")


# --- producers and namespaces --------------------------------------------------------------------


_AVRO = (("Content-Type", AVRO_2.content_type),)


class Recent(NamedTuple):
    """A recent request of a producer, as the topic remembers it."""

    first: int
    last: int
    """Its lowest and highest sequence id."""
    first_id: MessageId | None
    last_id: MessageId | None
    pointer: int | None = None
    """The write pointer of its transaction; None: published without one."""


class Known(NamedTuple):
    """A topic's state of a producer."""

    producer: str
    epoch: int
    last_sequence_id: int
    """The highest durable sequence id; -1: none."""
    generation: int
    recent: Sequence[Recent]


def open_session(
    namespace: str, topic: str, producer: str | None, *, retention_s: int | None = None, generation: int | None = None
) -> Call[Known]:
    """``PUT /{t}/producers/{name}``, or ``POST`` to let the daemon choose the name.

    A second attempt opens another session, or chooses another name; the caller decides whether to repeat.
    """
    given = {"retentionSeconds": retention_s, "generation": generation}
    body = as_json({name: value for name, value in given.items() if value is not None})
    if producer is None:
        return Call(Request("POST", topic_path(namespace, topic, "/producers"), _JSON, body), _known, "twice")
    return Call(Request("PUT", producer_path(namespace, topic, producer), _JSON, body), _known, "twice")


def ask_producer(namespace: str, topic: str, producer: str, generation: int) -> Call[Known]:
    """``GET /{t}/producers/{name}`` of one generation, which may be deleted."""
    return Call(Request("GET", producer_path(namespace, topic, producer, f"?generation={generation}")), _known)


def _known(answer: Answer) -> Known:
    fields = json_of(answer)
    return Known(
        str(fields["producer"]),
        int(fields["epoch"]),
        int(fields["lastSequenceId"]),
        int(fields["generation"]),
        [_recent(each) for each in fields.get("recent", ())],
    )


def _recent(fields: Mapping[str, Any]) -> Recent:
    under = (fields.get("response") or {}).get("transactionWritePointer")
    pointer = None if under is None else int(under)
    return Recent(
        int(fields["first"]),
        int(fields["last"]),
        _optional_id(fields["firstId"]),
        _optional_id(fields["lastId"]),
        pointer,
    )


def publish_in_session(namespace: str, topic: str, request: PublishRequest) -> Call[Receipt]:
    """``POST /{t}/publish`` of a producer, with or without a write pointer. The caller decides about repeating it."""
    count = len(request.messages)

    def read(answer: Answer) -> Receipt:
        return read_receipt(answer, count) if request.write_pointer is None else _response_receipt(answer, request)

    load("fastavro")
    body = AVRO_2.encode_publish(request)
    return Call(Request("POST", topic_path(namespace, topic, "/publish"), _AVRO, body), read, "twice")


def _optional_id(fields: str | None) -> MessageId | None:
    return None if fields is None else MessageId(fields)


def _response_receipt(answer: Answer, request: PublishRequest) -> Receipt:
    """Converts the answer of a publish under a write pointer to a receipt."""
    if not answer.body:
        raise MalformedBody("the response is missing")
    fields = AVRO_2.decode_publish_response(answer.body)
    ids = request.sequence_ids or ()
    return Receipt(
        MessageId(pack_id(fields.start_timestamp_ms, fields.start_sequence_id)),
        MessageId(pack_id(fields.end_timestamp_ms, fields.end_sequence_id)),
        len(request.messages),
        request.generation or 0,
        fields.duplicate,
        answer.headers.get("plainsong-last-sequence-id", "null") not in ("null", ""),
        ids[-1] if ids else None,
    )


def producer_path(namespace: str, topic: str, producer: str, rest: str = "") -> str:
    """Percent-encodes the producer's name, which may be any text. Raises InvalidName."""
    return topic_path(namespace, topic, "/producers/" + quote(producer, safe="") + rest)


def list_producers(namespace: str, topic: str, after: str | None, limit: int) -> Call[ProducerList]:
    """``GET /{t}/producers``: one page, with the topic's figures over all producers."""
    query = {"limit": str(limit), **({} if after is None else {"after": after})}
    return Call(Request("GET", topic_path(namespace, topic, "/producers?" + urlencode(query))), object_of)


def show_producer(namespace: str, topic: str, producer: str, generation: int | None = None) -> Call[ProducerState]:
    """``GET /{t}/producers/{name}``; with a generation also of a deleted topic."""
    query = "" if generation is None else f"?generation={generation}"
    return Call(Request("GET", producer_path(namespace, topic, producer, query)), object_of)


def delete_producer(namespace: str, topic: str, producer: str) -> Call[None]:
    """``DELETE /{t}/producers/{name}``."""
    return Call(Request("DELETE", producer_path(namespace, topic, producer)), nothing, "twice")


def list_namespaces() -> Call[list[str]]:
    """``GET /v1/namespaces``."""
    return Call(Request("GET", "/v1/namespaces"), list_of(str))


def show_namespace(namespace: str) -> Call[NamespaceDescription]:
    """``GET /v1/namespaces/{ns}/properties``."""
    return Call(Request("GET", namespace_path(namespace) + "/properties"), object_of)


def set_namespace(namespace: str, properties: Mapping[str, Any]) -> Call[NamespaceDescription]:
    """``PUT /v1/namespaces/{ns}/properties``: replaces all of them."""
    path = namespace_path(namespace) + "/properties"
    return Call(Request("PUT", path, _JSON, as_json(properties)), object_of, "harmless")


# --- clusters ------------------------------------------------------------------------------------


def show_cluster(namespace: str = "", topic: str | None = None) -> Call[ClusterView]:
    """``GET /v1/cluster``, with the owner of ``topic`` if given. Raises InvalidName."""
    query = "" if topic is None else "?" + urlencode({"topic": str(topic_name(namespace, topic))})
    return Call(Request("GET", "/v1/cluster" + query), object_of)


def drain_instance(instance: str, *, drained: bool) -> Call[DrainReport]:
    """``PUT`` or ``DELETE /v1/cluster/instances/{instance}/drain``, answered with its effects. Raises InvalidName."""
    path = f"/v1/cluster/instances/{instance_name(instance)}/drain"
    return Call(Request("PUT" if drained else "DELETE", path), effect_of, "harmless")


def pin_topic(namespace: str, topic: str, instance: str) -> Call[None]:
    """``PUT /v1/cluster/pins/{namespace}/{topic}``. Raises InvalidName."""
    body = as_json({"instance": instance_name(instance)})
    return Call(Request("PUT", _pin(namespace, topic), _JSON, body), nothing, "harmless")


def unpin_topic(namespace: str, topic: str) -> Call[None]:
    """``DELETE /v1/cluster/pins/{namespace}/{topic}``. Raises InvalidName."""
    return Call(Request("DELETE", _pin(namespace, topic)), nothing, "harmless")


def _pin(namespace: str, topic: str) -> str:
    topic_name(namespace, topic)
    return f"/v1/cluster/pins/{namespace}/{topic}"
