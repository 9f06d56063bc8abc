"""Gauges that are read at each scrape, one line for each with the source of its value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.logs import counters as log_counters
from plainsong.protocol.errors import TransactionsUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.directory import Directory
    from actors.observe import Clock, SpaceGuard
    from actors.pointers import PointerIndex
    from actors.scrub import Scrub
    from actors.store_time import StoreTime
    from broker.api.messages.events import EventStreams
    from broker.api.operations.backups import Backups
    from broker.authority import Authority, Transactions
    from broker.http.budgets import BodyBudget
    from broker.link.client import Links
    from broker.membership.membership import Membership
    from broker.metrics import Metrics
    from broker.security.setup import Security
    from broker.tls import Certificates
    from plainsong.protocol.topic.producer_state import ProducerTable
    from plainsong.protocol.topic.state import TopicState
    from plainsong.protocol.transactions.asks import ServiceFigures
    from storage.base import Store


def add_gauges(
    metrics: Metrics,
    directory: Directory,
    store: Store,
    clock: Clock,
    space: SpaceGuard,
    bodies: BodyBudget,
    store_time: StoreTime,
) -> None:
    """Register the gauges of every daemon."""
    budget, answers = directory.budget, bodies.answers

    def stored(what: str) -> Callable[[], float | None]:
        return lambda: getattr(store.statistics(), what)

    for name, text, read in (
        ("plainsong_topics_open", "Loaded topics.", lambda: len(directory)),
        ("plainsong_parked_polls", "Polls waiting for a message.", lambda: _parked(directory)),
        ("plainsong_queue_requests", "Requests queued in mailboxes.", lambda: _queued(directory)),
        ("plainsong_queue_bytes", "Bytes of the requests queued in mailboxes.", lambda: _queued_bytes(directory)),
        (
            "plainsong_oldest_message_age_seconds",
            "Age of the oldest message of all open topics.",
            lambda: _oldest(directory, clock),
        ),
        ("plainsong_cache_bytes", "Memory used by the scan cache.", lambda: budget.bytes),
        ("plainsong_cache_hits_total", "Pages served from the scan cache since the start.", lambda: budget.hits),
        (
            "plainsong_cache_misses_total",
            "Pages read from the store since the start, including those read ahead.",
            lambda: budget.misses,
        ),
        ("plainsong_store_bytes", "Bytes that the store occupies on its disk.", stored("bytes")),
        ("plainsong_store_volumes", "Volumes that hold the store's messages.", stored("volumes")),
        ("plainsong_store_volumes_open", "Volumes whose files are open.", stored("open_volumes")),
        ("plainsong_disk_free_bytes", "Free space on the store's disk.", stored("free_bytes")),
        ("plainsong_low_space", "1 while publishes are refused because the disk is nearly full.", lambda: space.low),
        (
            "plainsong_clock_regressions_total",
            "Number of times that the clock has gone back since the start.",
            lambda: clock.regressions,
        ),
        (
            "plainsong_clock_behind_seconds",
            "How far the clock is behind the newest time in the store.",
            lambda: store_time.behind_ms() / 1000,
        ),
        ("plainsong_producers", "Producers remembered by open topics.", lambda: _producers(directory)),
        (
            "plainsong_producer_unnoted_requests",
            "Requests of producers since the last snapshots, over all open topics.",
            lambda: sum(book.entries for book in _books(directory)),
        ),
        (
            "plainsong_producer_snapshot_age_seconds",
            "Age of the oldest snapshot of producers that has requests after it, over all open topics.",
            lambda: _snapshot_age(directory, clock),
        ),
        (
            "plainsong_producer_replayed_requests",
            "Requests of producers replayed when the open topics were loaded.",
            lambda: sum(book.replayed_entries for book in _books(directory)),
        ),
        ("plainsong_inflight_body_bytes", "Bytes of request bodies in memory.", lambda: bodies.reserved_bytes),
        (
            "plainsong_held_answer_bytes",
            "Bytes of answers in memory that clients have not received yet.",
            lambda: answers.reserved_bytes,
        ),
        (
            "plainsong_answers_refused_total",
            "Answers refused since the start because clients had not received too many others yet.",
            lambda: answers.refused,
        ),
        (
            "plainsong_log_lines_dropped_total",
            "Log lines dropped because the queue was full.",
            lambda: log_counters().dropped,
        ),
        ("plainsong_log_lines_failed_total", "Log lines that could not be written.", lambda: log_counters().failed),
    ):
        metrics.reads(name, text, read)


def add_event_gauges(metrics: Metrics, streams: EventStreams) -> None:
    """Register the gauge of event streams."""
    metrics.reads("plainsong_event_streams", "Open streams of server-sent events.", lambda: streams.open)


def add_keeping_gauges(metrics: Metrics, scrub: Scrub, backups: Backups) -> None:
    """Register the gauges of backups and of the scrub."""
    metrics.reads(
        "plainsong_backup_last_success_timestamp_seconds",
        "Time of the last complete backup of this instance, in seconds since 1970.",
        lambda: None if backups.last_success_ms is None else backups.last_success_ms / 1000,
    )
    metrics.reads(
        "plainsong_scrub_findings",
        "Damaged places found by the current scrub or the last one.",
        lambda: len(scrub.report.findings) + scrub.report.more,
    )
    metrics.reads(
        "plainsong_scrub_last_complete_timestamp_seconds",
        "Time when the last scrub ended, in seconds since 1970.",
        lambda: None if scrub.report.last_complete_ms is None else scrub.report.last_complete_ms / 1000,
    )


def add_tls_gauges(metrics: Metrics, certificates: Certificates) -> None:
    """Register the gauges of the certificate and of handshakes."""
    metrics.reads(
        "plainsong_tls_certificate_not_after_seconds",
        "Expiry time of the served certificate, in seconds since 1970.",
        lambda: certificates.now.not_after_s,
    )
    metrics.reads(
        "plainsong_tls_reload_failures_total",
        "Failed reloads of the certificate's files since the start.",
        lambda: certificates.failures,
    )
    certificates.on_handshake = metrics.shook_hands


def add_security_gauges(metrics: Metrics, security: Security) -> None:
    """Register the gauge of the OpenID provider's keys."""
    metrics.reads(
        "plainsong_jwks_age_seconds",
        "Age of the OpenID provider's keys; 0 without a provider.",
        lambda: 0.0 if security.provider is None else min(security.provider.age_s, 1e9),
    )


def add_link_gauges(metrics: Metrics, links: Links) -> None:
    """Register the gauges of links to other instances."""
    metrics.reads("plainsong_links_open", "Open links to other instances.", lambda: sum(1 for _ in links))
    metrics.reads(
        "plainsong_forwards_under_way",
        "Requests of this instance's clients that other instances are answering.",
        lambda: sum(link.under_way for _, link in links),
    )


def add_cluster_gauges(metrics: Metrics, membership: Membership) -> None:
    """Register the gauges of membership and ownership."""
    metrics.reads("plainsong_zookeeper_connected", "1 while ZooKeeper is connected.", lambda: int(membership.connected))
    metrics.reads(
        "plainsong_instances", "Instances that are available and not leaving.", lambda: len(membership.instances)
    )
    metrics.reads(
        "plainsong_slices",
        "Slices, of 64, in which this instance serves its share of the topics; fewer while it joins or leaves.",
        lambda: membership.slices,
    )
    metrics.reads(
        "plainsong_cluster_changes_total",
        "Changes of instances, pins or drains that this instance has observed.",
        lambda: membership.changes,
    )


def _parked(directory: Directory) -> int:
    return sum(len(entry.actor.core.parking) for entry in directory if entry.actor.core is not None)


def _books(directory: Directory) -> list[ProducerTable]:
    return [entry.actor.core.state.producers for entry in directory if entry.actor.core is not None]


def _producers(directory: Directory) -> int:
    return sum(len(book.known) for book in _books(directory))


def _snapshot_age(directory: Directory, clock: Clock) -> float:
    taken = [book.snapshot_ms for book in _books(directory) if book.entries and book.snapshot_ms]
    return max(0, clock.now_ms() - min(taken)) / 1000 if taken else 0.0


def _queued(directory: Directory) -> int:
    return sum(len(entry.mailbox) for entry in directory)


def _queued_bytes(directory: Directory) -> int:
    return sum(entry.mailbox.bytes for entry in directory)


def _oldest(directory: Directory, clock: Clock) -> float:
    cores = [entry.actor.core for entry in directory if entry.actor.core is not None]
    firsts = [core.state.usage.buckets[0].first_ms for core in cores if core.state.usage.buckets]
    return max(0, clock.now_ms() - min(firsts)) / 1000 if firsts else 0.0


def add_transaction_gauges(
    metrics: Metrics, authority: Authority, directory: Directory, pointers: PointerIndex, clock: Clock
) -> None:
    """Register the gauges of the transaction service, of undecided messages, and of held polls."""

    def figure(read: Callable[[ServiceFigures], float | None]) -> Callable[[], float | None]:
        def reading() -> float | None:
            if authority.embedded is None:
                return None
            try:
                return read(authority.embedded.figures())
            except TransactionsUnavailable:
                return None

        return reading

    def oldest_age_s(figures: ServiceFigures) -> float:
        since_ms = figures.oldest_open_ms
        return 0.0 if since_ms is None else max(0, clock.now_ms() - since_ms) / 1000

    for name, text, read in (
        ("plainsong_transactions_open", "Transactions in progress.", figure(lambda figures: figures.open)),
        (
            "plainsong_transaction_oldest_age_seconds",
            "Age of the longest open transaction.",
            figure(oldest_age_s),
        ),
        ("plainsong_transactions_invalid", "Pointers on the invalid list.", figure(lambda figures: figures.invalid)),
        (
            "plainsong_undecided_pointers",
            "Undecided write pointers with messages in topics.",
            lambda: len(pointers),
        ),
        (
            "plainsong_hidden_messages",
            "Messages that undecided transactions hide from committed readers, over all open topics.",
            lambda: _hidden(authority.transactions, directory),
        ),
        (
            "plainsong_held_polls",
            "Committed polls waiting for a transaction to be decided.",
            lambda: pointers.waiters,
        ),
        (
            "plainsong_tephra_state_age_seconds",
            "Age of the last state received from Tephra; before the first one, seconds since the first request.",
            lambda: None if authority.foreign is None else authority.foreign.silent_s,
        ),
    ):
        metrics.reads(name, text, read)


def _hidden(transactions: Transactions, directory: Directory) -> int:
    cores = [entry.actor.core for entry in directory if entry.actor.core is not None]
    return sum(_hidden_in(transactions, core.state) for core in cores)


def _hidden_in(transactions: Transactions, state: TopicState) -> int:
    """Return the messages from the first undecided one on. Later transactions hide nothing more."""
    for pending in state.pending.values():
        if pending.runs and not _is_over(transactions, pending.pointer):
            return pending.hidden(state.appended)
    return 0


def _is_over(transactions: Transactions, pointer: int) -> bool:
    try:
        return transactions.standing(pointer) in ("committed", "aborted", "invalid")
    except TransactionsUnavailable:
        return False
