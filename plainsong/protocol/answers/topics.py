"""Answers about topics, their figures, producers and chains; and about namespaces."""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict

from plainsong.protocol.answers.fields import (
    Base64,
    Count,
    IdText,
    Json,
    Milliseconds,
    Next,
    Pointer,
    Positive,
    component,
)
from plainsong.protocol.answers.messages import PublishResponseFields
from plainsong.protocol.topic.producer_state import Level
from plainsong.protocol.transactions.asks import State

#: Null: from the first message on.
Bound: TypeAlias = Annotated[IdText, Json("counts from this position on; null: from the first message on")] | None
_SequenceId: TypeAlias = Annotated[int, Json("-1: none yet", minimum=-1)]
_Estimated: TypeAlias = Annotated[bool, Json("messages and bytes are upper bounds")]


@component("Deduplication")
class EffectiveDeduplication(TypedDict):
    """The deduplication in force for a topic."""

    enabled: Annotated[bool, Json("whether sequence ids of producers are remembered")]
    level: Annotated[Level, Json("the level at which this is set")]


@component("Topic", "with http.flat_topic_properties, only the properties", is_open=True)
class TopicDescription(TypedDict, total=False):
    """A topic and its properties."""

    name: str
    properties: dict[str, str]
    deduplication: EffectiveDeduplication


#: The columns that lists of topics are sorted by.
TopicColumn: TypeAlias = Literal[
    "name", "messages", "bytes", "oldestAgeMs", "publishPerSecond", "pollPerSecond", "hiddenMessages"
]


class TopicRow(TypedDict):
    """A topic in the list of all topics."""

    namespace: str
    name: str
    messages: Count
    bytes: Count
    estimated: _Estimated
    oldestAgeMs: Count | None
    publishPerSecond: float
    pollPerSecond: float
    openTransactions: Count
    hiddenMessages: Count
    parkedPolls: Count
    ttl: Positive
    owner: str | None


@component("TopicPage")
class TopicPage(TypedDict):
    """A page of the topics of all namespaces."""

    topics: list[TopicRow]
    total: Annotated[Count, Json("number of matching topics, on all pages")]
    next: Next


@component("DeletedTopic")
class DeletedTopic(TypedDict):
    """A deleted topic that can perhaps be restored."""

    namespace: NotRequired[Annotated[str, Json("only in the list of all namespaces")]]
    name: str
    generation: Positive
    deletedMs: Milliseconds
    undeleteUntilMs: Milliseconds
    state: Literal["kept", "partly-cleaned"]
    messages: Count
    bytes: Count


@component("DeletedTopics")
class DeletedTopics(TypedDict):
    """The deleted topics of all namespaces, latest deletion first."""

    topics: list[DeletedTopic]
    total: Count
    next: None


# --- figures ---------------------------------------------------------------------------------------


class DeliveryStats(TypedDict):
    """Percentiles of the time from publish to delivery, of polls that had waited; None without any."""

    p50: Count | None
    p99: Count | None


class ReaderStats(TypedDict):
    """The messages ahead of a committed reader."""

    visible: Count
    hidden: Count
    expiredUnread: Count
    estimated: bool


@component("Stats", is_open=True)
class TopicStats(TypedDict):
    """The figures of a topic; a later daemon may have more."""

    messages: Annotated[Count, Json("number of messages that can be read now")]
    bytes: Annotated[Count, Json("their size in the store")]
    estimated: _Estimated
    oldestId: Annotated[IdText, Json("id of the oldest message")] | None
    newestId: Annotated[IdText, Json("id of the newest message")] | None
    end: Annotated[IdText, Json("the position after the last published message, even if that has expired")]
    oldestAgeMs: Annotated[Count, Json("age of the oldest message, in milliseconds")] | None
    publishPerSecond: Annotated[float, Json("messages published per second, over about the last minute")]
    pollPerSecond: Annotated[float, Json("messages delivered by polls per second, over about the last minute")]
    endToEndMs: Annotated[DeliveryStats, Json("milliseconds from publish to delivery, of polls that had waited")]
    openTransactions: Annotated[Count, Json("number of undecided write pointers with messages in the topic")]
    producers: Annotated[Count, Json("number of producers that the topic remembers")]
    enabledFrom: Annotated[IdText, Json("sequence ids count from here on; null: from the first message on")] | None
    owner: Annotated[str, Json("host:port of the instance that owns the topic; null if there is only one")] | None
    parkedPolls: Annotated[Count, Json("number of polls that wait for a message now")]
    generation: Positive
    createdMs: Annotated[Milliseconds, Json("when this generation was created")]
    reader: NotRequired[Annotated[ReaderStats, Json("only with `?reader=`: the messages after that id")]]


@component("MessageCount")
class MessageCount(TypedDict):
    """Messages that a change hides, returns or removes."""

    messages: Count
    bytes: Count
    estimated: bool
    oldestMs: Milliseconds | None
    newestMs: Milliseconds | None


@component("History")
class History(TypedDict):
    """The last hour of a topic, minute by minute."""

    stepMs: Positive
    fromMs: Annotated[Milliseconds, Json("start of the first step; the last step is not complete yet")]
    published: list[Count]
    polled: list[Count]
    bytes: list[Count]


@component("ReaderLag")
class ReaderLag(TypedDict):
    """A reader of a topic, and what it has not read."""

    name: str
    kind: Literal["kept", "named"]
    position: IdText
    visible: Count
    hidden: Count
    expiredUnread: Count
    estimated: bool
    lagMs: Count
    lastSeenMs: Milliseconds
    by: str | None


@component("Lag")
class ReaderLags(TypedDict):
    """The readers of a topic, or a page of them."""

    readers: list[ReaderLag]
    total: NotRequired[Annotated[Count, Json("with limit: number of readers on all pages")]]
    next: NotRequired[Annotated[str, Json("with limit: `after` of the next page; null on the last page")] | None]


@component("Offsets")
class Offsets(TypedDict):
    """The end of a bounded read, and bounds that split it."""

    end: IdText
    count: Count
    bytes: Count
    splits: list[IdText]
    earliest: IdText
    expired: bool
    generation: Positive


@component("Maintenance")
class Maintenance(TypedDict):
    """The facts that a job that cleans a topic from outside can rely on."""

    generation: Positive
    expiredBefore: Milliseconds
    invalid: Annotated[list[Pointer], Json("write pointers; null: not known")] | None
    snapshotPosition: Bound


# --- changes ---------------------------------------------------------------------------------------


class TopicMessages(TypedDict):
    """The messages of a transaction in a topic; None if the topic did not answer."""

    topic: str
    messages: Count | None


class ReleasedReaders(TypedDict):
    """The polls and messages that the end of a transaction releases."""

    heldPolls: Count
    hiddenMessages: Count


class MovedTopics(TypedDict):
    """The topics that a drain moves; None if the instance did not answer."""

    topicsOpen: Count | None


@component(is_open=True)
class ChangeEffect(TypedDict):
    """The effect of a change. Only the first three are in every answer."""

    hides: MessageCount
    returns: MessageCount
    removes: MessageCount
    readers: NotRequired[Count]
    producers: NotRequired[Count]
    openTransactions: NotRequired[Count]
    parkedPolls: NotRequired[Count]
    undeleteUntilMs: NotRequired[Milliseconds]
    damagedRows: NotRequired[Count]
    unreadable: NotRequired[Count]
    topics: NotRequired[list[TopicMessages]]
    releases: NotRequired[ReleasedReaders]
    removed: NotRequired[Annotated[Count, Json("number of transactions taken off the invalid list")]]
    moves: NotRequired[MovedTopics]
    created: NotRequired[list[str]]
    changed: NotRequired[list[str]]
    deleted: NotRequired[list[str]]
    unchanged: NotRequired[list[str]]


@component("Change")
class ChangeReport(TypedDict):
    """The answer to a change, or to its dry run."""

    dryRun: bool
    action: str
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    changed: list[str]
    effect: ChangeEffect
    warnings: list[str]
    etag: str | None


@component("DrainReport")
class DrainReport(ChangeReport):
    """The answer to a drain; its dry run answers with the report alone."""

    instance: NotRequired[str]
    drained: NotRequired[bool]


@component("ImportReport")
class ImportReport(ChangeReport):
    """The answer to an import of definitions; its dry run has the lists in ``effect`` alone."""

    created: NotRequired[list[str]]
    deleted: NotRequired[list[str]]
    unchanged: NotRequired[list[str]]


@component("TruncateReport")
class TruncateReport(ChangeReport):
    """The answer to a truncation of the invalid list; its dry run answers with the report alone."""

    removed: NotRequired[Count]


@component("EndReport")
class EndReport(ChangeReport):
    """The answer to an abort or an invalidation that returns its effect; its dry run has no ``id`` and ``state``."""

    id: NotRequired[Pointer]
    state: NotRequired[State]


@component("UndeletedTopic", is_open=True)
class UndeletedTopic(ChangeReport):
    """A topic that was restored; its dry run answers with the report alone."""

    name: NotRequired[str]
    properties: NotRequired[dict[str, str]]
    deduplication: NotRequired[EffectiveDeduplication]


# --- chains ----------------------------------------------------------------------------------------


class HeadSignature(TypedDict):
    """The signature of a head, as in Standard Webhooks."""

    id: str
    timestamp: Annotated[Count, Json("seconds since 1970")]
    payload: Annotated[str, Json("the signed text, after id and timestamp")]
    signature: Annotated[str, Json("signature of id.timestamp.payload, as in Standard Webhooks")]


@component("ChainHead")
class ChainHeadFields(TypedDict):
    """The last entry of a chain."""

    topic: Annotated[str, Json("namespace:topic")]
    generation: Positive
    count: Annotated[Positive, Json("number of entries, and the number of the last one")]
    id: Annotated[IdText, Json("id of the last entry")]
    atMs: Annotated[Milliseconds, Json("when the last entry was written")]
    hash: Annotated[str, Json("link of the last entry, SHA-256", pattern="^[0-9a-f]{64}$")]


@component("SignedHead")
class SignedHead(ChainHeadFields):
    """The last entry of a chain, signed if the daemon has a secret."""

    signature: Annotated[HeadSignature, Json("null if topic.chain_secret_file is not set")] | None


class ChainEntryFields(TypedDict):
    """An entry of a chain."""

    id: IdText
    base64: Base64


class ChainedMessage(TypedDict):
    """A message that an entry covers."""

    id: IdText
    base64: Base64 | None
    row: NotRequired[Annotated[Base64, Json("for stored messages and the row that publishes them: the row as stored")]]
    writePointer: NotRequired[Annotated[str, Json("negative: rolled back")]]
    attributes: NotRequired[dict[str, str]]
    ttlSeconds: NotRequired[Annotated[Positive, Json("the message's own ttl; absent if it has none")]]


@component("ChainEntries")
class ChainPage(TypedDict):
    """Entries of a chain, with the messages that they cover."""

    head: ChainHeadFields
    entries: list[ChainEntryFields]
    messages: list[ChainedMessage]
    next: Annotated[IdText, Json("`after` of the next page; null on the last page")] | None
    oldestMs: Annotated[Milliseconds, Json("everything published earlier has expired")]
    nowMs: Annotated[Milliseconds, Json("the topic's time")]
    undecided: list[Annotated[str, Json("a write pointer that may still be rolled back")]]


# --- producers -------------------------------------------------------------------------------------


class RecentPublish(TypedDict):
    """A recent request of a producer."""

    first: Count
    last: Count
    firstId: IdText
    lastId: IdText
    response: PublishResponseFields | None


@component("Producer")
class ProducerState(TypedDict):
    """A producer, as a topic remembers it."""

    producer: str
    epoch: Count
    lastSequenceId: _SequenceId
    generation: Positive
    enabledFrom: Bound
    activeMs: Milliseconds
    expiresMs: Milliseconds
    recent: list[RecentPublish]


class ProducerRow(TypedDict):
    """A producer in the list of a topic."""

    producer: str
    epoch: Count
    pushed: _SequenceId
    persisted: _SequenceId
    activeMs: Milliseconds
    expiresMs: Milliseconds
    damaged: bool


class ProducerSnapshot(TypedDict):
    """The last snapshot of a topic's producers."""

    position: Bound
    ageMs: Count | None
    entriesSince: Count


class ProducerReplay(TypedDict):
    """The requests that the last start read again to restore the producers."""

    entries: Count
    ms: Count


@component("Producers")
class ProducerList(TypedDict):
    """A page of a topic's producers, and how the topic remembers them."""

    deduplication: EffectiveDeduplication
    enabledFrom: Bound
    generation: Positive
    count: Count
    snapshot: ProducerSnapshot
    lastReplay: ProducerReplay
    producers: list[ProducerRow]
    next: Annotated[str, Json("the name to continue after; null on the last page")] | None


# --- namespaces ------------------------------------------------------------------------------------


@component("NamespaceProperties")
class NamespaceSettings(TypedDict, total=False):
    """The properties of a namespace, in requests and answers."""

    deduplication: Annotated[Literal["inherit", "enabled", "disabled"], Json(default="inherit")]


@component("Namespace")
class NamespaceDescription(TypedDict):
    """A namespace, and what applies to a topic that inherits."""

    name: str
    properties: NamespaceSettings
    deduplication: EffectiveDeduplication
