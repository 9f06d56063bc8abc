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
    """Limits of polls: the size of a page, and the wait for messages."""

    max_messages: int = count(
        100_000,
        "Maximum messages per page, whatever the request asks for.",
        small="readers that are far behind need many requests",
        large="one page delays other requests",
        high=10_000_000,
    )
    max_bytes: int = size(
        16 * MIB,
        "Maximum bytes of payload per page; a page always holds at least one message.",
        small="readers that are far behind need many requests",
        large="memory grows with the number of concurrent readers",
        low=1,
        high=1 * GIB,
    )
    max_wait_ms: int = milliseconds(
        60_000,
        "Maximum wait of a long poll, whatever the request asks for.",
        small="idle consumers poll often",
        large="proxies between client and daemon close the connection first",
        low=0,
        high=3_600_000,
    )


# --- front -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP listener: its addresses, and limits of requests and answers."""

    bind: str = binds(
        "127.0.0.1:7420",
        "Addresses to listen on, comma-separated: host:port (with port 0 the daemon picks a free port and prints it "
        "at startup), or a Unix socket as unix:/run/plainsong.sock.",
    )
    unix_mode: str = text(
        "0660",
        "File mode of the Unix sockets in http.bind; a user needs write permission to connect.",
        pattern=r"0?[0-7]{3}",
        expected='text like "0660"',
    )
    processes: int = count(
        1,
        "Front-end processes. 1: one process does everything. More: this many processes accept connections and read "
        "requests, and another one owns the topics.",
        small="one core is busy reading requests and writing answers while others are idle",
        large="each process uses memory, and more processes than cores do not help",
        high=64,
    )
    max_body_bytes: int = size(
        64 * MIB,
        "Maximum size of a request body, before and after decompression; a larger one gets 413.",
        small="large batches are refused",
        large="a few clients can fill http.max_inflight_bytes",
        low=KIB,
        high=1 * GIB,
    )
    max_connections: int = count(
        10_000,
        "Maximum open connections; a further one gets 503 overloaded and is closed.",
        small="clients are refused while the daemon is idle",
        large="the daemon reaches its limit on open files first, or runs out of memory",
        high=1_000_000,
    )
    max_inflight_bytes: int = size(
        256 * MIB,
        (
            "Memory for the request bodies of all connections, compressed and decompressed; beyond it requests get "
            "503 overloaded."
        ),
        small="concurrent large publishes are refused",
        large="the daemon uses this much more memory under load",
        low=KIB,
        high=1024 * GIB,
    )
    max_answer_bytes: int = size(
        256 * MIB,
        "Memory for answers that clients have not received yet. As it fills up, pages get shorter; beyond it "
        "requests get 503 overloaded.",
        small="readers that are far behind get short pages, and need many requests",
        large="the daemon uses this much more memory if clients do not read",
        low=MIB,
        high=1024 * GIB,
    )
    keep_alive_s: float = seconds(
        75.0,
        "Close a connection that has been idle for this long.",
        small="a client that retries a POST because its idle connection was closed duplicates messages (the JDK's "
        "client keeps idle connections for 5 s)",
        large="connections of vanished clients count against http.max_connections until then",
        low=1.0,
        high=86_400.0,
    )
    header_timeout_s: float = seconds(
        10.0,
        "Time limit for receiving a request's head, from its first byte. If authentication is required, the limit "
        "for the first head runs from the start of the connection.",
        small="clients on slow networks are disconnected",
        large="stalled clients keep connections open",
        low=0.1,
        high=3_600.0,
    )
    body_timeout_s: float = seconds(
        30.0,
        "Time limit for receiving a request's body, from the end of its head; each http.body_min_bytes_per_s "
        "received adds a second.",
        small="large bodies over slow networks are cut off",
        large="bodies of stalled clients count against http.max_inflight_bytes",
        low=0.1,
        high=86_400.0,
    )
    body_min_bytes_per_s: int = size(
        16 * KIB,
        "Minimum transfer rate: of a request's body after http.body_timeout_s, and of a client reading an answer "
        "after http.send_timeout_s.",
        small="slow clients occupy memory for a long time",
        large="clients on slow networks are disconnected",
        low=1,
        high=1 * GIB,
    )
    body_max_s: float = seconds(
        600.0,
        "Time limit for receiving a request's body, whatever its transfer rate.",
        small="large bodies over slow networks are cut off",
        large="slow clients occupy memory for that long",
        low=1.0,
        high=86_400.0,
    )
    send_timeout_s: float = seconds(
        30.0,
        "Disconnect a client that has read nothing of its answer for this long.",
        small="readers that pause between pages of a long answer lose it",
        large="clients that stopped reading occupy memory until then",
        low=0.1,
        high=86_400.0,
    )
    flat_topic_properties: bool = switch(
        False, "Let GET of a topic return only the map of properties, as the original service does."
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
    """The OpenID provider whose tokens the daemon accepts. Set issuer, audience and jwks together, or none of them."""

    issuer: str = text("", "The provider's issuer, exactly as in the claim iss of its tokens; empty: no provider.")
    audience: str = text("", "The audience that a token's claim aud must contain: this service's name at the provider.")
    jwks: str = file_name(
        "The provider's public keys (JWKS): an https URL, an http URL of this machine, or a file.",
        pattern=r"(?:https://\S+|http://(?:127(?:\.\d{1,3}){3}|\[::1\]|localhost)(?:[:/]\S*)?|(?!https?:)\S.*)?",
        expected="an https URL, an http URL of this machine, or a path",
    )
    algorithms: str = text(
        "RS256,ES256,EdDSA",
        "Accepted signature algorithms, comma-separated; HS256 and none are never accepted.",
        pattern=rf"(?:{_ALGORITHMS})(?:\s*,\s*(?:{_ALGORITHMS}))*",
        expected="a list of RS, PS or ES with 256, 384 or 512, and EdDSA",
    )
    name_claim: str = text("sub", "The claim that holds the caller's name.", pattern=r"\S{1,100}", expected="a claim")
    groups_claim: str = text(
        "groups", "The claim that holds the caller's groups.", pattern=r"\S{1,100}", expected="a claim"
    )
    name_prefix: str = text(
        "oidc:",
        "A prefix to the value of security.oidc.name_claim, so that a name from the provider never equals a name "
        "from another source.",
        pattern=r"(?!cert:|unix:)[A-Za-z0-9_.@/+=-]{0,64}:",
        expected="up to 64 letters, digits and _.@/+=-, and a colon; not cert: or unix:, which have another meaning",
    )
    skew_s: int = whole_seconds(
        60,
        "Tolerated difference between the provider's clock and this machine's.",
        small="tokens are refused whenever the clocks differ",
        large="tokens are accepted for that long after they expire",
        low=0,
        high=3_600,
    )
    refresh_s: int = whole_seconds(
        300,
        "How often to fetch the provider's keys.",
        small="the provider gets many requests",
        large="a revoked key is accepted for that much longer",
        low=5,
        high=86_400,
    )
    max_stale_s: int = whole_seconds(
        86_400,
        (
            "How long to keep using the last keys while the provider is unreachable; after that, requests with its "
            "tokens get 503."
        ),
        small="even a short outage of the provider locks its users out",
        large="a key that is revoked during an outage is accepted for that much longer",
        low=0,
        high=30 * 86_400,
    )
    require_typ: bool = switch(False, "Accept only tokens whose header has typ at+jwt (RFC 9068).")


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Access to the daemon: authentication, grants, the audit log, and the web pages that may call it."""

    authentication: str = choice(
        "off",
        "off: every request is allowed, as `anonymous`. required: every request must be authenticated, except /ping, "
        "/livez, /readyz and the console's files.",
        "off",
        "required",
    )
    tokens_file: str = file_name("File of the daemon's own tokens, which plainsong token writes; empty: none.")
    grants_file: str = file_name(
        "File of the grants to names; empty: no grants, so that nothing is allowed once authentication is required."
    )
    reload_s: int = whole_seconds(
        1,
        "How often to check the files of this section for changes; SIGHUP checks at once. 0: only on SIGHUP.",
        small="more checks, each of which costs almost nothing",
        large="a revoked token is accepted for that much longer",
        low=0,
        high=3_600,
    )
    certificate_name: str = choice(
        "san-dns",
        "The field of a client certificate that becomes the caller's name, after the prefix cert:. If there are "
        "several, the first counts.",
        "san-dns",
        "san-uri",
        "subject-cn",
        "subject-dn",
    )
    unix_names: bool = switch(
        False, ("Name a client on a Unix socket after its user, as unix:USER; the kernel reports the user.")
    )
    audit: str = choice(
        "best-effort",
        "What happens to a change that cannot be recorded in the topic system:audit. required: it is refused. "
        "best-effort: it happens, and the lost record is counted.",
        "best-effort",
        "required",
    )

    allow_insecure: str = text(
        "",
        "Protections to do without although other machines can reach this daemon, comma-separated: authentication, "
        "tls, thrift (certificates at transactions.thrift), peers (a secret between instances). If one is missing "
        "and not listed here, the daemon does not start.",
        pattern=r"(?:\s*(?:authentication|tls|thrift|peers)\s*(?:,\s*(?:authentication|tls|thrift|peers)\s*)*)?",
        expected='text like "authentication,tls"; the words are authentication, tls, thrift and peers',
    )
    allowed_hosts: str = text(
        "",
        "Host names that clients may use in requests to this daemon, comma-separated; *.example.org matches every "
        "name below example.org. IP addresses, localhost, and the hosts of http.bind and cluster.advertise are "
        "always allowed.",
        pattern=rf"(?:(?:\*\.)?{_NAME}(?:\s*,\s*(?:\*\.)?{_NAME})*)?",
        expected='text like "queue.example.org,*.internal.example.org"',
    )
    allowed_origins: str = text(
        "",
        "Origins whose pages may call this daemon from a browser, comma-separated and matched exactly; the daemon's "
        "own pages always may, all others never.",
        pattern=rf"(?:{_ORIGIN}(?:\s*,\s*{_ORIGIN})*)?",
        expected='text like "https://tools.example.org,http://localhost:3000"; * is not allowed',
    )
    contact: str = text(
        "",
        "Contacts for reporting a vulnerability in this daemon, comma-separated, preferred first; published at "
        "/.well-known/security.txt. Empty: that path gets 404.",
        pattern=rf"(?:{_CONTACT}(?:\s*,\s*{_CONTACT})*)?",
        expected='text like "mailto:security@example.org,https://example.org/report"',
    )
    oidc: OidcConfig = field(default_factory=OidcConfig)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS on all addresses of http.bind except Unix sockets, and on links to other instances."""

    certificate: str = file_name(
        "PEM file with this daemon's certificate and its chain; empty: no TLS. When a file of this section changes, "
        "new connections use the new one; see security.reload_s.",
    )
    key: str = file_name(
        "PEM file with the certificate's private key, without a password; other users must have no access to it."
    )
    minimum: str = choice("1.2", "Minimum version of TLS.", "1.2", "1.3")
    client_ca: str = file_name("PEM file with the certificate authorities of clients and other instances.")
    client_certificates: str = choice(
        "off",
        "Whether clients present certificates. off: the daemon does not ask for one. optional: if a client presents "
        "one, it is checked. required: connections without one are refused.",
        "off",
        "optional",
        "required",
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log, which the daemon writes to its standard output."""

    format: str = choice(
        "text", "text: lines for people. json: one JSON object per line, for programs.", "text", "json"
    )
    level: str = choice("info", "Minimum level of a line.", "debug", "info", "warning", "error")
    queue_lines: int = count(
        10_000,
        "Lines queued while the output is slow; further lines are dropped and counted. Requests never wait for the "
        "log.",
        small="bursts leave gaps in the log",
        large="queued lines use memory while the output is blocked",
        low=16,
        high=10_000_000,
    )
    access: bool = switch(False, "Log every request; this slows down small publishes.")


@dataclass(frozen=True, slots=True)
class ConsoleConfig:
    """The console in the browser."""

    enabled: bool = switch(
        True,
        "Serve the console at /console. Its files are public; its data comes from the other routes, and needs "
        "their rights.",
    )


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Metrics for Prometheus."""

    open: bool = switch(
        False,
        'With security.authentication = "required": serve GET /metrics without authentication; /metrics/topics, '
        "which names topics, stays protected.",
    )


@dataclass(frozen=True, slots=True)
class OtelConfig:
    """Traces by OpenTelemetry."""

    endpoint: str = text(
        "",
        "The collector to send spans to by OTLP over HTTP, such as http://127.0.0.1:4318; empty: no spans. Only "
        "requests with a sampled traceparent are traced.",
        pattern=r"(?:https?://\S+)?",
        expected="an http or https URL",
    )


@dataclass(frozen=True, slots=True)
class ShutdownConfig:
    """Shutdown of the daemon."""

    drain_s: float = seconds(
        10.0,
        "How long accepted requests may take to finish after SIGTERM; waiting polls are answered at once.",
        small="large answers are cut off, and clients do not get the outcome of their requests",
        large="a disk or client that hangs delays the exit by that much",
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
            "Memory of the scan cache for all topics; up to an eighth of it holds pages that are read repeatedly or "
            "ahead. 0: no cache."
        ),
        small="even readers of the newest messages read from the store",
        large="less memory for the rest of the daemon",
        low=0,
        high=256 * GIB,
    )


@dataclass(frozen=True, slots=True)
class BackupConfig:
    """Backups that a client reads while the daemon runs."""

    hold_s: int = whole_seconds(
        600,
        "How long to hold a backup's cut after its client's last request.",
        small="the backup of a slow client fails, and has to start over",
        large="after a client dies, the space of removed messages is freed that much later",
        low=1,
        high=86_400,
    )
    bytes_per_s: int = size(
        0,
        "Maximum rate at which a backup reads the store, doubled for new rows. 0: no fixed rate; pauses leave "
        "publishes and polls most of theirs.",
        small="backups take long, and the space of removed messages is freed later",
        large="a slow disk has less left for requests",
        low=0,
        high=1 * TIB,
    )


@dataclass(frozen=True, slots=True)
class ReadersConfig:
    """Positions of readers, stored by the daemon."""

    retention_s: int = whole_seconds(
        7_776_000,
        "How long to keep a reader's position after its last change; 90 days by default.",
        small="a reader that pauses for longer starts over",
        large="positions of abandoned readers are kept",
        low=1,
        high=CENTURY_S,
    )
    max_per_topic: int = count(
        1_000,
        "Maximum reader positions per topic; beyond it new readers are refused.",
        small="readers have to store their positions themselves",
        large="a client that keeps inventing reader names fills the store",
        high=1_000_000,
    )


# --- deduplicating ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeduplicationConfig:
    """Producers: messages with sequence ids are stored once."""

    default: bool = switch(
        True,
        "Remember producers' sequence ids, unless the topic or its namespace sets otherwise. Without producers this "
        "costs nothing.",
    )
    snapshot_entries: int = count(
        1_000,
        "Requests of producers after which a topic writes a snapshot of its producers.",
        small="more rows to write",
        large="a topic takes longer to load after a crash",
    )
    snapshot_interval_s: float = seconds(
        120.0,
        "Time after which a topic writes a snapshot of its changed producers.",
        small="more rows to write",
        large="a topic takes longer to load after a crash",
        low=0.01,
        high=86_400.0,
    )
    producer_retention_s: int = whole_seconds(
        604_800,
        "How long to remember an idle producer; 7 days by default.",
        small="a producer that pauses may store a message twice",
        large="short-lived producers use memory and disk space for longer",
        low=1,
        high=CENTURY_S,
    )
    max_retention_s: int = whole_seconds(
        15_552_000,
        "Maximum retention that a producer may request when it opens its session; 180 days by default.",
        small="producers that pause for long are forgotten",
        large="abandoned producers are kept",
        low=1,
        high=CENTURY_S,
    )
    max_producers: int = count(
        10_000,
        "Maximum producers remembered per topic; a new one replaces the one that was idle longest, or gets 503 "
        "too_many_producers.",
        small="new producers are refused",
        large="more memory, and a longer load of the topic",
        high=1_000_000,
    )
    max_long_producers: int = count(
        1_000,
        "How many of deduplication.max_producers may have a retention above deduplication.producer_retention_s.",
        small="producers that pause for long are refused",
        large="they displace other producers",
        low=0,
        high=1_000_000,
    )
    answer_timeout_s: float = seconds(
        30.0,
        "Time limit for storing a producer's publish; after it the answer is 503 outcome_unknown, and the publish "
        "may still happen.",
        small="on a slow disk, producers often get an unknown outcome",
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
        "The service that decides transactions. embedded: this daemon's own. tephra: the Tephra at "
        "transactions.tephra. off: none; publishing under a pointer and polling with a snapshot still work. Change "
        "it only while no undecided pointer has messages here.",
        "embedded",
        "tephra",
        "off",
    )
    tephra: str = optional_address("Thrift address of the Tephra that decides transactions; empty: none.")
    tephra_refresh_s: float = seconds(
        5.0,
        "How often to fetch the state of that Tephra.",
        small="Tephra spends its time on sending its whole state",
        large="committed polls see commits that much later",
        low=0.05,
        high=3_600.0,
    )
    thrift: str = optional_address(
        "Address on which the embedded service serves Tephra's clients by Thrift; empty: none. While it is set, the "
        "invalid list is not pruned automatically, because other stores may rely on it."
    )
    thrift_tls: bool = switch(False, "Use TLS at transactions.thrift, with the certificate of the section tls.")
    timeout_s: int = whole_seconds(
        30,
        "Default time-out of a short transaction.",
        small="clients that pause lose their transactions",
        large="a dead client blocks committed readers for that long",
        low=1,
        high=CENTURY_S,
    )
    max_timeout_s: int = whole_seconds(
        3_600,
        "Maximum time-out that a short transaction may request; an hour by default.",
        small="clients that need more time have to begin long transactions",
        large="a dead client blocks committed readers for that long",
        low=1,
        high=CENTURY_S,
    )
    long_timeout_s: int = whole_seconds(
        86_400,
        "Time-out of a long transaction; a day by default.",
        small="batch jobs lose their transactions",
        large="a dead job blocks committed readers for that long",
        low=1,
        high=CENTURY_S,
    )
    max_lifetime_s: int = whole_seconds(
        90_000,
        "Age beyond which a write pointer is refused with 409 transaction_expired; 25 hours by default. 0 turns off "
        "this check and the pruning of the invalid list.",
        small="long transactions can no longer publish",
        large="messages of forgotten transactions can still appear, and the invalid list grows until then",
        low=0,
        high=CENTURY_S,
    )
    max_open: int = count(
        20_000,
        "Maximum transactions in progress; a further one gets 503 overloaded.",
        small="clients are refused",
        large="every snapshot lists all of them, with 8 bytes each",
        high=1_000_000,
    )
    max_invalid: int = count(
        100_000,
        "Maximum pointers on the invalid list; beyond it no transaction can begin until some are pruned.",
        small="after many time-outs no client can begin a transaction",
        large="every snapshot lists all of them, with 8 bytes each",
    )
    max_outcomes: int = count(
        200_000,
        "How many decided transactions to remember with their outcomes; beyond it the oldest is forgotten.",
        small="a client that lost the answer to its commit may not find out the outcome",
        large="more memory, and a longer start",
    )
    outcome_retention_s: int = whole_seconds(
        90_000,
        "How long to remember the outcome of a transaction; 25 hours by default.",
        small="a client that lost the answer to its commit may not find out the outcome",
        large="more memory, and a longer start",
        low=1,
        high=CENTURY_S,
    )
    max_change_set_bytes: int = size(
        16 * MIB,
        ("Maximum total size of the keys in a transaction's change set; a larger one gets 413 transaction_too_large."),
        small="transactions with many changes cannot be committed",
        large="change sets use the service's memory",
        low=KIB,
        high=1 * GIB,
    )
    max_per_topic: int = count(
        65_536,
        "Maximum undecided write pointers with messages in one topic; a further one gets 503 overloaded.",
        small="publishes of further transactions are refused",
        large="more memory, and a longer load of the topic",
        high=1_000_000,
    )
    commit_deadline_s: float = seconds(
        15.0,
        "With several instances: how long a commit waits for its next topic to finish its writes. The time restarts "
        "with each topic that finishes; all together may take this long for every 16 topics. When it is over nothing "
        "has happened, and the client can commit again. Minimum: cluster.session_timeout_s plus 3 s.",
        small="commits fail while topics move, and have to be sent again",
        large="commits wait for a topic that does not answer",
        low=0.1,
        high=3_600.0,
    )
    abort_deadline_s: float = seconds(
        15.0,
        "How long an abort waits for its next topic to roll back the transaction's messages. The time restarts with "
        "each topic that finishes; all together may take this long for every 16 topics. When it is over the "
        "transaction becomes invalid. Minimum with several instances: cluster.session_timeout_s plus 3 s.",
        small="aborts become invalidations while topics are being loaded, or move",
        large="aborts wait for a topic that does not answer",
        low=0.1,
        high=3_600.0,
    )
    prune: bool = switch(
        True,
        "Remove a pointer from the invalid list once all its messages are rolled back and it is older than "
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
        "The ZooKeeper ensemble through which instances find each other, as host:port[,host:port...][/path]; the "
        "default path is /plainsong. Empty: a single instance, which owns all topics. Requires storage.kind = hbase.",
        pattern=rf"(?:{_HOST}(?:,{_HOST})*(?:/[\w./-]*)?)?",
        expected='text like "zk1:2181,zk2:2181,zk3:2181/plainsong"',
    )
    instance: str = text(
        "",
        "Name of this instance, unique and stable across restarts; empty: the host's name and the port.",
        pattern=r"[\w.-]{0,100}",
        expected="up to 100 letters, digits, _, - and .",
    )
    advertise: str = optional_address(
        "Address at which clients and other instances reach this one; empty: http.bind, which must then name one "
        "machine."
    )
    session_timeout_s: float = seconds(
        10.0,
        "How long an instance may be silent before other instances take over its topics; ZooKeeper limits this to "
        "between 2 and 20 of its ticks.",
        small="a short pause of an instance, or of ZooKeeper, moves its topics",
        large="the topics of a dead instance are not served until then",
        low=1.0,
        high=600.0,
    )
    zookeeper_auth_file: str = file_name(
        "File with the credential for ZooKeeper, as one line: digest USER:PASSWORD. With it, only this deployment "
        "can read and change its nodes; empty: every client of ZooKeeper can.",
    )
    zookeeper_tls: bool = switch(False, "Use TLS to ZooKeeper.")
    zookeeper_ca: str = file_name("PEM file with the certificate authorities of ZooKeeper.")
    zookeeper_certificate: str = file_name("PEM file with the certificate to present to ZooKeeper; empty: none.")
    zookeeper_key: str = file_name("PEM file with the key of that certificate.")
    secret_file: str = file_name(
        "File with the secret that all instances share and by which they authenticate each other: one line of at "
        "least 32 bytes. Empty: none.",
    )
    weight: int = count(
        100,
        "This instance's share of the topics, relative to the others'.",
        small="other instances own more than their share",
        large="this instance owns more topics than it can serve",
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
