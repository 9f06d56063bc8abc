"""Options of reading and writing; docs/spark.md lists them. An unknown or malformed option is refused with its name.

Spark passes them as text, with lower-cased names.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pyspark_plainsong.calls import Calls
from pyspark_plainsong.offsets import at_time
from pyspark_plainsong.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pyspark_plainsong.calls import Isolation

#: Options of Spark itself, which it also passes to the data source.
SPARKS_OWN = frozenset({"checkpointlocation", "path"})
#: Options of other connectors → our corresponding option.
ELSEWHERE = {
    "kafka.bootstrap.servers": "url",
    "service.url": "url",
    "admin.url": "url",
    "topics": "subscribe",
    "topicspattern": "subscribePattern",
    "assign": "subscribe",
    "startingoffsetsbytimestamp": "startingTimestamp",
    "endingoffsetsbytimestamp": "endingTimestamp",
    "kafka.isolation.level": "isolation",
    "kafkaconsumer.polltimeoutms": "pollTimeoutMs",
    "fetchoffset.numretries": "numRetries",
    "fetchoffset.retryintervalms": "retryIntervalMs",
}
#: Units of durations, as in Spark's own options.
UNITS_MS = {"": 1, "ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
#: Accepted spellings of booleans.
TRUTH = {"true": True, "1": True, "false": False, "0": False}


#: Numbers between the two look like seconds (1769817600) or a date (20260131) and are refused: as milliseconds they
#: would lie in 1970 to 1973.
_LOOKS_LIKE_SECONDS = 10_000_000
_IS_MILLISECONDS = 100_000_000_000


class BadOption(ValueError):
    """An option is unknown, malformed, missing, or in conflict with another; nothing happened."""


class OptionText:
    """The user's options for one use, such as reading a stream.

    Args:
      known: the names of this use's options, as documented.
      others: the options of other uses, and the use of each.
    Raises:
      BadOption: an option does not belong to this use; the error names the nearest one that does.
    """

    def __init__(self, given: Mapping[str, str], use: str, known: Iterable[str], others: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items() if name.lower() not in SPARKS_OWN}
        self._spelling = {name.lower(): name for name in known}
        for name in self._given:
            if name not in self._spelling:
                raise BadOption(self._why_not(name, use, others))

    def _why_not(self, name: str, use: str, others: Mapping[str, str]) -> str:
        if name.startswith("option."):  # the form in which Spark's catalog stores them
            return (
                "a table of Spark's catalog keeps no options of a Python source: name its columns in CREATE TABLE, and "
                "the options in each query, by WITH (…)"
            )
        if name == "includeheaders":
            return "option includeHeaders is not needed: headers and routing_key are columns"
        for other, other_use in others.items():
            if other.lower() == name:
                near = " (its topics are in subscribe)" if other == "topic" else ""
                return f"option {other} is for {other_use}, not for {use}{near}"
        near = ELSEWHERE.get(name, "")
        if near.lower() not in self._spelling:
            close = get_close_matches(name, self._spelling, 1, cutoff=0.5)
            near = self._spelling[close[0]] if close else ""
        if near:
            return f"unknown option {name}; did you mean {near}?"
        return f"unknown option {name}; those for {use} are {', '.join(self._spelling.values())}"

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._given

    def exclude(self, one: str, *others: str) -> None:
        """Refuse ``one`` together with any of ``others``."""
        for other in others:
            if one in self and other in self:
                raise BadOption(f"options {one} and {other} exclude each other")

    def text(self, name: str, *, why: str = "") -> str | None:
        """Return the text; None if it is missing.

        Args:
          why: makes the option mandatory; the error explains it with these words.
        Raises:
          BadOption: the option is empty, or missing although it is mandatory.
        """
        value = self._given.get(name.lower())
        value = None if value is None else value.strip()
        if value == "":
            raise BadOption(f"option {name} is empty")
        if value is None and why:
            raise BadOption(f"option {name} is missing: {why}")
        return value

    def number(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**63 - 1) -> int | None:
        """Return a whole number from ``least`` to ``most``. Raises BadOption."""
        value = self.text(name)
        if value is None:
            return default
        try:
            number = int(value)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            upto = f" to {most}" if most < 2**63 - 1 else " or more"
            raise BadOption(f"option {name} is {value!r}; expected a whole number, {least}{upto}")
        return number

    def count(self, name: str, default: int, *, least: int = 1, most: int = 2**63 - 1) -> int:
        """Return a whole number, with a default. Raises BadOption."""
        number = self.number(name, least=least, most=most)
        return default if number is None else number

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean. Raises BadOption."""
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in TRUTH:
            raise BadOption(f"option {name} is {value!r}; expected true or false")
        return TRUTH[value.lower()]

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return one of the ``allowed`` words; the first is the default. Raises BadOption."""
        value = self.text(name)
        if value is None:
            return allowed[0]
        if value.lower() not in allowed:
            raise BadOption(f"option {name} is {value!r}: one of {', '.join(allowed)} is expected")
        return value.lower()

    def length_ms(self, name: str, default: int) -> int:
        """Return a duration in milliseconds, given as a number with or without a unit. Raises BadOption."""
        value = self.text(name)
        if value is None:
            return default
        found = re.fullmatch(r"(\d+) ?(\w*)", value.lower(), re.ASCII)
        if found is None or found[2] not in UNITS_MS:
            raise BadOption(f"option {name} is {value!r}; expected a length of time, such as 30s, 15m or 500ms")
        return int(found[1]) * UNITS_MS[found[2]]

    def time_ms(self, name: str, rounded: Callable[[float], int] = math.ceil) -> int | None:
        """Return milliseconds since 1970, from a number or from ISO 8601, which is in UTC by default.

        By default the time is rounded up: the bound is the first message at or after it, and the times in ids are whole
        milliseconds.
        """
        value = self.text(name)
        if value is None:
            return None
        if value.isascii() and value.isdigit():
            if _LOOKS_LIKE_SECONDS <= int(value) < _IS_MILLISECONDS:
                raise BadOption(
                    f"option {name} is {value}: as milliseconds since 1970 that is before 1974; is it in seconds, or a "
                    "date? Write milliseconds, or ISO-8601, such as 2026-01-31T12:00:00Z"
                )
            return int(value)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise BadOption(
                f"option {name} is {value!r}; expected milliseconds since 1970 or ISO-8601, such as "
                "2026-01-31T12:00:00Z"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return max(0, rounded(moment.timestamp() * 1000))


# --- where reading starts and ends -----------------------------------------------------------------

#: An id has 20 bytes; a number is a time in milliseconds.
Bound = Literal["earliest", "latest"] | bytes | int
_ID = re.compile(r"[0-9a-fA-F]{40}\Z")


class TopicBound(NamedTuple):
    """The bound of one topic."""

    bound: Bound
    generation: int | None = None
    """The generation of the id, if known."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of all topics."""

    default: Bound
    by_topic: Mapping[str, TopicBound] = field(default_factory=dict)

    def of(self, topic: str) -> TopicBound:
        """Return the bound of one topic."""
        return self.by_topic.get(topic, TopicBound(self.default))

    def check_topics(self, name: str, topics: tuple[str, ...] | None, pattern: str) -> None:
        """Check that all topics are subscribed to. Raises BadOption."""
        for topic in self.by_topic:
            if topics is not None and topic not in topics:
                raise BadOption(f"option {name} names the topic {topic}, which subscribe does not")
            if topics is None and not re.fullmatch(pattern, topic):
                raise BadOption(f"option {name} names the topic {topic}, which subscribePattern does not match")


def parse_bounds(name: str, text: str, default: Bound, namespace: str) -> Bounds:
    """Parse an option's bounds: a word, an id, a JSON object of these by topic, or a checkpoint's offset.

    Raises:
      BadOption: the text is none of these.
    """
    if not text.startswith("{"):
        return Bounds(_bound(name, text))
    try:
        given = json.loads(text)
    except ValueError as error:
        raise BadOption(f"option {name} is not JSON: {error}") from None
    if isinstance(given.get("topics"), dict) and given.get("v") == 1:
        given = given["topics"]
    return Bounds(default, {_topic(name, topic, namespace): _topic_bound(name, each) for topic, each in given.items()})


def _topic(name: str, topic: str, namespace: str) -> str:
    of, colon, rest = topic.partition(":")
    if colon and of != namespace:
        raise BadOption(f"option {name} names {topic}, which is not of the namespace {namespace}")
    return rest if colon else topic


def _topic_bound(name: str, given: Any) -> TopicBound:
    if isinstance(given, dict) and set(given) == {"gen", "next"} and type(given["gen"]) is int:
        return TopicBound(_bound(name, given["next"]), given["gen"])
    return TopicBound(_bound(name, given))


def _bound(name: str, given: Any) -> Bound:
    if isinstance(given, str):
        if given.lower() == "earliest":
            return "earliest"
        if given.lower() == "latest":
            return "latest"
        if _ID.match(given):
            return bytes.fromhex(given)
    raise BadOption(
        f"option {name} has {given!r}; expected earliest, latest, a message id of 40 hex digits, or a JSON object of "
        "these by topic; times have options of their own"
    )


# --- options ---------------------------------------------------------------------------------------

#: The same as in the client and the command line.
DEFAULT_NAMESPACE = "default"
_CONNECTION = ("url", "namespace", "numRetries", "retryIntervalMs", "tokenFile", "auth.tokenFile", "caFile", "insecure")
_READ = (
    "subscribe", "subscribePattern", "startingOffsets", "startingTimestamp", "minPartitions", "maxRecordsPerPartition",
    "failOnDataLoss", "fetchSize", "pollTimeoutMs", "isolation", "includeTransaction",
)  # fmt: skip
_BATCH_READ = ("endingOffsets", "endingTimestamp", "asOfTimestamp")
_STREAM_READ = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_WRITE = ("topic", "producerName", "storeBatchSize", "ordered", "memoryDays", "ttlSeconds")
_BATCH_WRITE = ("sequenceId", "transactionWritePointer")
_USES = {
    "reading a batch": _BATCH_READ,
    "reading a stream": _STREAM_READ,
    "reading": _READ,
    "writing a batch": _BATCH_WRITE,
    "writing": _WRITE,
}
_OTHERS = {name: use for use, names in _USES.items() for name in names}
#: Default retention of a streaming query's producer: a query may pause over any holiday.
STREAM_MEMORY_DAYS = 90
MAX_POLL_TIMEOUT_MS = 60_000
#: How long a micro-batch waits for minOffsetsPerTrigger, unless maxTriggerDelay says otherwise.
TRIGGER_DELAY_MS = 15 * 60_000
MAX_PARTITIONS = 1_000
_NAMESPACE = re.compile(r"[a-zA-Z0-9_]{1,255}\Z")
_TOPIC = re.compile(r"[a-zA-Z0-9_-]{1,255}\Z")


@dataclass(frozen=True)
class Connection:
    """The daemon's addresses, its credentials, and the retry policy."""

    urls: tuple[str, ...]
    namespace: str
    retries: int
    retry_interval_ms: int
    token_file: str | None
    ca_file: str | None = None

    @classmethod
    def parse(cls, options: OptionText) -> Connection:
        """Raises BadOption."""
        url = options.text("url", why="the daemon's address, such as http://127.0.0.1:7420, or several with commas")
        namespace = options.text("namespace") or DEFAULT_NAMESPACE
        assert url is not None
        if not _NAMESPACE.match(namespace):
            raise BadOption(f"option namespace is {namespace!r}; expected letters, digits and underscores")
        options.exclude("tokenFile", "auth.tokenFile")
        token_file = options.text("tokenFile") or options.text("auth.tokenFile")
        urls = tuple(_url(each.strip()) for each in url.split(","))
        if token_file is not None and not options.flag("insecure", default=False):
            for each in urls:
                if not _is_private(each):
                    raise BadOption(
                        f"the token would be sent to {each} unencrypted: use https://, or say insecure=true"
                    )
        return cls(
            urls,
            namespace,
            options.count("numRetries", 7, least=0, most=1000),
            options.count("retryIntervalMs", 200, least=0, most=600_000),
            token_file,
            options.text("caFile"),
        )

    def calls(self) -> Calls:
        """A new client."""
        wire = Wire(
            self.urls,
            retries=self.retries,
            retry_interval_s=self.retry_interval_ms / 1000,
            token_file=self.token_file,
            ca_file=self.ca_file,
        )
        return Calls(wire, self.namespace)


@dataclass(frozen=True)
class ReadOptions:
    """The parsed options of a read."""

    connection: Connection
    topics: tuple[str, ...] | None
    """None: the topics whose whole names match ``pattern``."""
    pattern: str
    starting: Bounds
    ending: Bounds
    """Exclusive; batches only."""
    max_offsets: int | None
    """Maximum number of messages per micro-batch."""
    max_bytes: int | None
    """Maximum number of bytes per micro-batch."""
    min_partitions: int | None
    max_records_per_partition: int | None
    fail_on_data_loss: bool
    fetch_size: int
    """Messages per request, and so per Arrow batch."""
    poll_timeout_ms: int
    """The time that an idle stream's request waits for a message."""
    isolation: Isolation
    include_transaction: bool
    as_of_ms: int | None = None
    """Read only what had been committed by this moment; None: by now. Batches only."""
    min_offsets: int | None = None
    """Minimum number of messages per micro-batch, unless the first of them has waited for ``max_delay_ms``."""
    max_delay_ms: int = TRIGGER_DELAY_MS

    @classmethod
    def parse(cls, given: Mapping[str, str], *, streaming: bool) -> ReadOptions:
        """Raises BadOption."""
        use, own = ("reading a stream", _STREAM_READ) if streaming else ("reading a batch", _BATCH_READ)
        options = OptionText(given, use, (*_CONNECTION, *_READ, *own), _OTHERS)
        connection = Connection.parse(options)
        topics, pattern = _subscription(options)
        starting = _bounds(options, "starting", "earliest", connection.namespace, topics, pattern)
        ending = Bounds("latest")
        if not streaming:
            ending = _bounds(options, "ending", "latest", connection.namespace, topics, pattern)
        _check_range(starting, ending, streaming=streaming)
        max_offsets = options.number("maxOffsetsPerTrigger") if streaming else None
        min_offsets, max_delay_ms = _least(options, max_offsets) if streaming else (None, TRIGGER_DELAY_MS)
        return cls(
            connection,
            topics,
            pattern,
            starting,
            ending,
            max_offsets,
            None if not streaming else options.number("maxBytesPerTrigger"),
            options.number("minPartitions", most=MAX_PARTITIONS),
            options.number("maxRecordsPerPartition"),
            options.flag("failOnDataLoss", default=True),
            options.count("fetchSize", 10_000, most=1_000_000),
            options.count("pollTimeoutMs", 1_000, least=0, most=MAX_POLL_TIMEOUT_MS),
            "committed" if options.one_of("isolation", ("committed", "uncommitted")) == "committed" else "uncommitted",
            options.flag("includeTransaction", default=False),
            None if streaming else _as_of_ms(options),
            min_offsets,
            max_delay_ms,
        )

    @classmethod
    def check(cls, given: Mapping[str, str]) -> None:
        """Check the options if some belong only to reads and none only to writes. Raises BadOption."""
        names = {name.lower() for name in given}
        if names & _lower(_READ, _BATCH_READ, _STREAM_READ) and not names & _lower(_WRITE, _BATCH_WRITE):
            cls.of_either(given)

    @classmethod
    def of_either(cls, given: Mapping[str, str]) -> ReadOptions:
        """Parse the options of a table, or else of a stream. Raises BadOption: they fit neither."""
        streaming = bool({name.lower() for name in given} & _lower(_STREAM_READ))
        try:
            return cls.parse(given, streaming=streaming)
        except BadOption:
            try:
                return cls.parse(given, streaming=not streaming)
            except BadOption:
                pass
            raise


def _lower(*names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name.lower() for some in names for name in some)


def _least(options: OptionText, max_offsets: int | None) -> tuple[int | None, int]:
    """Return the minimum number of messages in a micro-batch, and how long to wait for them."""
    min_offsets = options.number("minOffsetsPerTrigger")
    if min_offsets is None and "maxTriggerDelay" in options:
        raise BadOption("option maxTriggerDelay needs minOffsetsPerTrigger: nothing else delays a micro-batch")
    if min_offsets is not None and max_offsets is not None and min_offsets > max_offsets:
        raise BadOption("minOffsetsPerTrigger is more than maxOffsetsPerTrigger")
    return min_offsets, options.length_ms("maxTriggerDelay", TRIGGER_DELAY_MS)


def _as_of_ms(options: OptionText) -> int | None:
    as_of_ms = options.time_ms("asOfTimestamp", math.floor)
    if as_of_ms is not None and options.one_of("isolation", ("committed", "uncommitted")) == "uncommitted":
        raise BadOption("options asOfTimestamp and isolation uncommitted exclude each other")
    return as_of_ms


@dataclass(frozen=True)
class WriteOptions:
    """The parsed options of a write."""

    connection: Connection
    topic: str | None
    """None: the column ``topic`` names it."""
    producer_name: str | None
    sequence_id: int | None
    """Batches only: with ``producer_name`` it makes the save idempotent."""
    transaction_write_pointer: int | None
    """The write pointer of an outer transaction, which commits or aborts the rows."""
    store_batch_size: int
    """Messages per store request."""
    ordered: bool
    memory_s: int | None
    """Retention of the producer's state after its last publish or session; None: the daemon's default."""
    ttl_s: int | None
    checkpoint: str | None = None
    """Spark's own option: the folder of the query's checkpoint."""

    @classmethod
    def parse(cls, given: Mapping[str, str], *, streaming: bool) -> WriteOptions:
        """Raises BadOption."""
        use, own = ("writing a stream", ()) if streaming else ("writing a batch", _BATCH_WRITE)
        options = OptionText(given, use, (*_CONNECTION, *_WRITE, *own), _OTHERS)
        topic = options.text("topic")
        if topic is not None and not _TOPIC.match(topic):
            raise BadOption(f"option topic is {topic!r}; expected letters, digits, underscores and hyphens")
        if not streaming:
            options.exclude("transactionWritePointer", "producerName", "sequenceId", "memoryDays")
            if ("producerName" in options) != ("sequenceId" in options):
                raise BadOption("options producerName and sequenceId need each other: a save is identified by both")
            if "memoryDays" in options and "producerName" not in options:
                raise BadOption("option memoryDays needs producerName: no other save can be repeated")
        memory_days = options.number("memoryDays", STREAM_MEMORY_DAYS if streaming else None, most=36_500)
        return cls(
            Connection.parse(options),
            topic,
            options.text("producerName"),
            None if streaming else options.number("sequenceId", least=0),
            None if streaming else options.number("transactionWritePointer"),
            options.count("storeBatchSize", 5_000, most=65_536),
            options.flag("ordered", default=False),
            None if memory_days is None else memory_days * 86_400,
            options.number("ttlSeconds"),
            next((value for name, value in given.items() if name.lower() == "checkpointlocation"), None),
        )

    def calls(self) -> Calls:
        """A new client."""
        return self.connection.calls()


def _is_private(url: str) -> bool:
    """True if requests to the URL are encrypted, or stay on this machine."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    try:
        return parts.scheme == "https" or ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise BadOption(f"option url has {url!r}; expected http://host:port")
    try:
        parts.port  # noqa: B018  reading it raises ValueError if it is invalid
    except ValueError as error:
        raise BadOption(f"option url has {url!r}: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise BadOption("option url contains a password, which every worker would receive: use tokenFile")
    return url.rstrip("/")


def _subscription(options: OptionText) -> tuple[tuple[str, ...] | None, str]:
    options.exclude("subscribe", "subscribePattern")
    subscribe, pattern = options.text("subscribe"), options.text("subscribePattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise BadOption(f"option subscribePattern is {pattern!r}: {error}") from None
        return None, pattern
    if subscribe is None:
        raise BadOption("option subscribe is missing: a topic, or several with commas; or subscribePattern")
    topics = tuple(dict.fromkeys(topic.strip() for topic in subscribe.split(",")))
    for topic in topics:
        if not _TOPIC.match(topic):
            raise BadOption(f"option subscribe has {topic!r}; expected letters, digits, underscores and hyphens")
    return topics, ""


def _bounds(
    options: OptionText, which: str, default: str, namespace: str, topics: tuple[str, ...] | None, pattern: str
) -> Bounds:
    offsets, timestamp = f"{which}Offsets", f"{which}Timestamp"
    options.exclude(offsets, timestamp)
    time_ms = options.time_ms(timestamp)
    if time_ms is not None:
        return Bounds(time_ms)
    usual = "earliest" if default == "earliest" else "latest"
    bounds = parse_bounds(offsets, options.text(offsets) or usual, usual, namespace)  # type: ignore[arg-type]
    bounds.check_topics(offsets, topics, pattern)
    return bounds


def _check_range(starting: Bounds, ending: Bounds, *, streaming: bool) -> None:
    starts = [starting.default, *(each.bound for each in starting.by_topic.values())]
    ends = [ending.default, *(each.bound for each in ending.by_topic.values())]
    if not streaming and "latest" in starts:
        raise BadOption("startingOffsets is latest: a batch that starts at the end is always empty")
    if "earliest" in ends:
        raise BadOption("endingOffsets is earliest: a batch that ends at the start is always empty")
    for topic in ("", *starting.by_topic, *ending.by_topic):
        if _behind(starting.of(topic).bound, ending.of(topic).bound):
            of = f" of topic {topic}" if topic else ""
            raise BadOption(f"the start{of} is after the end")


def _behind(first: Bound, last: Bound) -> bool:
    if isinstance(first, str) or isinstance(last, str):
        return False
    ids = [at_time(bound) if isinstance(bound, int) else bound for bound in (first, last)]
    return ids[0] > ids[1]
