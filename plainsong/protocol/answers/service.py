"""Answers for operators: health, findings, the cluster, backups, definitions, the scrub and the second copy."""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict, get_args

from plainsong.protocol.answers.fields import Component, Count, Json, Milliseconds, Next, Positive, component

#: The kinds of events of ``GET /v1/events``.
EventKind: TypeAlias = Literal["topics", "transactions", "attention", "cluster"]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)

# --- health ----------------------------------------------------------------------------------------


class Liveness(TypedDict):
    """The daemon is alive."""

    alive: bool


class ReadinessReason(TypedDict):
    """A reason why something is not served."""

    code: str
    detail: str


class TransactionsHealth(TypedDict):
    """The transaction service, and why committed polls are refused, if they are."""

    service: str
    available: bool
    why: str | None


class ClusterHealth(TypedDict):
    """An instance's place in its cluster, and the instances that it failed to reach."""

    instance: str
    instances: Count
    zookeeper: bool
    since: Milliseconds
    unreachable: list[str]


class Readiness(TypedDict):
    """Readiness, with reasons if something is not served; without the right to inspect the service, only ``ready``."""

    ready: bool
    reasons: NotRequired[list[ReadinessReason]]
    transactions: NotRequired[TransactionsHealth]
    security: NotRequired[dict[str, Any]]
    cluster: NotRequired[ClusterHealth]


class DaemonVersion(TypedDict):
    """The version that is running."""

    version: str
    api: str
    avro: list[int]
    store: str


class GrantRow(TypedDict):
    """A grant of the caller."""

    verbs: list[str]
    on: list[str]


@component("Whoami")
class Whoami(TypedDict):
    """The caller and its grants."""

    name: str
    via: Literal["none", "token", "oidc", "cert", "unix"]
    credential: str | None
    expires: str | None
    groups: list[str]
    grants: list[GrantRow]


FindingKind: TypeAlias = Literal[
    "held-reader",
    "old-transaction",
    "expired-unread",
    "disk",
    "slow-sync",
    "certificate",
    "reload",
    "audit",
    "damaged",
    "unread",
    "low-space",
    "replication",
    "instance",
    "clock",
]
Severity: TypeAlias = Literal["warning", "critical"]


@component("Finding")
class FindingRow(TypedDict):
    """A finding that needs an operator's attention."""

    kind: FindingKind
    severity: Severity
    subject: str
    text: str
    sinceMs: Milliseconds | None
    link: Annotated[str, Json("its page in the console")]


# --- cluster ---------------------------------------------------------------------------------------


class SecurityDigests(TypedDict):
    """The beginnings of hashes of an instance's security files."""

    grants: str | None
    tokens: str


@component("Instance")
class InstanceRow(TypedDict):
    """An instance of a cluster."""

    name: str
    address: str
    weight: Positive
    leaving: bool
    drained: bool
    slices: Count
    topicsOpen: Count | None
    security: SecurityDigests | None


class ZooKeeperState(TypedDict):
    """The connection to ZooKeeper."""

    connected: bool
    since: Milliseconds


class TopicPlacement(TypedDict):
    """The owner of a topic."""

    name: str
    owner: str | None
    pinned: str | None


@component("Cluster")
class ClusterView(TypedDict):
    """The cluster, as one instance sees it."""

    instance: str
    address: str
    zookeeper: ZooKeeperState | None
    instances: list[InstanceRow]
    pins: dict[str, str]
    transactions: str | None
    topic: TopicPlacement | None


@component("Drained")
class DrainedInstance(TypedDict):
    """An instance, drained or not."""

    instance: str
    drained: bool


@component("Pinned")
class PinnedTopic(TypedDict):
    """The pin of a topic."""

    topic: str
    instance: str | None


# --- backups ---------------------------------------------------------------------------------------


RowTable: TypeAlias = Literal["messages", "payloads", "metadata"]
ObjectTable: TypeAlias = Literal["messages", "payloads", "metadata", "service"]


#: Declared as a dictionary, since ``from`` is a keyword of Python.
BackupLeftOut = TypedDict(
    "BackupLeftOut",
    {
        "table": RowTable,
        "from": Annotated[str, Json("an id for messages, a key in hex for other rows")],
        "to": str,
        "why": str,
    },
)
component("BackupLeftOut")(BackupLeftOut)


@component("BackupTopic")
class BackupTopic(TypedDict):
    """A topic of a backup."""

    namespace: str
    topic: str
    generation: Positive | None
    properties: dict[str, Any]
    deletedMs: Milliseconds | None


@component("BegunBackup")
class BegunBackup(TypedDict):
    """A cut that the daemon holds for a backup."""

    format: Positive
    id: str
    expiresMs: Annotated[Milliseconds, Json("when the cut ends, unless another request for it arrives")]
    createdMs: Milliseconds
    cutMs: Annotated[Milliseconds, Json("everything acknowledged before this time is in the backup")]
    store: str
    exact: Annotated[bool, Json("true if all topics are as of one instant")]
    version: str
    instances: list[str]
    topics: list[BackupTopic]
    leftOut: list[BackupLeftOut]


@component("BackupObject")
class BackupObject(TypedDict):
    """An object of a backup."""

    sha256: str
    table: ObjectTable
    rows: Positive
    bytes: Positive
    fromMs: Milliseconds | None
    toMs: Milliseconds | None


@component("BackupObjects")
class BackupObjects(TypedDict):
    """A page of the objects of a topic, or of no topic."""

    objects: list[BackupObject]
    leftOut: list[BackupLeftOut]
    next: Next
    line: Annotated[str, Json("on the last page: the topic's last position, 20 hex digits")] | None
    expiresMs: Milliseconds


class EndedBackup(TypedDict):
    """A backup that has ended."""

    id: str
    ended: bool


# --- definitions -----------------------------------------------------------------------------------


#: The properties of a topic, in requests.
_Properties: TypeAlias = Annotated[dict[str, Any], Component("Properties", of_requests=True)]


#: The parts of a document of definitions.
DEFINITION_PARTS = ("namespaces", "topics", "pins")


@component("Definitions")
class DefinitionsDocument(TypedDict):
    """The properties of namespaces and topics, and the pins, in requests and answers."""

    format: Annotated[int, Json(const=1)]
    namespaces: NotRequired[dict[str, dict[str, Any]]]
    topics: NotRequired[Annotated[dict[str, _Properties], Json("by namespace:topic")]]
    pins: NotRequired[Annotated[dict[str, str], Json("instances by namespace:topic")]]


# --- scrub -----------------------------------------------------------------------------------------


#: Declared as a dictionary, since ``from`` is a keyword of Python.
ScrubFindingRow = TypedDict(
    "ScrubFindingRow",
    {
        "namespace": str | None,
        "topic": str | None,
        "generation": Positive | None,
        "table": Literal["metadata", "message", "payload"],
        "from": str,
        "to": str,
        "rows": Positive | None,
        "why": str,
        "file": str | None,
    },
)
component("ScrubFinding")(ScrubFindingRow)


@component("ScrubUnread")
class ScrubUnread(TypedDict):
    """A topic that the store did not deliver."""

    namespace: str
    topic: str
    why: str


@component("Scrub")
class ScrubState(TypedDict):
    """The scrub's current round, or the last one."""

    state: Literal["off", "waiting", "running", "stopped"]
    startedMs: Milliseconds | None
    lastCompleteMs: Milliseconds | None
    rows: Count
    bytes: Count
    findings: list[ScrubFindingRow]
    moreFindings: Count
    unread: list[ScrubUnread]
    moreUnread: Count


@component("StartedScrub")
class StartedScrub(ScrubState):
    """The answer to a request for a round."""

    started: bool


# --- the second copy -------------------------------------------------------------------------------


@component("RegisteredStandby")
class RegisteredStandby(TypedDict):
    """A standby that follows the log of this primary, and can take over."""

    holder: Annotated[str, Json("its machine")]
    lastCommit: Annotated[Count, Json("the last commit that it had when it registered last")]


@component("Replication")
class ReplicationState(TypedDict):
    """The second copy of the store; without one, every field except ``role`` is null."""

    role: Literal["none", "primary", "standby"]
    to: str | None
    mode: Literal["async", "sync", None]
    epoch: Count | None
    lastCommit: Count | None
    countedCommit: Count | None
    lagCommits: Count | None
    lagBytes: Count | None
    lagMs: Count | None
    uploadedMs: Milliseconds | None
    error: str | None
    baseCommit: Count | None
    baseMs: Milliseconds | None
    oldestMs: Milliseconds | None
    givenUp: bool | None
    puts: Count
    putP50Ms: float | None
    putP99Ms: float | None
    urls: Annotated[list[str], Json("of a standby: where clients reach the primary")]
    standbys: Annotated[list[RegisteredStandby], Json("of a primary: those that may take over")]
    automatic: Annotated[bool | None, Json("a standby takes over by itself once the primary is lost")]


@component("TakenOver")
class TakenOver(TypedDict):
    """A standby has become the primary."""

    epoch: Count


@component("HandedOver")
class HandedOver(TypedDict):
    """A primary ends, so that a standby takes over."""

    epoch: Count
    lastCommit: Count
    automatic: Annotated[bool, Json("a standby takes over by itself; otherwise one must be asked to")]
