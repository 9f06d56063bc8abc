"""Targets, each a bound for a number in the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from bench.rounds import Row, Section, Spread


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and its measured value."""

    target: str
    bound: float
    direction: Literal[">=", "<=", "<"]
    result: float
    """The median of the target's worst case; of its best one if ``Target.best``."""
    where: str
    """The labels of that case."""

    @property
    def reached(self) -> bool:
        """True if the result is within the bound."""
        if self.direction == ">=":
            return self.result >= self.bound
        return self.result <= self.bound if self.direction == "<=" else self.result < self.bound

    def record(self) -> dict[str, Any]:
        """Return its form in the JSON report."""
        fields = {name: getattr(self, name) for name in ("target", "bound", "direction", "result", "where")}
        return fields | {"reached": self.reached}


@dataclass(frozen=True, slots=True)
class Target:
    """A bound for a column in some rows of a section."""

    says: str
    section: str
    column: str
    direction: Literal[">=", "<=", "<"]
    bound: float
    applies: Callable[[Mapping[str, Any]], bool]
    best: bool = False
    """True if one case has to reach it: the target names a number, not a load."""

    def judge(self, sections: Iterable[Section]) -> Verdict | None:
        """Return the verdict; None if no row applies."""
        rows = [row for section in sections if section.name == self.section for row in section.rows]
        cases = [(self._value(row), row) for row in rows if self.applies(row.what) and self.column in row.values]
        if not cases:
            return None
        low = (self.direction == ">=") != self.best
        value, row = (min if low else max)(cases, key=lambda case: case[0].median)
        where = ", ".join(f"{key} {what}" for key, what in row.what.items())
        return Verdict(self.says, self.bound, self.direction, value.median, where)

    def _value(self, row: Row) -> Spread:
        return row.values[self.column]


def _single(connections: int) -> Callable[[Mapping[str, Any]], bool]:
    return lambda what: what["messages"] == 1 and what["connections"] >= connections


def _of_messages(what: Mapping[str, Any]) -> bool:
    return bool(what["what"] == "messages" and what["stored"] <= 10_000_000)


def _load(*starts: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda what: str(what["load"]).startswith(starts)


def _same_rate(what: Mapping[str, Any]) -> bool:
    return what["peer"] == "plainsong" and str(what["rate"]).endswith("a second")


TARGETS = (
    Target(
        "single durable publishes ÷ bare ASGI requests, from 16 connections on",
        "publish",
        "÷ bare",
        ">=",
        2.5,
        _single(16),
    ),
    Target(
        "single durable publishes ÷ the listener's own empty answer, from 64 connections on",
        "publish",
        "÷ listener",
        ">=",
        0.4,
        _single(64),
    ),
    Target(
        "requests of 1000 messages of 100 B ÷ raw plyvel's synced batches of the same, from 16 connections on",
        "publish",
        "÷ raw request",
        ">=",
        0.45,
        lambda what: what["messages"] == 1000 and what["bytes"] == 100 and what["connections"] >= 16,
    ),
    Target(
        "single publishes of 100 B over one stream from one Python client, messages/s",
        "stream",
        "messages/s",
        ">=",
        100_000,
        lambda what: what["what"] == "stream",
    ),
    Target(
        "cached polls of 10 000 messages, messages/s",
        "poll",
        "messages/s",
        ">=",
        3e6,
        lambda what: what["what"] == "cached avro",
        best=True,
    ),
    Target(
        "cold polls of 10 000 messages from large requests ÷ a raw plyvel scan",
        "poll",
        "÷ raw scan",
        ">=",
        0.5,
        lambda what: what["what"] == "cold avro",
        best=True,
    ),
    Target(
        "cold polls of 10 000 messages from small requests ÷ a raw plyvel scan",
        "poll",
        "÷ raw scan",
        ">=",
        0.5,
        lambda what: what["what"] == "cold, small requests, avro",
        best=True,
    ),
    Target(
        "publishes under a write pointer ÷ plain ones",
        "transactions",
        "÷ plain",
        ">=",
        0.8,
        lambda what: str(what["what"]).startswith("publish "),
    ),
    Target(
        "committed polls ÷ uncommitted ones of the same messages",
        "transactions",
        "÷ plain",
        ">=",
        0.8,
        lambda what: what["what"] == "committed poll",
    ),
    Target(
        "begin, publish and commit by one client, in plain publishes",
        "transactions",
        "÷ plain",
        "<=",
        2.8,
        lambda what: what["what"] == "cycle",
    ),
    Target(
        "p99 from publish to a committed reader, ms, a million messages stored at the same time",
        "delivery",
        "p99 ms",
        "<",
        1000.0,
        lambda what: what["stored at the same time"] != 0,
    ),
    Target(
        "publishes of producers ÷ plain ones",
        "producers",
        "÷ plain",
        ">=",
        0.9,
        lambda what: str(what["what"]).startswith("deduplicated"),
    ),
    Target(
        "atomic batches of 10 and 100 ÷ plain requests of the same size",
        "producers",
        "÷ plain",
        ">=",
        0.9,
        lambda what: str(what["what"]).startswith("atomic"),
    ),
    Target(
        "rows of 100 B read by Spark, rows/s",
        "spark",
        "rows/s",
        ">=",
        600_000,
        lambda what: what["what"] == "read" and what["bytes"] == 100,
        best=True,
    ),
    Target(
        "rows of 100 B written by Spark, durable and visible, rows/s",
        "spark",
        "rows/s",
        ">=",
        470_000,
        lambda what: what["what"] == "write" and what["bytes"] == 100,
        best=True,
    ),
    Target(
        "topic to a Delta table by the archive job ÷ Spark's own copy of the same rows",
        "spark",
        "÷ copy",
        ">=",
        0.3,
        lambda what: what["what"] == "archive",
    ),
    Target(
        "on HBase: requests of 1000 messages of 100 B ÷ raw mutateRows of the same",
        "hbase",
        "÷ mutateRows",
        ">=",
        0.5,
        lambda what: what["what"] == "groups",
    ),
    Target(
        "on HBase: polls of 10 000 messages ÷ a raw scan of the rows that mutateRows put",
        "hbase",
        "÷ scan of rows",
        ">=",
        0.5,
        lambda what: what["what"] == "poll frames",
    ),
    Target(
        "on HBase: p50 of a single publish, in the round trips that its commit needs",
        "hbase",
        "÷ round trips",
        "<=",
        2.5,
        lambda what: what["what"] == "single",
    ),
    Target(
        "several instances: processor time of a message, or of forwarding a publish, ÷ with fewer instances",
        "cluster",
        "÷ fewer instances",
        "<=",
        1.15,
        lambda what: what["what"] in ("topics", "forwarded publish"),
    ),
    Target(
        "several instances: median silence of a topic whose owner leaves, s a thousand topics",
        "cluster",
        "median s a thousand",
        "<",
        1.0,
        lambda what: what["what"] == "hand-over, leaving",
    ),
    Target(
        "several instances: longest silence of a topic whose owner was killed, s, its session 4 s",
        "cluster",
        "worst s",
        "<=",
        6.0,
        lambda what: what["what"] == "hand-over, killed",
    ),
    Target(
        "two front ends: single durable publishes ÷ those of one process, 64 connections, two cores of their own",
        "front",
        "÷ by CPU",
        ">=",
        1.5,
        lambda what: what["connections"] == 64,
    ),
    Target(
        "two front ends: median of a publish at one connection ÷ that of one process",
        "front",
        "p50 ÷ one process",
        "<=",
        1.2,
        lambda what: what["connections"] == 1,
    ),
    Target(
        "p99 of a single publish during cleaning ÷ its quiet p99", "cleaning", "÷ quiet p99", "<=", 1.5, lambda _: True
    ),
    Target(
        "longest wait of a request of 1000 in an open loop at half of the highest rate, ms",
        "evenness",
        "max ms",
        "<",
        250.0,
        lambda what: (what["what"], what["beside"], what["of the highest"]) == ("batches", "alone", "1/2"),
    ),
    Target(
        "messages a second into a store of up to ten million ÷ into the first million, over 50 topics",
        "growth",
        "÷ first size",
        ">=",
        0.8,
        _of_messages,
    ),
    Target(
        "the daemon's own memory after up to ten million messages have been stored, MB",
        "growth",
        "anon MB",
        "<",
        250.0,
        _of_messages,
    ),
    Target("start with up to ten million messages, s", "growth", "start s", "<", 2.0, _of_messages),
    Target("single publishes ÷ the original service's", "peers-rates", "÷ original", ">=", 1.0, _load("single")),
    Target("requests of 1000 ÷ the original service's", "peers-rates", "÷ original", ">=", 1.2, _load("batch")),
    Target("a page again and again ÷ the original service's", "peers-rates", "÷ original", ">=", 1.5, _load("page")),
    Target("a topic from its start ÷ the original service's", "peers-rates", "÷ original", ">=", 1.0, _load("walk")),
    Target(
        "whole transactions of one client ÷ the original service's",
        "peers-rates",
        "÷ original",
        ">=",
        0.75,
        _load("transaction, 1 topic, 1 connection"),
    ),
    Target(
        "whole transactions of sixteen clients ÷ the original service's",
        "peers-rates",
        "÷ original",
        ">=",
        1.3,
        _load("transaction, 1 topic, 16 connections"),
    ),
    Target(
        "median wait in an open loop ÷ the original service's", "peers-open", "p50 ÷ original", "<=", 1.0, _same_rate
    ),
    Target("p99.9 in an open loop ÷ the original service's", "peers-open", "p99.9 ÷ original", "<=", 1.0, _same_rate),
    Target(
        "single publishes at 16 connections with names and a thousand grants ÷ without",
        "secured",
        "÷ plain",
        ">=",
        0.97,
        lambda what: what["what"] == "names",
    ),
    Target(
        "processor time of such a publish ÷ that of one without names",
        "secured",
        "CPU ÷ plain",
        "<=",
        1.03,
        lambda what: what["what"] == "names",
    ),
    Target(
        "single publishes at 16 connections under TLS ÷ plain",
        "secured",
        "÷ plain",
        ">=",
        0.7,
        lambda what: what["what"] == "TLS",
    ),
    Target(
        "or: processor time that TLS adds to a publish, µs",
        "secured",
        "CPU more",
        "<=",
        50.0,
        lambda what: what["what"] == "TLS",
    ),
    Target(
        "processor time of a single publish to a chained topic ÷ to one without a chain",
        "chained",
        "CPU ÷ plain",
        "<=",
        1.1,
        lambda _: True,
    ),
    Target(
        "single publishes with an asynchronous second copy ÷ without a copy",
        "copied",
        "async ÷ none",
        ">=",
        0.9,
        lambda what: what["what"] == "single" and what["put ms"] == 0,
    ),
    Target(
        "single publishes at 50 connections with a synchronous second copy ÷ without a copy",
        "copied",
        "sync ÷ none",
        ">=",
        0.5,
        lambda what: what["what"] == "single" and what["put ms"] == 0 and what["connections"] == 50,
    ),
    Target(
        "silence of a take-over after the time of the lease, s",
        "copied",
        "after the lease s",
        "<=",
        3.0,
        lambda what: what["what"] == "take-over",
    ),
    Target(
        "silence of a planned switch, s",
        "copied",
        "silent s",
        "<=",
        2.0,
        lambda what: what["what"] == "switch",
    ),
    Target(
        "resident memory with idle topics, MB",
        "memory",
        "resident MB",
        "<",
        120.0,
        lambda what: "idle topics" in str(what["state"]),
    ),
)


def judge(sections: Iterable[Section]) -> list[Verdict]:
    """Return the verdicts of all targets that these sections have measured."""
    measured = list(sections)
    return [verdict for target in TARGETS if (verdict := target.judge(measured)) is not None]
