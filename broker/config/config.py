"""All settings together, and how to walk over them by name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, cast

from broker.config.clustering import ClusterConfig
from broker.config.core import CommitConfig, PollConfig, StorageConfig, TopicConfig
from broker.config.deduplicating import DeduplicationConfig
from broker.config.front import HttpConfig, LogConfig, ShutdownConfig
from broker.config.keeping import CacheConfig, ReadersConfig, RetentionConfig
from broker.config.meaning import MEANING, Meaning
from broker.config.transacting import TransactionsConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Config:
    """The daemon's settings. ``Config()`` is all defaults."""

    http: HttpConfig = field(default_factory=HttpConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    topic: TopicConfig = field(default_factory=TopicConfig)
    commit: CommitConfig = field(default_factory=CommitConfig)
    poll: PollConfig = field(default_factory=PollConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    readers: ReadersConfig = field(default_factory=ReadersConfig)
    transactions: TransactionsConfig = field(default_factory=TransactionsConfig)
    deduplication: DeduplicationConfig = field(default_factory=DeduplicationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    log: LogConfig = field(default_factory=LogConfig)
    shutdown: ShutdownConfig = field(default_factory=ShutdownConfig)

    def value(self, name: str) -> Any:
        """The value of ``section.key``; a section may be one within another, as ``storage.hbase``."""
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

    @property
    def variable(self) -> str:
        """The name of its environment variable."""
        return f"PLAINSONG_{self.name}".replace(".", "__").upper()


@cache
def sections() -> Mapping[str, type[Any]]:
    """The class of each section, in the order of ``Config``; one within another comes behind it."""
    return dict(_sections_in(Config(), ""))


def _sections_in(section: Any, prefix: str) -> Iterator[tuple[str, type[Any]]]:
    for part in fields(section):
        if MEANING not in part.metadata:
            inner = getattr(section, part.name)
            yield prefix + part.name, type(inner)
            yield from _sections_in(inner, f"{prefix}{part.name}.")


@cache
def every_setting() -> Mapping[str, Setting]:
    """Every setting by its name, in the order of the classes."""
    found = (
        Setting(section, part.name, part.default, part.metadata[MEANING])
        for section, cls in sections().items()
        for part in fields(cls)
        if MEANING in part.metadata
    )
    return {setting.name: setting for setting in found}


def config_of(values: Mapping[str, Any]) -> Config:
    """The configuration with ``values`` by name, and defaults for the others."""
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
