"""Message ids, outgoing messages, receipts, and the messages and pages that a client reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypedDict, overload

from plainsong.errors import UnexpectedAnswer
from plainsong.protocol import ids
from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.frames import NO_ATTRIBUTES
from plainsong.protocol.plurals import counted
from plainsong.protocol.requests import MAX_ATTRIBUTE_BYTES, MAX_TTL_S, PublishRequest
from plainsong.serializers import BYTES, Serializer, Undecodable, V, encoded, serializer_for

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from plainsong.protocol.errors import PlainsongError
    from plainsong.protocol.page import End, Held
    from plainsong.serializers import SerializerLike


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class MessageId(bytes):
    """The id of a message: ``str(id)`` is its text form, ``bytes(id)`` the form to store, ``<`` the topic's order.

    Args:
      value: 20 bytes, or 40 hex digits.
    Raises:
      InvalidMessageId: it is neither.
    """

    __slots__ = ()

    def __new__(cls, value: bytes | str) -> Self:  # noqa: D102 - the class says it
        if type(value) is not bytes or len(value) != ids.ID_BYTES:
            value = ids.parse_id(value) if isinstance(value, str) else ids.checked_id(value)
        return super().__new__(cls, value)

    @property
    def publish_time_ms(self) -> int:
        """When the daemon made the message durable, in milliseconds since 1970, by the daemon's clock."""
        return ids.published_ms(self)

    @property
    def publish_time(self) -> datetime:
        """``publish_time_ms`` as a time in UTC. Raises OverflowError beyond the year 9999."""
        return _EPOCH + timedelta(milliseconds=self.publish_time_ms)

    def __str__(self) -> str:
        return self.hex()

    def __format__(self, spec: str) -> str:
        return format(self.hex(), spec)

    def __repr__(self) -> str:
        return f"MessageId('{self.hex()}')"


def nth_id(first_id: bytes, last_id: bytes, index: int, count: int) -> MessageId | None:
    """The id of message ``index`` of ``count`` that one request published; None when it is not certain.

    A request's messages have consecutive positions; a full millisecond overflows into the next, as addition does.
    """
    first, last = ids.ordinal(first_id[: ids.POSITION_BYTES]), ids.ordinal(last_id[: ids.POSITION_BYTES])
    if last - first != count - 1 or first_id[10:] != ids.NO_PAYLOAD_PART or last_id[10:] != ids.NO_PAYLOAD_PART:
        return None
    return MessageId(ids.id_at(ids.position_at(first + index)))


# --- outgoing messages ---------------------------------------------------------------------------


#: Values that can be published without a serializer: one message, or several.
Body: TypeAlias = "bytes | bytearray | memoryview | Outgoing"
Bodies: TypeAlias = "Body | Iterable[Body]"

#: Attributes of a message, if it has any.
Strings: TypeAlias = Mapping[str, str] | None


#: For text that came from a file name or an environment variable: Python keeps bytes that are not UTF-8 as half surrogates.
UTF8_HINT = "the text has half a surrogate pair, which UTF-8 cannot encode"


def check_ttl(ttl_s: object) -> None:
    """Raises InvalidParameter unless ``ttl_s`` is a time to live."""
    if not (isinstance(ttl_s, int) and 0 < ttl_s <= MAX_TTL_S):
        raise InvalidParameter(f"ttl_s is {ttl_s!r}", hint=f"use a whole number of seconds from 1 to {MAX_TTL_S}")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message with more than a value. Raises InvalidParameter.

    Args:
      value: the serializer's input; bytes without a serializer.
      ttl_s: seconds it lives, if that is shorter than the topic's ttl.
      attributes: small strings that readers get with it, at most 4 KiB.
      routing_key: the attribute ``routingKey``.
      sequence_id: the producer's own number for it; only for producers.
    """

    value: Any
    ttl_s: int | None = None
    attributes: Mapping[str, str] | None = None
    routing_key: str | None = None
    sequence_id: int | None = None

    def __post_init__(self) -> None:
        if self.ttl_s is not None:
            check_ttl(self.ttl_s)
        if self.attributes is not None or self.routing_key is not None:
            attributes_of(self.attributes, self.routing_key)

    @property
    def strings(self) -> Mapping[str, str] | None:
        """Its attributes, including the routing key."""
        return attributes_of(self.attributes, self.routing_key)


def parts_of(message: Outgoing) -> tuple[Any, int | None, Mapping[str, str] | None]:
    """Value, time to live and attributes of a message sent without a producer. Raises InvalidParameter: it has a sequence id."""
    if message.sequence_id is not None:
        raise InvalidParameter("a sequence id belongs to a producer", hint="use client.producer")
    return message.value, message.ttl_s, message.strings


def with_attributes(message: Any, attributes: Mapping[str, str] | None, routing_key: str | None) -> Any:
    """Adds attributes and a routing key to a message; its own win. Raises InvalidParameter."""
    if attributes is None and routing_key is None:
        return message
    if not isinstance(message, Outgoing):
        return Outgoing(message, attributes=attributes, routing_key=routing_key)
    return replace(
        message,
        attributes={**(attributes or {}), **(message.attributes or {})},
        routing_key=routing_key if message.routing_key is None else message.routing_key,
    )


def all_with_attributes(messages: Any, attributes: Mapping[str, str] | None, routing_key: str | None) -> Any:
    """``with_attributes`` for one message, or for each of several. Raises InvalidParameter."""
    if isinstance(messages, (list, tuple, Iterator)):
        return [with_attributes(each, attributes, routing_key) for each in messages]
    return with_attributes(messages, attributes, routing_key)


def attributes_of(attributes: Mapping[str, str] | None, routing_key: str | None) -> Mapping[str, str] | None:
    """A copy of the attributes of a message, including its routing key. Raises InvalidParameter.

    One message that a request cannot carry would fail the whole request, so each is checked before it is queued.
    """
    if attributes is None and routing_key is None:
        return None
    if attributes is not None and not isinstance(attributes, Mapping):
        raise InvalidParameter(f"{attributes!r} are not attributes", hint="use a dict of strings")
    strings = dict(attributes or {})
    if routing_key is not None and strings.setdefault("routingKey", routing_key) != routing_key:
        raise InvalidParameter("the routing key is given twice", hint="give it once")
    try:
        size = len("".join([text for pair in strings.items() for text in pair]).encode())
    except TypeError:
        raise InvalidParameter(f"{strings!r} are not attributes", hint="use a dict of strings") from None
    except UnicodeEncodeError as error:
        raise InvalidParameter(f"the attributes {strings!r} cannot be written as UTF-8", hint=UTF8_HINT) from error
    if size > MAX_ATTRIBUTE_BYTES:
        raise InvalidParameter(
            f"the attributes are {size} bytes", hint=f"at most {MAX_ATTRIBUTE_BYTES}; use the payload"
        )
    return strings


def outgoing_request(
    values: Sequence[Any],
    serializer: SerializerLike,
    ttl_s: int | None,
    given: Mapping[str, str] | None = None,
    routing_key: str | None = None,
    *,
    numbered: bool = False,
) -> PublishRequest:
    """Encodes values as a publish request, with ``given`` attributes for those without.

    Ignores sequence ids if the caller handles them (``numbered``), else refuses them.

    Raises NotEncodable, InvalidParameter: nothing happened.
    """
    using = BYTES if serializer is None else serializer_for(serializer)
    if ttl_s is not None:
        check_ttl(ttl_s)
    payloads, ttls_s, attributes = [], [], []
    for value in all_with_attributes(list(values), given, routing_key):
        own, strings = None, None
        if isinstance(value, Outgoing):
            value, own, strings = parts_of(replace(value, sequence_id=None) if numbered else value)
        payloads.append(value if type(value) is bytes and serializer is None else encoded(using, value))
        ttls_s.append(own)
        attributes.append(dict(strings or {}))
    return PublishRequest(
        payloads,
        ttl_s=ttl_s,
        message_ttls_s=own_ttls(ttls_s),
        attributes=attributes if any(attributes) else None,
    )


def own_ttls(ttls_s: Sequence[int | None]) -> Sequence[int | None] | None:
    """None when no message has its own time to live."""
    return ttls_s if any(ttl is not None for ttl in ttls_s) else None


def as_list(messages: Any) -> Sequence[Any]:
    """A list, a tuple or an iterator (a generator, ``map``, an open file) is several messages, anything else is one."""
    if isinstance(messages, (list, tuple)):
        return messages
    return list(messages) if isinstance(messages, Iterator) else [messages]


# --- receipts ------------------------------------------------------------------------------------


#: The generation in the receipt of a publish inside a transaction, which is not known before the commit.
PENDING = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """One publish is durable, under these ids. Inside a transaction: it will be, with the commit."""

    first_id: MessageId | None
    last_id: MessageId | None
    """None when the daemon no longer knows the ids, or does not know them yet."""
    count: int
    """Messages of the request."""
    generation: int
    """The topic's generation; 0 in what ``publish`` returns inside a transaction (``tx.receipts`` has it after the commit)."""
    duplicate: bool = False
    deduplicated: bool = False
    last_sequence_id: int | None = None
    stored: Sequence[int] | None = None
    dropped: Sequence[int] | None = None


class MessageReceipt(NamedTuple):
    """One message of a producer is durable, now or since an earlier attempt."""

    sequence_id: int
    id: MessageId | None
    """None for a duplicate older than the requests that the daemon remembers, and for a duplicate in the middle of a
    repeated request, for which the daemon returns only the first and last id."""
    duplicate: bool
    """An earlier attempt stored it; this one stored nothing."""
    deduplicated: bool
    """False where deduplication is switched off: the message may be stored twice."""
    generation: int
    """The topic's generation."""


class DroppedMessage(NamedTuple):
    """The argument of ``on_drop``: the dropped message, and the error (with its ``outcome``)."""

    topic: str
    payload: bytes
    error: PlainsongError


class Counts(NamedTuple):
    """Counts of a publisher's messages since it was created."""

    pending: int
    """Waiting, or being sent."""
    pending_bytes: int
    """Memory of the pending messages."""
    delivered: int
    """Durable."""
    failed: int
    """Not delivered in reliable mode; their futures raise."""
    dropped: int
    """Dropped in best-effort mode, or because the buffer was full."""


def id_in(receipt: Receipt, index: int) -> MessageId:
    """The id of message ``index`` of a publish without a producer. Raises UnexpectedAnswer, applied: the daemon broke the contract."""
    found = None
    if receipt.first_id is not None and receipt.last_id is not None:
        found = nth_id(receipt.first_id, receipt.last_id, index, receipt.count)
    if found is None:
        unknown = UnexpectedAnswer("the answer lacks the ids of the messages, although they are stored")
        unknown.outcome = "applied"
        raise unknown
    return found


# --- reading -------------------------------------------------------------------------------------


class Origin(NamedTuple):
    """The topic and serializer that the messages of a page share."""

    topic: str
    serializer: Serializer[Any] = BYTES


class Message(Generic[V]):
    """One message of a topic. ``value`` is decoded on first use.

    Two are equal if they are the same message of the same topic: topic, id, payload and attributes. They sort by id, as
    their topic does. Pickling includes the value, but not the serializer.
    """

    __slots__ = ("_attributes", "_origin", "_value", "id_bytes", "payload")

    id_bytes: bytes
    """Its id, as plain bytes."""
    payload: bytes
    """The bytes, as they were published."""
    _value: Any

    def __init__(
        self,
        origin: Origin,
        message_id: bytes,
        payload: bytes,
        pointer: int = 0,
        attributes: Mapping[str, str] = NO_ATTRIBUTES,
    ) -> None:
        self._origin = origin
        self.id_bytes = message_id
        self.payload = payload
        self._attributes = attributes

    @property
    def id(self) -> MessageId:
        """Its id: 20 bytes, 40 hex digits as text."""
        return MessageId(self.id_bytes)

    @property
    def topic(self) -> str:
        """The name of its topic."""
        return self._origin.topic

    @property
    def value(self) -> V:
        """The payload decoded by the reader's serializer; an ``Undecodable`` if that fails."""
        try:
            return self._value  # type: ignore[no-any-return] # by the serializer, or an Undecodable
        except AttributeError:
            self._value = self._decoded()
            return self._value  # type: ignore[no-any-return] # likewise

    def _decoded(self) -> Any:
        try:
            return self._origin.serializer.decode(self.payload)
        except Exception as error:  # noqa: BLE001 - the caller gets the user function's exception
            return Undecodable(self.payload, error)

    @property
    def publish_time(self) -> datetime:
        """When it became durable, by the daemon's clock, in UTC, to the millisecond."""
        return self.id.publish_time

    @property
    def attributes(self) -> Mapping[str, str]:
        """The strings sent with the payload; empty if there are none."""
        return self._attributes

    def __repr__(self) -> str:
        shown = self.payload if len(self.payload) <= 40 else self.payload[:37] + b"..."
        return f"<Message {self.topic} {self.id_bytes.hex()} {shown!r}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return (
            self.id_bytes == other.id_bytes
            and self.topic == other.topic
            and self.payload == other.payload
            and self._attributes == other._attributes
        )

    def __hash__(self) -> int:
        return hash((self.topic, self.id_bytes))

    def __lt__(self, other: Message[Any]) -> bool:
        return self.id_bytes < other.id_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self.topic, self.id_bytes, self.payload, dict(self._attributes), self.value)


def _unpickled(
    topic: str, message_id: bytes, payload: bytes, attributes: Mapping[str, str], value: Any
) -> Message[Any]:
    message: Message[Any] = Message(Origin(topic), message_id, payload, attributes=attributes or NO_ATTRIBUTES)
    message._value = value
    return message


def passed_rows(topic: str, count: int) -> str:
    """The warning for damaged rows that a page has passed."""
    return f"{topic}: skipped {counted(count, 'damaged row')} that an operator has set aside"


@dataclass(frozen=True, slots=True, repr=False)
class Page(Sequence["Message[V]"], Generic[V]):
    """The messages of one poll as a sequence, oldest first, with the position to continue after."""

    messages: Sequence[Message[V]]
    last_id: MessageId | None
    """Continue after this id; also set on an empty page. None if the topic never had a message."""
    end: End
    """``end``: no more now; ``more``: a limit was reached; ``held``: the next message's transaction is undecided."""
    held: Held | None = None
    """The blocking transaction, if ``end`` is ``held``."""
    set_aside: int = 0
    """The number of damaged rows within this page that an operator has set aside; messages were lost there."""

    @overload
    def __getitem__(self, index: int) -> Message[V]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message[V]]: ...
    def __getitem__(self, index: int | slice) -> Message[V] | Sequence[Message[V]]:
        return self.messages[index]

    def __len__(self) -> int:
        return len(self.messages)

    def __repr__(self) -> str:
        return f"<Page of {len(self.messages)} messages, then {self.end}>"


class ServiceEvent(NamedTuple):
    """The current state of one kind, as ``client.events`` yields it."""

    kind: str
    """``topics``, ``transactions``, ``attention`` or ``cluster``."""
    data: Any
    """The state: rows of topics; ``open`` and ``total`` of transactions; what needs attention; the cluster."""


class TopicOptions(TypedDict, total=False):
    """The properties of a topic. None stands for the daemon's default."""

    ttl_s: int | None
    """Time to live of messages, in seconds."""
    transactional: Literal["optional", "required", "disabled"] | None
    """Allows, requires or refuses publishes in a transaction."""
    deduplication: Literal["inherit", "enabled", "disabled"] | None
    """Enables or disables remembering producers' sequence ids; ``inherit``: as in the namespace."""
    max_bytes: int | None
    """Maximum bytes in the topic; None: limited by the disk only."""
    chain: Literal["none", "sha256"] | None
    """``sha256``: every request carries a hash of everything before it."""


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """The place of a message in its atomic batch."""

    index: int
    """0 is the first."""
    count: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A message as ``client.messages`` lists it, without consuming it."""

    id: MessageId
    state: Literal["plain", "committed", "open", "rolled-back", "invalid", "damaged", "set-aside"]
    """``set-aside``: rows from this id on, which ``detail`` counts, were taken out of the topic by an operator."""
    payload: bytes
    publish_time_ms: int
    expires_ms: int | None
    size: int
    write_pointer: int | None = None
    attributes: Mapping[str, str] = field(default_factory=lambda: NO_ATTRIBUTES)
    producer: str | None = None
    sequence_id: int | None = None
    batch: BatchPlace | None = None
    """Also None if the first message of its batch is gone."""
    detail: str = ""
    """Why it is damaged, or how much was set aside."""
