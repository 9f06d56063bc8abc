"""The settings of the broker, by section: default, unit, bounds, and what happens at both ends of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from broker.config.values import (
    Address,
    parse_address,
    parse_binds,
)
from storage.settings import (
    CENTURY_S,
    GIB,
    KIB,
    MIB,
    TIB,
    binds,
    choice,
    count,
    file_name,
    milliseconds,
    optional_address,
    seconds,
    size,
    switch,
    text,
    whole_seconds,
)

if TYPE_CHECKING:
    from broker.config.values import Bind


@dataclass(frozen=True, slots=True)
class PollConfig:
    """Limits of pages of messages, and of long polls."""

    max_messages: int = count(
        100_000,
        "Messages in one page, even if the request asks for more.",
        small="readers that are far behind need many requests",
        large="one page delays other requests",
        high=10_000_000,
    )
    max_bytes: int = size(
        16 * MIB,
        "Bytes of payload in one page; at least one message is always returned.",
        small="readers that are far behind need many requests",
        large="memory grows with the number of concurrent readers",
        low=1,
        high=1 * GIB,
    )
    max_wait_ms: int = milliseconds(
        60_000,
        "The longest wait of a poll, even if the request asks for more.",
        small="idle consumers poll often",
        large="proxies in between close the connection first",
        low=0,
        high=3_600_000,
    )


# --- front -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP listener: its addresses, and limits of requests and answers."""

    bind: str = binds(
        "127.0.0.1:7420",
        "Where to listen, comma-separated: addresses with ports (0 picks a free one, which the banner shows), and "
        "Unix sockets as unix:/run/plainsong.sock.",
    )
    unix_mode: str = text(
        "0660",
        "The permissions of Unix sockets in http.bind; a user with write permission can connect.",
        pattern=r"0?[0-7]{3}",
        expected='text like "0660"',
    )
    processes: int = count(
        1,
        "Front ends: with more than one, this many processes accept connections and read requests, and a separate "
        "process owns the topics.",
        small="reading requests and writing answers keeps one core busy while others are idle",
        large="each uses memory, and more of them than cores do not help",
        high=64,
    )
    max_body_bytes: int = size(
        64 * MIB,
        "The largest body of a request, even after decompression; beyond it the answer is 413.",
        small="large batches are refused",
        large="a few clients can fill http.max_inflight_bytes",
        low=KIB,
        high=1 * GIB,
    )
    max_connections: int = count(
        10_000,
        "Open connections; a further one gets 503 overloaded and is closed.",
        small="clients are refused while the daemon is idle",
        large="the limit on open files is reached first, or memory runs out",
        high=1_000_000,
    )
    max_inflight_bytes: int = size(
        256 * MIB,
        (
            "Memory for request bodies of all connections, compressed and decompressed; beyond it the answer is 503 "
            "overloaded."
        ),
        small="concurrent large publishes are refused",
        large="the daemon uses this much more memory under load",
        low=KIB,
        high=1024 * GIB,
    )
    max_answer_bytes: int = size(
        256 * MIB,
        "Memory for answers until their clients have received them; as it fills up pages get shorter, and beyond it "
        "the answer is 503 overloaded.",
        small="readers that are far behind get short pages, and need many requests",
        large="the daemon uses this much more memory if clients do not read",
        low=MIB,
        high=1024 * GIB,
    )
    keep_alive_s: float = seconds(
        75.0,
        "How long an idle connection stays open.",
        small="clients that re-send a POST on a closed connection duplicate messages (the JDK's client keeps idle ones "
        "for 5 s)",
        large="connections of vanished clients count against http.max_connections until then",
        low=1.0,
        high=86_400.0,
    )
    header_timeout_s: float = seconds(
        10.0,
        "The time limit for the head of a request, from its first byte; if authentication is required, the first "
        "head's time starts with the connection.",
        small="clients on slow networks are disconnected",
        large="stalled clients keep their connections",
        low=0.1,
        high=3_600.0,
    )
    body_timeout_s: float = seconds(
        30.0,
        "The time limit for the body of a request, from the end of its head; each http.body_min_bytes_per_s received "
        "adds a second.",
        small="large bodies over slow networks are cut off",
        large="bodies of stalled clients count against http.max_inflight_bytes",
        low=0.1,
        high=86_400.0,
    )
    body_min_bytes_per_s: int = size(
        16 * KIB,
        "The minimum rate of a body after http.body_timeout_s, and of a client that reads an answer after "
        "http.send_timeout_s.",
        small="clients that send or read slowly occupy memory for long",
        large="clients on slow networks are disconnected",
        low=1,
        high=1 * GIB,
    )
    body_max_s: float = seconds(
        600.0,
        "The time limit for a body at any rate.",
        small="large bodies over slow networks are cut off",
        large="slow clients occupy memory for that long",
        low=1.0,
        high=86_400.0,
    )
    send_timeout_s: float = seconds(
        30.0,
        "How long a client may read nothing of its answer before it is disconnected.",
        small="readers that pause between pages of a long answer lose it",
        large="clients that stopped reading occupy memory until then",
        low=0.1,
        high=86_400.0,
    )
    flat_topic_properties: bool = switch(
        False, "Answer GET of a topic with only the property map, as the original service does."
    )
    gzip_min_bytes: int = size(
        1 * KIB,
        "Compress answers of at least this size if the client accepts gzip.",
        small="time is spent on answers that hardly shrink",
        large="answers that would shrink much are sent uncompressed",
        low=0,
        high=1 * GIB,
    )

    @property
    def binds(self) -> list[Bind]:
        """``bind``, parsed."""
        return parse_binds(self.bind)

    @property
    def address(self) -> Address | None:
        """The first address of ``bind``, by which other machines may reach this one; None if all are Unix sockets."""
        return next((bind for bind in self.binds if isinstance(bind, Address)), None)


# --- security --------------------------------------------------------------------------------------


_NAME = r"[\w-]+(?:\.[\w-]+)*\.?"
_CONTACT = r"(?:mailto:[^\s,@]+@[^\s,@]+|https://[^\s,]+|tel:\+?[\d-]+)"
_ORIGIN = r"https?://(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d{1,5})?"


_ALGORITHMS = "(?:RS|PS|ES)(?:256|384|512)|EdDSA"


@dataclass(frozen=True, slots=True)
class OidcConfig:
    """The OpenID provider whose tokens are accepted; issuer, audience and jwks, or none of the three."""

    issuer: str = text("", "The issuer, as in the claim iss of its tokens; empty: no provider.")
    audience: str = text("", "The audience that aud of a token must contain: this service's name at the provider.")
    jwks: str = file_name(
        "The provider's keys (JWKS): an https URL (http only to this machine), or a file.",
        pattern=r"(?:https://\S+|http://(?:127(?:\.\d{1,3}){3}|\[::1\]|localhost)(?:[:/]\S*)?|(?!https?:)\S.*)?",
        expected="an https URL, an http URL of this machine, or a path",
    )
    algorithms: str = text(
        "RS256,ES256,EdDSA",
        "The accepted signature algorithms, comma-separated; HS256 and none never are.",
        pattern=rf"(?:{_ALGORITHMS})(?:\s*,\s*(?:{_ALGORITHMS}))*",
        expected="a list of RS, PS or ES with 256, 384 or 512, and EdDSA",
    )
    name_claim: str = text("sub", "The claim with the caller's name.", pattern=r"\S{1,100}", expected="a claim")
    groups_claim: str = text("groups", "The claim with the caller's groups.", pattern=r"\S{1,100}", expected="a claim")
    name_prefix: str = text(
        "oidc:",
        "The prefix of the caller's name before that claim, so that the provider cannot issue other names.",
        pattern=r"(?!cert:|unix:)[A-Za-z0-9_.@/+=-]{0,64}:",
        expected="up to 64 letters, digits and _.@/+=-, and a colon; not cert: or unix:, which have another meaning",
    )
    skew_s: int = whole_seconds(
        60,
        "How far the provider's clock may differ from this one.",
        small="tokens are refused whenever the clocks differ",
        large="tokens are accepted that much longer than they say",
        low=0,
        high=3_600,
    )
    refresh_s: int = whole_seconds(
        300,
        "How often the keys are fetched.",
        small="the provider gets many requests",
        large="withdrawn keys are accepted that much longer",
        low=5,
        high=86_400,
    )
    max_stale_s: int = whole_seconds(
        86_400,
        (
            "How long the last keys are used while the provider cannot be reached; after it, requests with its tokens "
            "get 503."
        ),
        small="an outage of the provider soon becomes an outage for its callers",
        large="keys withdrawn during an outage are accepted that much longer",
        low=0,
        high=30 * 86_400,
    )
    require_typ: bool = switch(False, "Accept only tokens whose header says typ at+jwt (RFC 9068).")


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Access to the daemon: authentication, grants, audit, and the web pages that may use it."""

    authentication: str = choice(
        "off",
        "off: every request is allowed, as `anonymous`. required: every request must be authenticated, except /ping, "
        "/livez, /readyz and the console's files.",
        "off",
        "required",
    )
    tokens_file: str = file_name("The file with the daemon's own tokens, written by plainsong token; empty: none.")
    grants_file: str = file_name(
        "The file with the grants of names; empty: no grants, so nothing is allowed once authentication is required."
    )
    reload_s: int = whole_seconds(
        1,
        "How often the files of this section are checked for changes; SIGHUP checks at once. 0: only on SIGHUP.",
        small="the files are checked often, at almost no cost",
        large="a revoked token is accepted that much longer",
        low=0,
        high=3_600,
    )
    certificate_name: str = choice(
        "san-dns",
        "Which name of a client certificate becomes the caller's name, after cert: (the first of that kind).",
        "san-dns",
        "san-uri",
        "subject-cn",
        "subject-dn",
    )
    unix_names: bool = switch(
        False, ("Name the peer of a Unix socket unix: and its user's name, as the kernel reports it.")
    )
    audit: str = choice(
        "best-effort",
        "How changes depend on their record in the topic system:audit. required: a change that cannot be recorded is "
        "refused. best-effort: it happens, and lost records are counted.",
        "best-effort",
        "required",
    )

    allow_insecure: str = text(
        "",
        "Protections that a daemon which other machines can reach may lack, comma-separated: authentication, tls, "
        "thrift (certificates at transactions.thrift), peers (a secret between instances). Otherwise it does not "
        "start.",
        pattern=r"(?:\s*(?:authentication|tls|thrift|peers)\s*(?:,\s*(?:authentication|tls|thrift|peers)\s*)*)?",
        expected='text like "authentication,tls"; the words are authentication, tls, thrift and peers',
    )
    allowed_hosts: str = text(
        "",
        "Host names by which clients may address this daemon, comma-separated; *.example.org matches every name "
        "below it. IP addresses, localhost, and the hosts of http.bind and cluster.advertise are always allowed.",
        pattern=rf"(?:(?:\*\.)?{_NAME}(?:\s*,\s*(?:\*\.)?{_NAME})*)?",
        expected='text like "queue.example.org,*.internal.example.org"',
    )
    allowed_origins: str = text(
        "",
        "Origins whose pages may use this daemon from a browser, comma-separated, each exact; the daemon's own pages "
        "always may, all others never.",
        pattern=rf"(?:{_ORIGIN}(?:\s*,\s*{_ORIGIN})*)?",
        expected='text like "https://tools.example.org,http://localhost:3000"; * is not allowed',
    )
    contact: str = text(
        "",
        "Contacts for reporting a vulnerability in this daemon, comma-separated, preferred first; public at "
        "/.well-known/security.txt. Empty: there is no such file.",
        pattern=rf"(?:{_CONTACT}(?:\s*,\s*{_CONTACT})*)?",
        expected='text like "mailto:security@example.org,https://example.org/report"',
    )
    oidc: OidcConfig = field(default_factory=OidcConfig)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS on all addresses of http.bind except Unix sockets, and on links to other instances."""

    certificate: str = file_name(
        "PEM file with this daemon's certificate and its chain; empty: no TLS. This file and the others are reloaded "
        "when they change, for new connections; see security.reload_s.",
    )
    key: str = file_name("PEM file with its key, without a password; other users must have no access to it.")
    minimum: str = choice("1.2", "The oldest TLS version that is accepted.", "1.2", "1.3")
    client_ca: str = file_name(
        "PEM file with the authorities that sign the certificates of clients and other instances."
    )
    client_certificates: str = choice(
        "off",
        "Whether clients are asked for a certificate. optional: a certificate is checked if the client presents one. "
        "required: connections without one are refused.",
        "off",
        "optional",
        "required",
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The daemon's log, on its standard output."""

    format: str = choice("text", "Lines for people, or one JSON object per line for programs.", "text", "json")
    level: str = choice("info", "The lowest level that is logged.", "debug", "info", "warning", "error")
    queue_lines: int = count(
        10_000,
        "Lines queued for a slow output; further ones are dropped and counted, and no request waits for logging.",
        small="bursts leave gaps in the log",
        large="queued lines use memory while the output is blocked",
        low=16,
        high=10_000_000,
    )
    access: bool = switch(False, "Log every request; small publishes get slower.")


@dataclass(frozen=True, slots=True)
class ConsoleConfig:
    """The console in the browser."""

    enabled: bool = switch(
        True, "Serve the console at /console: its files are public, its data comes from the other routes."
    )


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Metrics for Prometheus."""

    open: bool = switch(
        False,
        'With security.authentication = "required": allow GET /metrics without authentication; /metrics/topics, '
        "which has topics' names, stays protected.",
    )


@dataclass(frozen=True, slots=True)
class OtelConfig:
    """Traces of the daemon, by OpenTelemetry."""

    endpoint: str = text(
        "",
        "The collector that receives spans by OTLP over HTTP, such as http://127.0.0.1:4318; empty: no spans. Only "
        "requests with a sampled traceparent have one.",
        pattern=r"(?:https?://\S+)?",
        expected="an http or https URL",
    )


@dataclass(frozen=True, slots=True)
class ShutdownConfig:
    """The shutdown of the daemon."""

    drain_s: float = seconds(
        10.0,
        "How long after SIGTERM accepted requests may take to finish; waiting polls are answered at once.",
        small="answers of large requests are cut off, and their clients do not get the outcome",
        large="a stuck disk or client delays the exit by that much",
        low=0.0,
        high=3_600.0,
    )


# --- keeping ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The scan cache: recent messages of all topics in memory."""

    max_bytes: int = size(
        64 * MIB,
        (
            "The memory of the scan cache for all topics, up to an eighth of it for pages that are read repeatedly, or "
            "ahead; 0 switches it off."
        ),
        small="readers that are up to date read from the store",
        large="memory that the rest of the daemon cannot use",
        low=0,
        high=256 * GIB,
    )


@dataclass(frozen=True, slots=True)
class BackupConfig:
    """Backups, read by a client while the daemon serves."""

    hold_s: int = whole_seconds(
        600,
        "How long the cut of a backup is held after its client's last request.",
        small="a backup with a slow client fails and has to start again",
        large="if a client dies, the space of removed messages is freed that much later",
        low=1,
        high=86_400,
    )
    bytes_per_s: int = size(
        0,
        "How much of the store a backup reads per second, twice for new rows; 0: as much as its pauses allow, which "
        "leave publishes and polls most of their rate.",
        small="backups take long, and the space of removed messages is freed later",
        large="a slow disk has less left for requests",
        low=0,
        high=1 * TIB,
    )


@dataclass(frozen=True, slots=True)
class ReadersConfig:
    """Positions of readers that are saved with the daemon."""

    retention_s: int = whole_seconds(
        7_776_000,
        "How long a reader's position is kept after its last change; 90 days by default.",
        small="a reader that pauses for longer starts over",
        large="positions of abandoned readers are kept",
        low=1,
        high=CENTURY_S,
    )
    max_per_topic: int = count(
        1_000,
        "Saved reader positions per topic; beyond it a new reader is refused.",
        small="readers have to save their positions themselves",
        large="a client that generates reader names fills the store",
        high=1_000_000,
    )


# --- deduplicating ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeduplicationConfig:
    """Producers: messages with sequence ids are stored once."""

    default: bool = switch(
        True,
        "Remember sequence ids of producers, unless the topic or its namespace says otherwise; costs nothing without "
        "producers.",
    )
    snapshot_entries: int = count(
        1_000,
        "A topic writes a snapshot of its producers after this many of their requests.",
        small="more rows to write",
        large="a topic takes longer to load after a crash",
    )
    snapshot_interval_s: float = seconds(
        120.0,
        "A topic writes a snapshot of its producers this long after a change.",
        small="more rows to write",
        large="a topic takes longer to load after a crash",
        low=0.01,
        high=86_400.0,
    )
    producer_retention_s: int = whole_seconds(
        604_800,
        "How long an idle producer is remembered; 7 days by default.",
        small="a producer that pauses may store a message twice",
        large="short-lived producers use memory and disk space for longer",
        low=1,
        high=CENTURY_S,
    )
    max_retention_s: int = whole_seconds(
        15_552_000,
        "The longest retention that a producer may ask for when it opens its session; 180 days by default.",
        small="producers that pause for long are forgotten",
        large="abandoned producers are kept",
        low=1,
        high=CENTURY_S,
    )
    max_producers: int = count(
        10_000,
        "Producers remembered per topic; a new one replaces the one that was idle longest, or the answer is 503 "
        "too_many_producers.",
        small="new producers are refused",
        large="more memory, and a longer load of the topic",
        high=1_000_000,
    )
    max_long_producers: int = count(
        1_000,
        "How many of them may be remembered for longer than deduplication.producer_retention_s.",
        small="producers that pause for long are refused",
        large="they displace others",
        low=0,
        high=1_000_000,
    )
    answer_timeout_s: float = seconds(
        30.0,
        "The time limit of a producer's publish in the store; after it the answer is 503 outcome_unknown, and the "
        "publish may still happen.",
        small="with a slow disk producers often get an unknown outcome",
        large="producers notice problems late",
        low=0.01,
        high=3_600.0,
    )


# --- transacting -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransactionsConfig:
    """Transactions: the service that decides them, and its limits."""

    service: str = choice(
        "embedded",
        "The service that decides transactions: this daemon's own, the Tephra at transactions.tephra, or none "
        "(publishing under a pointer and polling with a snapshot still work). It can be changed while no undecided "
        "pointer has messages here.",
        "embedded",
        "tephra",
        "off",
    )
    tephra: str = optional_address("The Thrift address of the Tephra that decides transactions; empty: none.")
    tephra_refresh_s: float = seconds(
        5.0,
        "How often that Tephra's state is fetched.",
        small="Tephra sends its whole state all the time",
        large="committed polls see commits that much later",
        low=0.05,
        high=3_600.0,
    )
    thrift: str = optional_address(
        "The address on which the embedded service serves Tephra's clients by Thrift; empty: none. While it is set, "
        "the invalid list is not pruned automatically, since other stores may rely on it."
    )
    thrift_tls: bool = switch(False, "Use TLS at transactions.thrift, with the certificate of the section tls.")
    timeout_s: int = whole_seconds(
        30,
        "The default time-out of a short transaction.",
        small="clients that pause lose their transactions",
        large="a client that died blocks committed readers for that long",
        low=1,
        high=CENTURY_S,
    )
    max_timeout_s: int = whole_seconds(
        3_600,
        "The longest time-out a short transaction may ask for; an hour by default.",
        small="clients with long work have to begin long transactions",
        large="a client that died blocks committed readers for that long",
        low=1,
        high=CENTURY_S,
    )
    long_timeout_s: int = whole_seconds(
        86_400,
        "The time-out of a long transaction; a day by default.",
        small="batch jobs lose their transactions",
        large="a job that died blocks committed readers for that long",
        low=1,
        high=CENTURY_S,
    )
    max_lifetime_s: int = whole_seconds(
        90_000,
        "The age beyond which a write pointer is refused with 409 transaction_expired; 25 hours by default. 0 "
        "switches this check and the pruning of the invalid list off.",
        small="long transactions cannot publish",
        large="messages of forgotten transactions can still appear, and the invalid list grows until then",
        low=0,
        high=CENTURY_S,
    )
    max_open: int = count(
        20_000,
        "Transactions in progress; beyond it a new one gets 503 overloaded.",
        small="clients are refused",
        large="every snapshot lists all of them, and grows by 8 bytes for each",
        high=1_000_000,
    )
    max_invalid: int = count(
        100_000,
        "Pointers on the invalid list; beyond it no transaction begins until some are pruned.",
        small="after many time-outs no client can begin a transaction",
        large="every snapshot lists all of them, and grows by 8 bytes for each",
    )
    max_outcomes: int = count(
        200_000,
        "Decided transactions with a remembered outcome; beyond it the oldest is forgotten.",
        small="a client that lost the answer to its commit may not find out the outcome",
        large="more memory, and a longer start",
    )
    outcome_retention_s: int = whole_seconds(
        90_000,
        "How long the outcome of a transaction is remembered; 25 hours by default.",
        small="a client that lost the answer to its commit may not find out the outcome",
        large="more memory, and a longer start",
        low=1,
        high=CENTURY_S,
    )
    max_change_set_bytes: int = size(
        16 * MIB,
        (
            "The total size of the keys in one transaction's change set; beyond it the answer is 413 "
            "transaction_too_large."
        ),
        small="transactions with many changes cannot be committed",
        large="change sets use the service's memory",
        low=KIB,
        high=1 * GIB,
    )
    max_per_topic: int = count(
        65_536,
        "Undecided write pointers with messages in one topic; beyond it a new one gets 503 overloaded.",
        small="publishes under further transactions are refused",
        large="more memory, and a longer load of the topic",
        high=1_000_000,
    )
    max_held_polls: int = count(
        10_000,
        "Committed polls that wait for a transaction to be decided; beyond it the answer is 503 overloaded.",
        small="consumers are refused",
        large="waiting consumers use memory",
        high=1_000_000,
    )
    commit_deadline_s: float = seconds(
        15.0,
        "With several instances: how long a commit waits for the next of its topics to finish its writes, counted "
        "from the last one that did; after it nothing has happened, and the commit can be sent again. All topics "
        "together may take this long for every 16 of them. At least cluster.session_timeout_s and 3 s.",
        small="commits fail while topics move, and have to be sent again",
        large="commits wait for a topic that does not answer",
        low=0.1,
        high=3_600.0,
    )
    abort_deadline_s: float = seconds(
        15.0,
        "How long an abort waits for the next topic to roll back the transaction's messages, counted from the last "
        "one that did; after it the transaction is invalid. All topics together may take this long for every 16 of "
        "them. With several instances at least cluster.session_timeout_s and 3 s.",
        small="aborts become invalidations while topics are being loaded, or move",
        large="aborts wait for a topic that does not answer",
        low=0.1,
        high=3_600.0,
    )
    prune: bool = switch(
        True,
        "Remove pointers from the invalid list once all their messages are rolled back and they are older than "
        "transactions.max_lifetime_s; never while transactions.thrift is set.",
    )


# --- clustering ------------------------------------------------------------------------------------


#: The path of the nodes when ``cluster.zookeeper`` names none.
DEFAULT_PATH = "/plainsong"
#: Time from the end of a dead owner's session to the first answer of the next owner.
TAKE_OVER_S = 3.0
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5}"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Several instances as one service, coordinated by ZooKeeper."""

    zookeeper: str = text(
        "",
        "The ZooKeeper ensemble through which instances find each other, as host:port[,host:port...][/path], by "
        "default at /plainsong; empty: a single instance, which owns all topics. Needs storage.kind = hbase.",
        pattern=rf"(?:{_HOST}(?:,{_HOST})*(?:/[\w./-]*)?)?",
        expected='text like "zk1:2181,zk2:2181,zk3:2181/plainsong"',
    )
    instance: str = text(
        "",
        "The name of this instance, unique and stable across restarts; empty: the host's name and the port.",
        pattern=r"[\w.-]{0,100}",
        expected="up to 100 letters, digits, _, - and .",
    )
    advertise: str = optional_address(
        "The address at which clients and other instances reach this one; empty: http.bind, if that names one machine."
    )
    session_timeout_s: float = seconds(
        10.0,
        "How long an instance may be silent before its topics move to the others; ZooKeeper limits it to 2 to 20 of "
        "its ticks.",
        small="a short pause of an instance, or of ZooKeeper, moves its topics",
        large="topics of an instance that died are not served until then",
        low=1.0,
        high=600.0,
    )
    zookeeper_auth_file: str = file_name(
        "The file with one line, digest USER:PASSWORD: the credential at ZooKeeper, which then lets only this "
        "deployment read and change its nodes. Empty: every client of ZooKeeper can.",
    )
    zookeeper_tls: bool = switch(False, "Use TLS to ZooKeeper.")
    zookeeper_ca: str = file_name("PEM file with the authorities that sign ZooKeeper's certificates.")
    zookeeper_certificate: str = file_name("PEM file with the certificate to present to ZooKeeper; empty: none.")
    zookeeper_key: str = file_name("PEM file with the key of that certificate.")
    secret_file: str = file_name(
        "The file with the secret that all instances share, one line of 32 bytes or more, with which they "
        "authenticate each other; empty: none.",
    )
    weight: int = count(
        100,
        "This instance's share of the topics, relative to the others'.",
        small="the others own more",
        large="this one owns more than it can serve",
        high=1_000_000,
    )

    @property
    def take_over_s(self) -> float:
        """Maximum time for which the topics of a dead instance have no owner; 0 without other instances."""
        return self.session_timeout_s + TAKE_OVER_S if self.zookeeper else 0.0


class Ensemble(NamedTuple):
    """The parts of ``cluster.zookeeper``."""

    hosts: str
    """``host:port``, separated by commas."""
    path: str
    """Path of the nodes; begins with a slash and does not end with one."""


def parse_ensemble(ensemble: str) -> Ensemble:
    """Split ``cluster.zookeeper``. Raises ValueError if an address or the path is malformed."""
    hosts, slash, path = ensemble.partition("/")
    for host in hosts.split(","):
        parse_address(host)
    steps = [step for step in path.split("/") if step]
    if any(step in (".", "..") for step in steps):
        raise ValueError(f"{slash}{path} is not a path of ZooKeeper")
    return Ensemble(hosts, "/" + "/".join(steps) if steps else DEFAULT_PATH)


def is_wildcard(address: Address) -> bool:
    """True if the host means all addresses of a machine, to which no other machine can connect."""
    return address.host in ("0.0.0.0", "::", "*")  # noqa: S104 - compared, not listened on
