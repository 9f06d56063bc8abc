"""All settings together: found by name, checked against each other, and noted by ``config check`` if they are
unlikely."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, cast

from actors.settings import CommitConfig, ReplicationConfig, RetentionConfig, TopicConfig
from broker.config.sections import (
    TAKE_OVER_S,
    BackupConfig,
    CacheConfig,
    ClusterConfig,
    ConsoleConfig,
    DeduplicationConfig,
    HttpConfig,
    LogConfig,
    MetricsConfig,
    OtelConfig,
    PollConfig,
    ReadersConfig,
    SecurityConfig,
    ShutdownConfig,
    TlsConfig,
    TransactionsConfig,
    is_wildcard,
    parse_ensemble,
)
from broker.config.values import is_loopback, parse_address, show_value
from storage.config import StorageConfig
from storage.settings import MEANING, Meaning

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from broker.config.values import Address


@dataclass(frozen=True, slots=True)
class Config:
    """The daemon's settings. ``Config()`` is all defaults."""

    http: HttpConfig = field(default_factory=HttpConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    topic: TopicConfig = field(default_factory=TopicConfig)
    commit: CommitConfig = field(default_factory=CommitConfig)
    poll: PollConfig = field(default_factory=PollConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    backup: BackupConfig = field(default_factory=BackupConfig)
    replication: ReplicationConfig = field(default_factory=ReplicationConfig)
    readers: ReadersConfig = field(default_factory=ReadersConfig)
    transactions: TransactionsConfig = field(default_factory=TransactionsConfig)
    deduplication: DeduplicationConfig = field(default_factory=DeduplicationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    otel: OtelConfig = field(default_factory=OtelConfig)
    shutdown: ShutdownConfig = field(default_factory=ShutdownConfig)

    def value(self, name: str) -> Any:
        """Return the value of ``section.key``; a section may be nested, as ``storage.hbase``."""
        return reduce(getattr, name.split("."), self)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name as ``section.key``, its default and what it means."""

    section: str
    key: str
    default: Any
    meaning: Meaning

    @property
    def name(self) -> str:
        """``section.key``."""
        return f"{self.section}.{self.key}"


@cache
def sections() -> Mapping[str, type[Any]]:
    """Return the class of each section, in the order of ``Config``; a nested section follows its parent."""
    return dict(_sections_in(Config(), ""))


def _sections_in(section: Any, prefix: str) -> Iterator[tuple[str, type[Any]]]:
    for part in fields(section):
        if MEANING not in part.metadata:
            inner = getattr(section, part.name)
            yield prefix + part.name, type(inner)
            yield from _sections_in(inner, f"{prefix}{part.name}.")


@cache
def every_setting() -> Mapping[str, Setting]:
    """Return every setting by its name, in the order of the classes."""
    found = (
        Setting(section, part.name, part.default, part.metadata[MEANING])
        for section, cls in sections().items()
        for part in fields(cls)
        if MEANING in part.metadata
    )
    return {setting.name: setting for setting in found}


def config_of(values: Mapping[str, Any]) -> Config:
    """Return the configuration with ``values`` by name, and defaults for the others. Raises ValueError: unknown names."""
    if unknown := values.keys() - every_setting().keys():
        raise ValueError(f"unknown settings: {', '.join(sorted(unknown))}")
    return cast("Config", _filled(Config(), "", values))


def _filled(section: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    changes: dict[str, Any] = {}
    for part in fields(section):
        name = prefix + part.name
        if MEANING not in part.metadata:
            changes[part.name] = _filled(getattr(section, part.name), f"{name}.", values)
        elif name in values:
            changes[part.name] = values[name]
    return replace(section, **changes)


# --- problems --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it was set, what is wrong, and what to do about it."""

    origin: str
    detail: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.origin}: {self.detail}" + (f" ({self.hint})" if self.hint else "")


class ConfigError(Exception):
    """The settings cannot be used, for all reasons in ``problems``. Nothing was opened."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


# --- cross-field checks ----------------------------------------------------------------------------


#: The shortest period of a lease, apart from 0: each renewal takes a request.
MIN_LEASE_S = 1.0
#: The first setting must be at least this many times the third; otherwise the fourth is the consequence.
_AT_LEAST = (
    # A compressed body and its decompressed form are in memory together.
    ("http.max_inflight_bytes", 2, "http.max_body_bytes", "the largest allowed body could never be accepted"),
    # A page and its encoded form are in memory together, and the last part of the budget is for small answers.
    (
        "http.max_answer_bytes",
        3,
        "topic.max_message_bytes",
        "the largest allowed message could rarely be read",
    ),
    ("http.max_body_bytes", 1, "topic.max_message_bytes", "the largest allowed message would not fit into any body"),
    ("topic.mailbox_bytes", 1, "http.max_body_bytes", "the largest allowed body would not fit into any mailbox"),
    (
        "deduplication.max_retention_s",
        1,
        "deduplication.producer_retention_s",
        "the default retention would not be allowed",
    ),
    (
        "deduplication.max_producers",
        1,
        "deduplication.max_long_producers",
        "producers with a long retention count too, and new ones could never replace any",
    ),
    ("transactions.max_timeout_s", 1, "transactions.timeout_s", "the default time-out would not be allowed"),
)


def check_across(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Return the problems of settings that are valid alone but not together."""
    return [
        *_tls_problems(config, origins),
        *_too_small(config, origins),
        *_service_mismatches(config, origins),
        *_hbase_problems(config, origins),
        *_cluster_problems(config, origins),
        *_provider_problems(config, origins),
        *_replication_problems(config, origins),
    ]


def _provider_problems(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """A provider needs its issuer, audience and keys: set all three, or none."""
    names = [f"security.oidc.{key}" for key in ("issuer", "audience", "jwks")]
    given = [name for name in names if config.value(name)]
    if len(given) in (0, len(names)):
        return []
    missing = " and ".join(name for name in names if name not in given)
    return [
        Problem(origins[given[0]], f"{_shown(config, given[0])} without {missing}", "set all three or none of them")
    ]


def _replication_problems(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Check that the store is LevelDB, that the backlog holds two segments, and that the lease can be renewed."""
    replication, origin = config.replication, origins["replication.to"]
    found: list[Problem] = []
    if replication.to and config.storage.kind != "leveldb":
        what = f'replication.to needs storage.kind = "leveldb", and {_shown(config, "storage.kind")}'
        found.append(
            Problem(
                _both(origin, origins["storage.kind"]),
                what,
                "remove replication.to; HBase keeps its own replicas",
            )
        )
    if replication.backlog_bytes < 2 * replication.segment_bytes:
        what = _is_less(config, "replication.backlog_bytes", 2, "replication.segment_bytes")
        found.append(Problem(origins["replication.backlog_bytes"], what, "raise the first, or lower the second"))
    if 0 < replication.lease_s < MIN_LEASE_S:
        what = f"{_shown(config, 'replication.lease_s')} is below {MIN_LEASE_S:g}"
        found.append(
            Problem(
                origins["replication.lease_s"], what, "raise it, or set 0, with which a standby takes over only by hand"
            )
        )
    if replication.role == "standby" and not replication.to:
        what = f"{_shown(config, 'replication.role')} without replication.to"
        found.append(Problem(origins["replication.role"], what, "set it to the URL that the primary has there"))
    if replication.standby == "expected" and replication.to.startswith("file:"):
        what = (
            f"{_shown(config, 'replication.standby')} does not work with a folder as replication.to: it has no lease "
            "in which a standby could register"
        )
        found.append(
            Problem(
                _both(origin, origins["replication.standby"]),
                what,
                "remove replication.standby, or use an object store",
            )
        )
    return found


def _too_soon(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Report decision deadlines that may pass before the topics of a dead instance have another owner.

    Deadlines left at their default are extended instead.
    """
    least_s = config.cluster.take_over_s
    return [
        Problem(
            _both(origins[name], origins["cluster.session_timeout_s"]),
            f"{_shown(config, name)} is less than {_shown(config, 'cluster.session_timeout_s')} and {TAKE_OVER_S:g} s",
            f"set at least {least_s:g}, or remove it: until then the topics of a dead instance have no owner",
        )
        for name in ("transactions.commit_deadline_s", "transactions.abort_deadline_s")
        if config.transactions.service == "embedded" and origins[name] != "default" and config.value(name) < least_s
    ]


def _too_small(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    return [
        Problem(_both(origins[larger], origins[smaller]), _is_less(config, larger, times, smaller), why)
        for larger, times, smaller, why in _AT_LEAST
        if config.value(larger) < times * config.value(smaller)
    ]


def _service_mismatches(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Tephra's address needs Tephra as the service; a listener for Tephra's clients needs the embedded service."""
    chosen = config.transactions
    service = "transactions.service"
    found: list[Problem] = []
    if chosen.service == "tephra" and not chosen.tephra:
        found.append(
            Problem(origins[service], f"{_shown(config, service)} without transactions.tephra", "set its address")
        )
    for name, needs in (("transactions.tephra", "tephra"), ("transactions.thrift", "embedded")):
        if config.value(name) and chosen.service != needs:
            what = f'{_shown(config, name)} needs transactions.service = "{needs}"'
            found.append(Problem(_both(origins[name], origins[service]), what, "remove it, or change the service"))
    return found


def _tls_problems(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    tls = config.tls
    needed = {
        "tls.certificate": bool(
            tls.key or tls.client_ca or tls.client_certificates != "off" or config.transactions.thrift_tls
        ),
        "tls.key": bool(tls.certificate),
        "tls.client_ca": tls.client_certificates != "off",
    }
    given = (origins[f"tls.{key}"] for key in ("certificate", "key", "client_certificates", "client_ca"))
    set_here = next((origin for origin in given if origin != "default"), "default")
    return [
        Problem(set_here, f"TLS needs {name}", f"set {name}")
        for name, is_needed in needed.items()
        if is_needed and not config.value(name)
    ]


def _hbase_problems(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """TLS to the gateways needs an authority; a certificate and its key need each other."""
    hbase = config.storage.hbase
    found: list[Problem] = []
    if hbase.tls and not hbase.tls_ca:
        found.append(Problem(origins["storage.hbase.tls"], "storage.hbase.tls needs storage.hbase.tls_ca"))
    if bool(hbase.tls_certificate) != bool(hbase.tls_key):
        given = "storage.hbase.tls_certificate" if hbase.tls_certificate else "storage.hbase.tls_key"
        what = "storage.hbase.tls_certificate and storage.hbase.tls_key need each other"
        found.append(Problem(origins[given], what))
    return found


def _cluster_problems(config: Config, origins: Mapping[str, str]) -> list[Problem]:
    """Several instances need a store that all of them reach, and must reach each other."""
    cluster, origin = config.cluster, origins["cluster.zookeeper"]
    if not cluster.zookeeper:
        return []
    found: list[Problem] = []
    try:
        parse_ensemble(cluster.zookeeper)
    except ValueError as error:
        found.append(Problem(origin, f"cluster.zookeeper: {error}"))
    if config.storage.kind != "hbase":
        kind = _shown(config, "storage.kind")
        found.append(
            Problem(
                _both(origin, origins["storage.kind"]),
                f'cluster.zookeeper needs storage.kind = "hbase", and {kind}',
                "leave cluster.zookeeper empty for a single instance",
            )
        )
    if cluster.zookeeper_tls and not cluster.zookeeper_ca:
        found.append(Problem(origins["cluster.zookeeper_tls"], "cluster.zookeeper_tls needs cluster.zookeeper_ca"))
    if bool(cluster.zookeeper_certificate) != bool(cluster.zookeeper_key):
        what = "cluster.zookeeper_certificate and cluster.zookeeper_key need each other"
        found.append(Problem(origins["cluster.zookeeper_certificate"], what))
    if config.tls.certificate and not config.tls.client_ca:
        hint = "set it to the file with the certificate authority of all instances"
        found.append(Problem(origin, "with cluster.zookeeper TLS needs tls.client_ca", hint))
    found += _too_soon(config, origins)
    name = "cluster.advertise" if cluster.advertise else "http.bind"
    address = advertised(config)
    if address is None or is_wildcard(address) or (cluster.advertise and address.port == 0):
        what = f"{_shown(config, name)} is not an address that other instances and clients can reach"
        found.append(Problem(_both(origin, origins[name]), what, "set cluster.advertise to this instance's address"))
    return found


def advertised(config: Config) -> Address | None:
    """Return the address at which clients and other instances reach this one; port 0: the port that it will bind."""
    return parse_address(config.cluster.advertise) if config.cluster.advertise else config.http.address


def _is_less(config: Config, larger: str, times: int, smaller: str) -> str:
    least = "" if times == 1 else f"{times} times "
    return f"{_shown(config, larger)} is less than {least}{_shown(config, smaller)}"


def _both(first: str, second: str) -> str:
    return first if first == second else f"{first}, {second}"


def _shown(config: Config, name: str) -> str:
    return f"{name} = {show_value(every_setting()[name].meaning, config.value(name))}"


# --- notes -----------------------------------------------------------------------------------------


def notes(config: Config) -> list[str]:
    """Return notes on settings that are allowed but most likely not intended, for ``config check``."""
    return [*_idle(config), *(_clustered(config) if config.cluster.zookeeper else _alone(config))]


def _idle(config: Config) -> Iterator[str]:
    """Yield notes on changed settings that have no effect."""
    for name, setting in every_setting().items():
        if config.value(name) == setting.default:
            continue
        if name.startswith("storage.hbase.") and config.storage.kind != "hbase":
            yield f"{_shown(config, name)} has no effect while {_shown(config, 'storage.kind')}"
        if name.startswith("storage.hbase.tls_") and not config.storage.hbase.tls:
            yield f"{_shown(config, name)} has no effect without storage.hbase.tls"
        if (
            name.startswith("security.")
            and name not in ("security.allowed_hosts", "security.allowed_origins", "security.allow_insecure")
            and config.security.authentication == "off"
        ):
            yield f"{_shown(config, name)} has no effect while {_shown(config, 'security.authentication')}"
        if name.startswith("replication.") and not config.replication.to:
            yield f"{_shown(config, name)} has no effect without replication.to"
        if name.startswith("cluster.") and not config.cluster.zookeeper:
            yield f"{_shown(config, name)} has no effect without cluster.zookeeper"


def _alone(config: Config) -> Iterator[str]:
    if config.storage.kind == "hbase":
        yield (
            "without cluster.zookeeper this instance assumes that no other daemon uses its tables: two such daemons "
            "would keep taking topics from each other"
        )


def _clustered(config: Config) -> Iterator[str]:
    name = "cluster.advertise" if config.cluster.advertise else "http.bind"
    address = advertised(config)
    assert address is not None  # checked before
    if is_loopback(address):
        yield f"{_shown(config, name)}: only instances on this machine can reach this one; set cluster.advertise"
    if not config.cluster.instance and address.port == 0:
        yield "cluster.instance is empty and the port is 0: this instance gets a new name at each start"
