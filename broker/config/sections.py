"""Every setting of the daemon, by section: default, unit, bounds, and what happens at both ends of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - dataclasses and readers resolve annotations
from typing import TYPE_CHECKING, NamedTuple

from broker.config.values import (
    GIB,
    KIB,
    MIB,
    TIB,
    Address,
    addresses,
    binds,
    choice,
    count,
    file_name,
    milliseconds,
    optional_address,
    parse_address,
    parse_binds,
    path,
    seconds,
    size,
    switch,
    text,
    whole_seconds,
)
from plainsong.protocol.requests import MAX_TTL_S

if TYPE_CHECKING:
    from broker.config.values import Bind

_CENTURY_S = 100 * 365 * 86_400


# --- hbase -----------------------------------------------------------------------------------------


#: A namespace of HBase's own, and what its table names may begin with.
_TABLE_PREFIX = r"(?:[A-Za-z0-9_]\w*:)?(?:[A-Za-z0-9_][\w.-]*)?"


@dataclass(frozen=True, slots=True)
class HBaseConfig:
    """Tables in HBase, where storage.kind is hbase."""

    thrift: str = addresses(
        "127.0.0.1:9090",
        "HBase's Thrift gateways (Thrift 1, started with -f), separated by commas; when one is down the next is used.",
    )
    table_prefix: str = text(
        "plainsong_",
        "What the names of the three tables start with, by which deployments share one HBase; "
        "with a namespace of HBase in front where there is one, as in prod:plainsong_.",
        pattern=_TABLE_PREFIX,
        expected="letters, digits, _, - and ., behind a namespace and a colon or nothing",
    )
    timeout_s: float = seconds(
        30.0,
        "How long a call to HBase may take with all its attempts; after it the answer is 503, the outcome unknown. "
        "While all connections are in use a call first waits for one, at most for as long again; if none becomes free "
        "nothing has happened.",
        small="a region that moves, or a pause of a region server, fails requests",
        large="requests wait for as long while HBase is down",
        low=0.1,
        high=3_600.0,
    )
    max_connections: int = count(
        16,
        "Connections to all gateways together; each has one call under way, further calls wait.",
        small="calls wait for each other, and those that wait longest fail",
        large="a gateway has a thread for each, and refuses those beyond its own bound",
        low=2,
        high=10_000,
    )
    max_cell_bytes: int = size(
        9 * MIB,
        "The largest cell; it must stay below hbase.client.keyvalue.maxsize (10 MiB by default) and below "
        "the gateways' max_frame_size_in_mb.",
        small="commits take more cells, and large messages are refused",
        large="HBase refuses the cell, and publishes fail",
        low=256 * KIB,
        high=256 * MIB,
    )
    create_tables: bool = switch(
        True,
        "Whether missing tables are created, with one region each; "
        "etc/hbase/tables.rb creates them with many, which a deployment wants.",
    )
    tls: bool = switch(False, "Speak TLS to the gateways, or to the proxies that end it for them.")
    tls_ca: str = file_name("The file with the authorities that sign the gateways' certificates, PEM.")
    tls_certificate: str = file_name("The file with the certificate to show to the gateways, PEM; empty: none.")
    tls_key: str = file_name("The file with the key of that certificate, PEM.")


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Where messages are kept."""

    kind: str = choice(
        "leveldb",
        "The store; hbase may be shared by several instances, memory forgets everything when the daemon ends.",
        "leveldb",
        "hbase",
        "memory",
    )
    data_dir: Path = path(  # noqa: RUF009 - declares a field, like its neighbours
        "data",
        "The directory of the store, created if it does not exist; a relative one starts at the working directory.",
    )
    min_free_bytes: int = size(
        256 * MIB,
        "Free disk space below which publishes get 503 low_space, while polls and cleaning go on.",
        small="the disk fills up, and then there is no space even to delete",
        large="publishes are refused while there is space",
        low=0,
        high=1024 * TIB,
    )
    write_buffer_bytes: int = size(
        32 * MIB,
        "What LevelDB gathers in memory before it writes a sorted table; two of these at once, three for a moment.",
        small="many small tables, and with them smaller volumes, or merging while publishes wait for it",
        large="more memory, longer bursts of writing, and a longer start after a crash",
        low=64 * KIB,
        high=1 * GIB,
    )
    volume_bytes: int = size(
        112 * MIB,
        "Messages of a volume, a database of its own that is dropped when all in it has expired; 3.5 write buffers.",
        small="many volumes to open and close, each with its files",
        large="space comes back later; above 3.5 write buffers LevelDB merges its tables, and publishes wait for that",
        low=64 * KIB,
        high=1 * TIB,
    )
    block_cache_bytes: int = size(
        8 * MIB,
        "What LevelDB keeps of the blocks that point reads needed; scans do not fill it.",
        small="loading topics reads the same blocks from disk again",
        large="memory that cache.max_bytes would use better",
        low=0,
        high=64 * GIB,
    )
    inline_commit_s: float = seconds(
        0.002,
        "The event loop writes small commits, and reads single rows of the metadata, itself instead of waking a thread. After "
        "one that took longer than this threads do it for 10 times as long as it took, or more. 0: threads do all of it, as is "
        "best for a disk that may hang.",
        small="on a disk that is slower now and then the thread writes, and publishes wait up to half as long again",
        large="polls and everything else wait for such writes again and again",
        low=0.0,
        high=1.0,
    )
    max_clock_ahead_s: int = whole_seconds(
        0,
        "How far the clock may be ahead of the newest time in the store at a start, which is refused beyond; 0: any time, "
        "since a store that was not used for as long looks the same.",
        small="a daemon that was stopped for longer is not started by itself",
        large="a clock that is set wrong has messages expire, which cannot be undone",
        low=0,
        high=_CENTURY_S,
    )
    scrub_interval_s: int = whole_seconds(
        7 * 86_400,
        "Between two rounds that read every row and check it, the first an hour after the start; 0: only when asked.",
        small="the disk is read all the time",
        large="damage is found when somebody needs what is damaged, perhaps after its last backup was removed",
        low=0,
        high=_CENTURY_S,
    )
    scrub_bytes_per_s: int = size(
        4 * MIB,
        "How much a round reads in a second.",
        small="a round takes long, perhaps longer than its interval",
        large="a slow disk has less for others",
        low=1 * KIB,
        high=1 * TIB,
    )
    hbase: HBaseConfig = field(default_factory=HBaseConfig)


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The topics, each served by one actor while it is open."""

    chain_secret_file: str = file_name(
        "The file with the secrets that sign the heads of chained topics, as Standard Webhooks has them: whsec_ and 24 "
        "to 64 random bytes in base64, one line, or two during a rotation; empty: heads are not signed.",
    )
    default_ttl_s: int = whole_seconds(
        604_800,
        "The time to live of a topic created without one; 7 days by default.",
        small="messages expire before slow consumers read them",
        large="the disk fills with messages that no consumer reads any more",
        low=1,
        high=MAX_TTL_S,
    )
    max_message_bytes: int = size(
        8 * MIB,
        "The largest message; beyond it the answer is 413 message_too_large.",
        small="producers must split their messages",
        large="single messages fill pages and caches",
        low=1,
        high=1 * GIB,
    )
    idle_s: float = seconds(
        300.0,
        "How long a topic without requests stays open.",
        small="topics that are used now and then are loaded from disk each time",
        large="idle topics take memory",
        low=0.1,
        high=86_400.0,
    )
    max_open: int = count(
        10_000,
        "Topics open at once; beyond it the longest idle one is closed, or the answer is 503 overloaded.",
        small="topics take turns, and each turn reads the disk",
        large="memory grows with the number of topics in use",
        high=1_000_000,
    )
    mailbox_requests: int = count(
        4096,
        "Requests that may wait for one topic; beyond it the answer is 503 overloaded.",
        small="bursts are refused",
        large="requests wait for seconds when the disk is slow",
        high=1_000_000,
    )
    mailbox_bytes: int = size(
        64 * MIB,
        "Bytes of messages that may wait for one topic; beyond it the answer is 503 overloaded.",
        small="bursts of large requests are refused",
        large="one busy topic takes much of http.max_inflight_bytes",
        low=KIB,
        high=64 * GIB,
    )
    checkpoint_rows: int = count(
        10_000,
        "Rows after which a topic writes a checkpoint of its counts and positions, so that loading it reads no further "
        "back.",
        small="more rows to write",
        large="a topic takes longer to load after a crash",
        high=100_000_000,
    )
    max_parked_polls: int = count(
        10_000,
        "Long polls that may wait on one topic; beyond it the answer is 503 overloaded.",
        small="waiting consumers are refused",
        large="memory grows with waiting consumers",
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class CommitConfig:
    """One group of requests made durable by one write."""

    max_requests: int = count(
        1024,
        "Requests in one commit; the rest wait for the next.",
        small="each synced write carries less, and throughput falls with the disk's latency",
        large="the first request of a commit waits for the last to be decided",
        high=65_536,
    )
    max_bytes: int = size(
        8 * MIB,
        "Bytes of rows in one commit; a larger request goes alone.",
        small="each synced write carries less",
        large="all requests of the commit wait for one long write",
        low=KIB,
        high=1 * GIB,
    )


@dataclass(frozen=True, slots=True)
class PollConfig:
    """The bounds of a page of messages, and of the wait for one."""

    max_messages: int = count(
        100_000,
        "Messages in one page, whatever limit the request names.",
        small="readers that are far behind make many requests",
        large="one page delays others",
        high=10_000_000,
    )
    max_bytes: int = size(
        16 * MIB,
        "Bytes of payload in one page; at least one message is always returned, whatever its size.",
        small="readers that are far behind make many requests",
        large="memory grows with the number of readers at once",
        low=1,
        high=1 * GIB,
    )
    max_wait_ms: int = milliseconds(
        60_000,
        "The longest wait of a poll; one that asks for longer is answered after this.",
        small="idle consumers ask again and again",
        large="proxies in between cut the connection first",
        low=0,
        high=3_600_000,
    )


# --- front -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP listener: its address, and the bounds of requests and answers."""

    bind: str = binds(
        "127.0.0.1:7420",
        "Where to listen: addresses with their ports (0 takes a free one, which the banner shows), and Unix sockets "
        "as unix:/run/plainsong.sock, separated by commas.",
    )
    unix_mode: str = text(
        "0660",
        "The permissions of Unix sockets of http.bind: whoever may write to one may connect.",
        pattern=r"0?[0-7]{3}",
        expected='text like "0660"',
    )
    processes: int = count(
        1,
        "Front ends: with more than one, this many processes accept connections and read requests; another one owns the "
        "topics.",
        small="reading requests and writing answers keeps one core busy while others rest",
        large="each takes memory, and more of them than cores are no faster",
        high=64,
    )
    max_body_bytes: int = size(
        64 * MIB,
        "The largest body of a request, also after decompression; beyond it the answer is 413.",
        small="large batches are refused",
        large="few clients can fill http.max_inflight_bytes",
        low=KIB,
        high=1 * GIB,
    )
    max_connections: int = count(
        10_000,
        "Connections open at once; a further one is answered 503 overloaded and closed.",
        small="clients are refused while the daemon is idle",
        large="the limit on open files is reached first, or memory runs out",
        high=1_000_000,
    )
    max_inflight_bytes: int = size(
        256 * MIB,
        "Memory of request bodies over all connections, compressed and not; beyond it the answer is 503 overloaded.",
        small="parallel large publishes are refused",
        large="the daemon's memory grows by as much under load",
        low=KIB,
        high=1024 * GIB,
    )
    max_answer_bytes: int = size(
        256 * MIB,
        "Memory of answers until their readers have taken them; pages get shorter as it is used up, "
        "beyond it the answer is 503 overloaded.",
        small="readers that are far behind get short pages, and make many requests",
        large="the daemon's memory grows by as much under readers that do not read",
        low=MIB,
        high=1024 * GIB,
    )
    keep_alive_s: float = seconds(
        75.0,
        "How long an idle connection is kept.",
        small="clients that re-send a POST on a closed connection duplicate messages (the JDK's client keeps idle ones "
        "for 5 s)",
        large="connections of vanished clients count against http.max_connections meanwhile",
        low=1.0,
        high=86_400.0,
    )
    header_timeout_s: float = seconds(
        10.0,
        "How long the head of a request may take from its first byte to its last; where names are required, the first "
        "of a connection from the connection's beginning.",
        small="clients on slow lines are cut off",
        large="clients that stall keep their connections",
        low=0.1,
        high=3_600.0,
    )
    body_timeout_s: float = seconds(
        30.0,
        "How long the body of a request may take from the end of its head; it may take a second more for each "
        "http.body_min_bytes_per_s received.",
        small="large bodies over slow lines are cut off",
        large="bodies of clients that stall count against http.max_inflight_bytes",
        low=0.1,
        high=86_400.0,
    )
    body_min_bytes_per_s: int = size(
        16 * KIB,
        "The least rate of a body once http.body_timeout_s is used up, and of an answer's reader once "
        "http.send_timeout_s is.",
        small="clients that send or read a little at a time hold their bytes for long",
        large="clients on slow lines are cut off",
        low=1,
        high=1 * GIB,
    )
    body_max_s: float = seconds(
        600.0,
        "How long a body may take at most, however fast it comes.",
        small="large bodies over slow lines are cut off",
        large="slow clients hold the bytes of large bodies for as long",
        low=1.0,
        high=86_400.0,
    )
    send_timeout_s: float = seconds(
        30.0,
        "How long a client may take no byte of its answer before it is cut off.",
        small="readers that pause between pages of a long answer lose it",
        large="readers that stopped reading take memory meanwhile",
        low=0.1,
        high=86_400.0,
    )
    flat_topic_properties: bool = switch(
        False, "Answer a GET of a topic with the bare property map, as the original service does for its clients."
    )
    gzip_min_bytes: int = size(
        1 * KIB,
        "Answers of at least this many bytes are compressed when the client accepts gzip.",
        small="time is spent on answers that do not shrink",
        large="answers that would shrink are sent uncompressed",
        low=0,
        high=1 * GIB,
    )

    @property
    def binds(self) -> list[Bind]:
        """``bind``, taken apart."""
        return parse_binds(self.bind)

    @property
    def address(self) -> Address | None:
        """The first address of ``bind``, by which other machines may reach this one; None: there are only Unix sockets."""
        return next((bind for bind in self.binds if isinstance(bind, Address)), None)


# --- security --------------------------------------------------------------------------------------


_NAME = r"[\w-]+(?:\.[\w-]+)*\.?"
_CONTACT = r"(?:mailto:[^\s,@]+@[^\s,@]+|https://[^\s,]+|tel:\+?[\d-]+)"
_ORIGIN = r"https?://(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d{1,5})?"


_ALGORITHMS = "(?:RS|PS|ES)(?:256|384|512)|EdDSA"


@dataclass(frozen=True, slots=True)
class OidcConfig:
    """The OpenID provider whose tokens are accepted; issuer, audience and jwks, or none of the three."""

    issuer: str = text("", "The issuer, as its tokens name it in iss; empty: there is no provider.")
    audience: str = text("", "What aud of a token must name: this service, as the provider knows it.")
    jwks: str = file_name(
        "Where the provider's keys are: an https URL (http to this machine only), or a file.",
        pattern=r"(?:https://\S+|http://(?:127(?:\.\d{1,3}){3}|\[::1\]|localhost)(?:[:/]\S*)?|(?!https?:)\S.*)?",
        expected="an https URL, an http URL of this machine, or a path",
    )
    algorithms: str = text(
        "RS256,ES256,EdDSA",
        "The signatures that are accepted, separated by commas; HS256 and none never are.",
        pattern=rf"(?:{_ALGORITHMS})(?:\s*,\s*(?:{_ALGORITHMS}))*",
        expected="a list of RS, PS or ES with 256, 384 or 512, and EdDSA",
    )
    name_claim: str = text("sub", "The claim that names the caller.", pattern=r"\S{1,100}", expected="a claim")
    groups_claim: str = text(
        "groups", "The claim that lists the caller's groups.", pattern=r"\S{1,100}", expected="a claim"
    )
    name_prefix: str = text(
        "oidc:",
        "What stands before that claim in the caller's name, so that no provider can give names of others.",
        pattern=r"(?!cert:|unix:)[A-Za-z0-9_.@/+=-]{0,64}:",
        expected="up to 64 letters, digits and _.@/+=-, and a colon; not cert: or unix:, which name others",
    )
    skew_s: int = whole_seconds(
        60,
        "How far the provider's clock may be from this one.",
        small="tokens are refused whenever the clocks differ",
        large="tokens are accepted as much longer than they say",
        low=0,
        high=3_600,
    )
    refresh_s: int = whole_seconds(
        300,
        "How often the keys are fetched.",
        small="the provider is asked often",
        large="keys that it withdrew are accepted as much longer",
        low=5,
        high=86_400,
    )
    max_stale_s: int = whole_seconds(
        86_400,
        "How long the last keys hold while the provider cannot be reached; then its tokens are answered 503.",
        small="an outage of the provider is soon one of its callers",
        large="keys that it withdrew meanwhile are accepted as much longer",
        low=0,
        high=30 * 86_400,
    )
    require_typ: bool = switch(False, "Accept only tokens whose header says typ at+jwt (RFC 9068).")


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may reach the daemon, from which pages, and who they are."""

    authentication: str = choice(
        "off",
        "off: everybody may everything, as anonymous. required: every request needs a name, but for /ping, /livez, "
        "/readyz and the console's files.",
        "off",
        "required",
    )
    tokens_file: str = file_name("The file with our own tokens, which plainsong token makes; empty: there are none.")
    grants_file: str = file_name("The file that says what names may; empty: nothing, once names are required.")
    reload_s: int = whole_seconds(
        1,
        "How often the files of this section are looked at; SIGHUP looks at once. 0: only SIGHUP does.",
        small="the files are looked at often, which costs next to nothing",
        large="a revoked token is accepted as much longer",
        low=0,
        high=3_600,
    )
    certificate_name: str = choice(
        "san-dns",
        "Which name of a client certificate is the caller's, behind cert: the first of that kind.",
        "san-dns",
        "san-uri",
        "subject-cn",
        "subject-dn",
    )
    unix_names: bool = switch(False, "The peer of a Unix socket is unix: and its user's name, as the kernel says.")
    audit: str = choice(
        "best-effort",
        "Whether a change needs its record in the topic system:audit. required: a change is refused when there can be "
        "none. best-effort: it happens, and what is missing is counted.",
        "best-effort",
        "required",
    )

    allow_insecure: str = text(
        "",
        "What a daemon that other machines can reach does without, separated by commas: authentication, tls, thrift "
        "(certificates at transactions.thrift), peers (a secret between instances). It does not start otherwise.",
        pattern=r"(?:\s*(?:authentication|tls|thrift|peers)\s*(?:,\s*(?:authentication|tls|thrift|peers)\s*)*)?",
        expected='text like "authentication,tls"; the words are authentication, tls, thrift and peers',
    )
    allowed_hosts: str = text(
        "",
        "Names by which clients may address this daemon, separated by commas; *.example.org stands for every name "
        "below it. IP addresses, localhost, and the hosts of http.bind and cluster.advertise are always allowed.",
        pattern=rf"(?:(?:\*\.)?{_NAME}(?:\s*,\s*(?:\*\.)?{_NAME})*)?",
        expected='text like "queue.example.org,*.internal.example.org"',
    )
    allowed_origins: str = text(
        "",
        "Origins whose pages may use this daemon from a browser, separated by commas, each exact; "
        "pages of the daemon itself always may, pages of all others never.",
        pattern=rf"(?:{_ORIGIN}(?:\s*,\s*{_ORIGIN})*)?",
        expected='text like "https://tools.example.org,http://localhost:3000"; * is not allowed',
    )
    contact: str = text(
        "",
        "What /.well-known/security.txt shows to everybody: whom to tell of a hole in this daemon, separated by commas, "
        "the best first. Empty: there is no such file.",
        pattern=rf"(?:{_CONTACT}(?:\s*,\s*{_CONTACT})*)?",
        expected='text like "mailto:security@example.org,https://example.org/report"',
    )
    oidc: OidcConfig = field(default_factory=OidcConfig)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS on all addresses of http.bind, and on links to other instances; Unix sockets stay as they are."""

    certificate: str = file_name(
        "The file with this daemon's certificate and those that vouch for it, PEM; empty: no TLS. It and the other "
        "files are loaded again when they change, for connections that begin then; see security.reload_s.",
    )
    key: str = file_name("The file with its key, PEM, without a password, which others may neither read nor write.")
    minimum: str = choice("1.2", "The oldest version of TLS that is spoken.", "1.2", "1.3")
    client_ca: str = file_name(
        "The file with the authorities whose certificates clients and other instances show, PEM."
    )
    client_certificates: str = choice(
        "off",
        "Whether clients are asked for a certificate. optional: one that is shown is checked. required: there is no "
        "connection without.",
        "off",
        "optional",
        "required",
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The daemon's log, on its standard output."""

    format: str = choice("text", "Lines for people, or one JSON object a line for programs.", "text", "json")
    level: str = choice("info", "The least important lines to write.", "debug", "info", "warning", "error")
    queue_lines: int = count(
        10_000,
        "Lines that may wait for a slow output; further ones are dropped and counted, and no request waits for a line.",
        small="bursts leave gaps in the log",
        large="lines take memory while the output stands still",
        low=16,
        high=10_000_000,
    )
    access: bool = switch(False, "Write a line for every request; small publishes get slower.")


@dataclass(frozen=True, slots=True)
class ConsoleConfig:
    """The console in the browser."""

    enabled: bool = switch(
        True, "Serve the console at /console: its files are public, what it shows comes from the other routes."
    )


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Metrics for Prometheus."""

    open: bool = switch(
        False,
        'With security.authentication = "required": answer GET /metrics to everybody, whatever names may; '
        "/metrics/topics, which has topics' names, stays closed.",
    )


@dataclass(frozen=True, slots=True)
class OtelConfig:
    """Traces of the daemon, by OpenTelemetry."""

    endpoint: str = text(
        "",
        "The collector that takes its spans by OTLP over HTTP, as http://127.0.0.1:4318; empty: there are none. "
        "Only requests whose traceparent says that their trace is recorded have one.",
        pattern=r"(?:https?://\S+)?",
        expected="an http or https URL",
    )


@dataclass(frozen=True, slots=True)
class ShutdownConfig:
    """The end of the daemon."""

    drain_s: float = seconds(
        10.0,
        "How long after SIGTERM the requests already taken may finish; parked polls are answered at once.",
        small="answers of large requests are cut off, and their clients do not learn the outcome",
        large="a stuck disk or client delays the exit by as much",
        low=0.0,
        high=3_600.0,
    )


# --- keeping ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The recent messages of all topics, kept in memory in wire form."""

    max_bytes: int = size(
        64 * MIB,
        "The memory of the scan cache over all topics, up to an eighth of it for pages that are read again, or ahead; 0 switches it off.",
        small="readers that keep up read from the store",
        large="memory that the rest of the daemon cannot use",
        low=0,
        high=256 * GIB,
    )


@dataclass(frozen=True, slots=True)
class BackupConfig:
    """Backups, which a client reads from the daemon while it serves."""

    hold_s: int = whole_seconds(
        600,
        "How long the cut of a backup is held after its client asked for something last.",
        small="a backup whose client is slow fails and has to begin again",
        large="space of removed messages comes back so much later when a client has died",
        low=1,
        high=86_400,
    )
    bytes_per_s: int = size(
        0,
        "How much of the store a backup reads in a second, twice for what is new; 0: as much as its pauses allow, which "
        "leave publishes and polls most of their rate.",
        small="backups take long, and space of removed messages comes back later",
        large="a slow disk has less for others",
        low=0,
        high=1 * TIB,
    )


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """The janitor, which removes rows that no request can see any more."""

    interval_s: float = seconds(
        60.0,
        "The pause between two rounds of the janitor.",
        small="rounds that find little to remove",
        large="expired messages take disk space for longer",
        low=0.01,
        high=86_400.0,
    )
    delete_grace_s: int = whole_seconds(
        3_600,
        "How long the rows of a deleted topic are kept, so that it can be undeleted; an hour by default.",
        small="a deletion by mistake cannot be undone",
        large="deleted topics take disk space for longer",
        low=0,
        high=_CENTURY_S,
    )
    step_rows: int = count(
        200,
        "Rows that the janitor removes in one step; publishes and polls run between the steps.",
        small="cleaning falls behind a busy topic's expiry",
        large="publishes wait longer during a step",
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class ReadersConfig:
    """The positions of readers that the daemon keeps."""

    retention_s: int = whole_seconds(
        7_776_000,
        "How long a reader's position is kept after its last change; 90 days by default.",
        small="a reader that pauses for longer starts anew",
        large="positions of readers that have gone stay",
        low=1,
        high=_CENTURY_S,
    )
    max_per_topic: int = count(
        1_000,
        "Readers of one topic whose positions are kept; beyond it a new one is refused.",
        small="readers must keep their positions themselves",
        large="a client that names readers at random fills the store",
        high=1_000_000,
    )


# --- deduplicating ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeduplicationConfig:
    """Producers: their messages, with sequence ids, are stored once."""

    default: bool = switch(
        True,
        "Whether sequence ids of producers are remembered where neither the topic nor its namespace sets it; "
        "it costs nothing without a producer.",
    )
    snapshot_entries: int = count(
        1_000,
        "Requests of producers after which a topic writes a snapshot of them.",
        small="more rows to write",
        large="a topic takes longer to load after a crash",
    )
    snapshot_interval_s: float = seconds(
        120.0,
        "How long after a change a topic writes a snapshot of its producers.",
        small="more rows to write",
        large="a topic takes longer to load after a crash",
        low=0.01,
        high=86_400.0,
    )
    producer_retention_s: int = whole_seconds(
        604_800,
        "How long an idle producer is remembered; 7 days by default.",
        small="a producer that pauses may store a message twice",
        large="short-lived producers take memory and disk space for longer",
        low=1,
        high=_CENTURY_S,
    )
    max_retention_s: int = whole_seconds(
        15_552_000,
        "The longest memory a producer may ask for when it opens its session; 180 days by default.",
        small="producers that pause for long cannot be remembered",
        large="producers that have gone stay",
        low=1,
        high=_CENTURY_S,
    )
    max_producers: int = count(
        10_000,
        "Producers that one topic remembers; a new one replaces the longest idle, or the answer is 503 "
        "too_many_producers.",
        small="new producers are refused",
        large="more memory, and a longer load of the topic",
        high=1_000_000,
    )
    max_long_producers: int = count(
        1_000,
        "Producers among them that may be remembered for longer than deduplication.producer_retention_s.",
        small="producers that pause for long are refused",
        large="they take the place of others",
        low=0,
        high=1_000_000,
    )
    answer_timeout_s: float = seconds(
        30.0,
        "How long a publish of a producer waits for the store; after it the answer is 503 outcome_unknown, and the "
        "publish may still happen.",
        small="with a slow disk producers often do not learn the outcome",
        large="producers learn late that something is wrong",
        low=0.01,
        high=3_600.0,
    )


# --- transacting -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransactionsConfig:
    """Transactions: the service that decides them, and their bounds."""

    service: str = choice(
        "embedded",
        "The service that decides transactions: this daemon's own, the Tephra at transactions.tephra, or none "
        "(publishing under a pointer and polling with a snapshot still work). It may be changed while no "
        "undecided pointer has messages here.",
        "embedded",
        "tephra",
        "off",
    )
    tephra: str = optional_address("The Thrift address of the Tephra that decides; empty: none.")
    tephra_refresh_s: float = seconds(
        5.0,
        "How often that Tephra is asked for its state.",
        small="it has to send its whole state all the time",
        large="committed polls see what was committed so much later",
        low=0.05,
        high=3_600.0,
    )
    thrift: str = optional_address(
        "The address on which the embedded service serves Tephra's clients by Thrift; empty: none. "
        "While it is set the invalid list is not pruned automatically, since other stores may rely on it."
    )
    thrift_tls: bool = switch(False, "Speak TLS at transactions.thrift, with the certificate of the section tls.")
    timeout_s: int = whole_seconds(
        30,
        "The time-out of a short transaction that names none.",
        small="clients that pause lose their transactions",
        large="a client that died blocks committed readers for as long",
        low=1,
        high=_CENTURY_S,
    )
    max_timeout_s: int = whole_seconds(
        3_600,
        "The longest time-out a short transaction may ask for; an hour by default.",
        small="clients with much to do must begin long transactions",
        large="a client that died blocks committed readers for as long",
        low=1,
        high=_CENTURY_S,
    )
    long_timeout_s: int = whole_seconds(
        86_400,
        "The time-out of a long transaction; a day by default.",
        small="batch jobs lose their transactions",
        large="a job that died blocks committed readers for as long",
        low=1,
        high=_CENTURY_S,
    )
    max_lifetime_s: int = whole_seconds(
        90_000,
        "The age beyond which a write pointer is refused with 409 transaction_expired; 25 hours by "
        "default, 0 switches the check off, and with it the pruning of the invalid list.",
        small="long transactions cannot publish",
        large="messages of forgotten transactions can still appear, and the invalid list grows meanwhile",
        low=0,
        high=_CENTURY_S,
    )
    max_open: int = count(
        20_000,
        "Transactions in progress at once; beyond it the answer to a new one is 503 overloaded.",
        small="clients are refused",
        large="every snapshot names all of them, and grows by 8 bytes for each",
        high=1_000_000,
    )
    max_invalid: int = count(
        100_000,
        "Pointers on the invalid list; beyond it no transaction begins until some are pruned.",
        small="after many time-outs no client can begin a transaction",
        large="every snapshot names all of them, and grows by 8 bytes for each",
    )
    max_outcomes: int = count(
        200_000,
        "Decided transactions whose outcome is remembered; beyond it the oldest is forgotten.",
        small="a client that lost the answer to its commit may not learn the outcome",
        large="more memory, and a longer start",
    )
    outcome_retention_s: int = whole_seconds(
        90_000,
        "How long the outcome of a transaction is remembered; 25 hours by default.",
        small="a client that lost the answer to its commit may not learn the outcome",
        large="more memory, and a longer start",
        low=1,
        high=_CENTURY_S,
    )
    max_change_set_bytes: int = size(
        16 * MIB,
        "The keys of one transaction's change set together; beyond it the answer is 413 transaction_too_large.",
        small="transactions that changed much cannot be committed",
        large="the memory of the service grows with what its clients change",
        low=KIB,
        high=1 * GIB,
    )
    max_per_topic: int = count(
        65_536,
        "Undecided pointers one topic may have messages of; beyond it a new one is 503 overloaded.",
        small="publishers under many transactions are refused",
        large="more memory, and a longer load of the topic",
        high=1_000_000,
    )
    max_held_polls: int = count(
        10_000,
        "Committed polls that may wait for a transaction to be decided; beyond it the answer is 503 overloaded.",
        small="waiting consumers are refused",
        large="memory grows with waiting consumers",
        high=1_000_000,
    )
    commit_deadline_s: float = seconds(
        15.0,
        "Among several instances, how long a commit waits for the next of its topics to finish its writes under it, "
        "counted from the last one that did; after it nothing has happened, and it can be sent again. All of its "
        "topics together may take so long for every 16 of them. At least cluster.session_timeout_s and 3 s.",
        small="commits fail while topics change hands, and have to be sent again",
        large="commits wait for a topic that does not answer",
        low=0.1,
        high=3_600.0,
    )
    abort_deadline_s: float = seconds(
        15.0,
        "How long an abort waits for the next topic to roll back the transaction's messages, counted from the last "
        "one that did; after it the transaction is invalid. All topics together may take so long for every 16 of "
        "them. Among several instances at least cluster.session_timeout_s and 3 s.",
        small="aborts end as invalidations while topics are being loaded, or change hands",
        large="aborts wait for a topic that does not answer",
        low=0.1,
        high=3_600.0,
    )
    prune: bool = switch(
        True,
        "Take pointers off the invalid list once all their messages are rolled back and they are older than "
        "transactions.max_lifetime_s; never while transactions.thrift is set.",
    )


# --- clustering ------------------------------------------------------------------------------------


#: The path of the nodes when ``cluster.zookeeper`` names none.
DEFAULT_PATH = "/plainsong"
#: How long it takes, after the session of an owner that died, until the next owner has answered.
TAKE_OVER_S = 3.0
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5}"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Several instances as one service, by ZooKeeper."""

    zookeeper: str = text(
        "",
        "The ensemble by which instances find each other, as host:port[,host:port...][/path], by default at "
        "/plainsong; empty: this instance is alone and owns all topics. It needs storage.kind = hbase.",
        pattern=rf"(?:{_HOST}(?:,{_HOST})*(?:/[\w./-]*)?)?",
        expected='text like "zk1:2181,zk2:2181,zk3:2181/plainsong"',
    )
    instance: str = text(
        "",
        "The name of this instance, unique and the same after a restart; empty: the host's name and the port.",
        pattern=r"[\w.-]{0,100}",
        expected="up to 100 letters, digits, _, - and .",
    )
    advertise: str = optional_address(
        "The address by which clients and other instances reach this one; empty: http.bind, if that names one machine."
    )
    session_timeout_s: float = seconds(
        10.0,
        "How long an instance may be silent before its topics go to the others; ZooKeeper has bounds of its own, 2 and "
        "20 ticks.",
        small="a short pause of an instance, or of ZooKeeper, moves its topics",
        large="topics of an instance that died are not served meanwhile",
        low=1.0,
        high=600.0,
    )
    zookeeper_auth_file: str = file_name(
        "The file with one line, digest USER:PASSWORD, by which ZooKeeper knows this deployment; its nodes are then "
        "nobody else's to read or change. Empty: they are everybody's.",
    )
    zookeeper_tls: bool = switch(False, "Speak TLS to ZooKeeper.")
    zookeeper_ca: str = file_name("The file with the authorities that sign ZooKeeper's certificates, PEM.")
    zookeeper_certificate: str = file_name("The file with the certificate to show to ZooKeeper, PEM; empty: none.")
    zookeeper_key: str = file_name("The file with the key of that certificate, PEM.")
    secret_file: str = file_name(
        "The file with the secret that all instances share, 32 bytes or more in one line, by which each proves to "
        "another that it is one of them; empty: none.",
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
        """How long the topics of an instance that died may be unanswered; 0: there are no other instances."""
        return self.session_timeout_s + TAKE_OVER_S if self.zookeeper else 0.0


class Ensemble(NamedTuple):
    """The parts of ``cluster.zookeeper``."""

    hosts: str
    """``host:port``, separated by commas."""
    path: str
    """Where the nodes are: begins with a slash and does not end with one."""


def parse_ensemble(ensemble: str) -> Ensemble:
    """The parts of ``cluster.zookeeper``. Raises ValueError where an address is none."""
    hosts, slash, path = ensemble.partition("/")
    for host in hosts.split(","):
        parse_address(host)
    steps = [step for step in path.split("/") if step]
    if any(step in (".", "..") for step in steps):
        raise ValueError(f"{slash}{path} is no path of ZooKeeper")
    return Ensemble(hosts, "/" + "/".join(steps) if steps else DEFAULT_PATH)


def is_wildcard(address: Address) -> bool:
    """Whether the host stands for all addresses of a machine, which no other machine can connect to."""
    return address.host in ("0.0.0.0", "::", "*")  # noqa: S104 - compared, not listened on
