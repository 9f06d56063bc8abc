"""Assembles the daemon from its settings: its core, the upkeep of its store, and the subjects of its routes."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from actors.observe import SystemClock
from actors.scrub import Scrub
from actors.set_aside import SetAsides
from actors.store_time import StoreTime
from broker.api.description.asyncapi import AsyncApi
from broker.api.description.openapi import description
from broker.api.description.problems import Problems
from broker.api.messages.events import EventStreams, MessageEvents
from broker.api.messages.holding import Holds
from broker.api.messages.poll import Polling
from broker.api.messages.poll_many import LocalTopics, PollingMany
from broker.api.messages.publish import Publishing
from broker.api.messages.readers import NamedReaders, Readers
from broker.api.messages.set_aside import SettingAside
from broker.api.messages.show import Messages
from broker.api.messages.stream import Streams
from broker.api.operations.backups import Backups
from broker.api.operations.cluster import (
    SECURITY_DIGESTS,
    TOPICS_OPEN,
    ClusterRoutes,
    security_digests_handler,
    topics_open_handler,
)
from broker.api.operations.console import Console
from broker.api.operations.contact import Contact
from broker.api.operations.definitions import Definitions
from broker.api.operations.health import Health
from broker.api.operations.overview import Overview
from broker.api.operations.replication import Replication
from broker.api.operations.scrub import ScrubRoutes, damaged
from broker.api.routes import ROUTES
from broker.api.topics.chain import Chains, chain_secrets
from broker.api.topics.changes import TopicChanges
from broker.api.topics.metrics import TopicMetrics
from broker.api.topics.producers import Producers
from broker.api.topics.stats import Counting
from broker.api.topics.topics import NamespaceRoutes, Policies, Topics, refused_here
from broker.api.transactions.transactions import TransactionRoutes
from broker.api.waiting import metered, reauthorized, refusals_recorded
from broker.attention import FINDINGS, Attention, clock_findings, stale_files
from broker.audit import ACTIONS, Audit, large_audit
from broker.catalogue import FIGURES, Catalogue
from broker.cluster.join import WHO, who_handler
from broker.cluster.serve import Cluster, Local
from broker.cluster.transactions import TransactionCalls
from broker.core import build_core
from broker.daemon import Daemon
from broker.gauges import add_event_gauges, add_keeping_gauges, add_link_gauges
from broker.http.budgets import AnswerBudget
from broker.http.descriptors import Descriptors
from broker.http.route import Accounting, accounted, bind
from broker.leased import begins_while_leased, while_leased
from broker.link.server import in_task
from broker.logs import AccessLog
from broker.security.setup import Security, build_security
from broker.tracing import traced
from plainsong.protocol.codec import avro

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import trio

    from actors.observe import Clock
    from actors.ownership import Ownership
    from actors.second_copy import SecondCopy
    from broker.config import Config
    from broker.core import Core
    from broker.http.messages import Begin, Handler
    from broker.http.route import Endpoint
    from broker.membership.membership import Membership
    from broker.metrics import Metrics
    from broker.tls import Certificates
    from broker.tracing import Traces
    from storage.base import Store


async def assemble(
    config: Config,
    store: Store,
    metrics: Metrics,
    actors: trio.Nursery,
    *,
    ownership: Ownership | None = None,
    membership: Membership | None = None,
    clock: Clock | None = None,
    security: Security | None = None,
    certificates: Certificates | None = None,
    traces: Traces | None = None,
    copy: SecondCopy | None = None,
    switch: Callable[[], None] | None = None,
) -> Daemon:
    """Assemble the daemon without starting it; its actors live in ``actors``.

    Args:
      ownership: which of several instances owns what; None if there is only this one.
      membership: the same, if it comes from ZooKeeper, for the routes that show or change the cluster.
      security: the guard, with its files loaded; None: load them here.
      certificates: for links to other instances; None: links are plain.
      traces: records requests; None: requests are not traced.
      copy: the second copy of the store, whose lease decides what is answered.
      switch: ends this primary for a standby.
    Raises:
      StoreError: the store could not be read.
    """
    if security is None:
        security = build_security(config, metrics, metrics.security_reload_failed, metrics.quota_refused)
    avro.prepare()
    accounting = Accounting(metrics.requested, AccessLog(enabled=config.log.access))
    security.guard.requested = metrics.requested
    security.guard.on_answered = accounting.access.refused
    clock = SystemClock() if clock is None else clock
    core = await build_core(config, store, metrics, actors, ownership, membership, clock, security, certificates)
    care = _care(core)
    service = _service(core, actors, accounting)
    descriptors, answers = Descriptors(), AnswerBudget(config.http.max_answer_bytes)
    handlers: dict[str, Handler] = {}
    subjects = (
        *_message_subjects(core, service),
        *_topic_subjects(core, service),
        *_operation_subjects(core, service, care, handlers, descriptors, copy),
        Replication(copy, config.replication.to, switch, config.replication.lease_s),
    )
    endpoints = bind(ROUTES, subjects, core.tasks)
    begin: Begin = service.streams.begin
    if core.cluster is not None:
        endpoints, begin = _among_instances(core, core.cluster, service, care, endpoints, answers, accounting)
    handlers.update({each.route.name: each.handler for each in endpoints})
    audit = _audit(core, care)
    if security.guard.required:
        endpoints = tuple(
            refusals_recorded(
                audit.audited(refused_here(each), core.reach.owner_known_here, core.tasks),
                security.guard,
                recorded=each.route.name in ACTIONS,
            )
            for each in endpoints
        )
    if copy is not None:
        endpoints, begin = while_leased(endpoints, copy.lease), begins_while_leased(begin, copy.lease)
    return Daemon(
        config=config,
        version=metrics.version,
        store=store,
        clock=clock,
        space=core.space,
        metrics=metrics,
        accounting=accounting,
        directory=core.directory,
        pages=core.pages,
        pointers=core.pointers,
        namespaces=core.namespaces,
        authority=core.authority,
        attention=care.attention,
        scrub=care.scrub,
        answers=answers,
        publishing=service.publishing,
        store_time=care.store_time,
        endpoints=tuple(
            traced(accounted(each, accounting), traces)
            for each in (reauthorized(metered(each, security.guard), security.guard) for each in endpoints)
        ),
        begin=begin,
        cluster=core.cluster,
        security=security,
        audit=audit,
        descriptors=descriptors,
        stopping=core.stopping,
    )


# --- care for the store, and what an operator should look at ---------------------------------------


@dataclass(frozen=True, slots=True)
class _Care:
    """The parts that keep the store sound, and report problems."""

    attention: Attention
    scrub: Scrub
    set_asides: SetAsides
    store_time: StoreTime
    backups: Backups


def _care(core: Core) -> _Care:
    config, store, directory, clock = core.config, core.store, core.directory, core.clock
    attention = Attention(
        directory,
        clock,
        core.space,
        config.storage.min_free_bytes,
        core.authority,
        core.metrics,
        core.ownership,
        core.membership,
        core.links,
    )
    folder = config.storage.data_dir.absolute()
    is_here = store.traits.kind == "leveldb"
    scrub = Scrub(
        store,
        directory,
        clock,
        config.storage.scrub_interval_s,
        config.storage.scrub_bytes_per_s,
        folder / "scrub.json" if is_here else None,
    )
    store_time = StoreTime(clock, directory)
    attention.sources.append(partial(damaged, scrub))
    attention.sources.append(partial(stale_files, lambda: core.security.stale))
    attention.sources.append(partial(clock_findings, store_time))
    backups = Backups(
        store,
        clock,
        directory.environment.ownership.me.name,
        core.metrics.version,
        config.backup,
        folder / "last-backup.json" if is_here else None,
    )
    add_keeping_gauges(core.metrics, scrub, backups)
    return _Care(
        attention=attention,
        scrub=scrub,
        set_asides=SetAsides(store, directory, clock, folder, core.delete_grace_ms, scrub),
        store_time=store_time,
        backups=backups,
    )


def _audit(core: Core, care: _Care) -> Audit:
    """Return the audit; with authentication it records refusals and reloads, and reports what it cannot write."""
    ownership, security = core.ownership, core.security
    audit = Audit(
        core.reach.ask,
        core.clock,
        instance=platform.node() if ownership is None else ownership.me.name,
        required=core.config.security.audit == "required",
        lost=core.metrics.audit_lost,
        store=core.store,
    )
    if security.guard.required:
        care.attention.sources += [audit.findings, partial(large_audit, core.directory)]
        security.guard.on_refused = audit.refused
        security.files.on_reload = audit.reloaded
    return audit


# --- the subjects of the routes: each gets only what it uses ---------------------------------------


@dataclass(frozen=True, slots=True)
class _Service:
    """The objects that several routes, or other instances, share."""

    topics: LocalTopics
    policies: Policies
    publishing: Publishing
    streams: Streams
    polling: Polling
    polling_many: PollingMany
    event_streams: EventStreams
    catalogue: Catalogue
    counting: Counting


def _service(core: Core, actors: trio.Nursery, accounting: Accounting) -> _Service:
    config, store, directory, pages = core.config, core.store, core.directory, core.pages
    transactions, rates = core.authority.transactions, core.rates
    topics, named_readers = LocalTopics(directory, pages), NamedReaders()
    holds = Holds(directory, transactions, core.pointers, core.clock)
    publishing = Publishing(
        directory,
        directory.environment.enlistments,
        transactions,
        rates,
        core.metrics.producer_refused,
        config.deduplication.answer_timeout_s,
        core.tasks,
        core.reach.transaction_owner,
    )
    polling = Polling(
        directory,
        pages,
        transactions,
        holds,
        rates,
        core.metrics.held,
        core.reach.ask,
        config.poll,
        core.stopping,
        core.clock,
        core.metrics.delivered_after,
        named_readers,
        core.tasks,
    )
    counting = Counting(
        directory=directory,
        store=store,
        pages=pages,
        transactions=transactions,
        holds=holds,
        rates=rates,
        named_readers=named_readers,
        stopping=core.stopping,
        max_wait_ms=config.poll.max_wait_ms,
        delete_grace_ms=core.delete_grace_ms,
        ownership=core.ownership,
    )
    event_streams = EventStreams()
    add_event_gauges(core.metrics, event_streams)
    return _Service(
        topics=topics,
        policies=Policies(core.namespaces, config.deduplication.default),
        publishing=publishing,
        streams=Streams(publishing, accounting),
        polling=polling,
        polling_many=PollingMany(topics, transactions, holds, rates, config.poll, core.stopping),
        event_streams=event_streams,
        catalogue=Catalogue(actors, directory, store, core.clock, transactions, rates, core.ownership, core.links),
        counting=counting,
    )


def _message_subjects(core: Core, service: _Service) -> tuple[object, ...]:
    """Return the subjects of the routes of messages, and of transactions."""
    config, authority = core.config, core.authority
    return (
        service.publishing,
        service.streams,
        service.polling,
        service.polling_many,
        MessageEvents(service.polling, service.event_streams),
        Messages(core.directory, core.store, authority.transactions, config.poll.max_bytes),
        Readers(core.directory, config.readers.retention_s * 1000),
        TransactionRoutes(authority, config.transactions, core.reach.ask, core.pointers, core.tasks, core.quotas),
    )


def _topic_subjects(core: Core, service: _Service) -> tuple[object, ...]:
    """Return the subjects of the routes of topics and namespaces."""
    config, directory, store, clock = core.config, core.directory, core.store, core.clock
    return (
        service.counting,
        TopicMetrics(service.catalogue, service.counting),
        Topics(
            directory,
            store,
            service.policies,
            config.topic.default_ttl_s,
            config.http.flat_topic_properties,
            TopicChanges(directory, store, core.pages, core.delete_grace_ms),
            service.catalogue,
            core.tasks,
            core.quotas,
        ),
        NamespaceRoutes(core.namespaces, service.policies),
        Producers(directory, store, clock, service.policies, core.metrics.producer_refused),
        Chains(directory, store, clock, chain_secrets(config)),
    )


def _operation_subjects(
    core: Core,
    service: _Service,
    care: _Care,
    handlers: Mapping[str, Handler],
    descriptors: Descriptors,
    copy: SecondCopy | None,
) -> tuple[object, ...]:
    """Return the subjects of the routes for operators, and of those that describe the API.

    Args:
      handlers: by name, of every route; filled later.
    """
    config, release, security = core.config, core.metrics.version, core.security
    return (
        Overview(
            service.catalogue,
            care.attention,
            core.directory,
            core.rates,
            core.clock,
            service.event_streams,
            core.stopping,
            handlers,
            core.delete_grace_ms,
            sees=lambda request, name: request.rights.any_on_topic(*name),
            sees_service=lambda request: request.rights.on_service("inspect"),
        ),
        SettingAside(care.set_asides),
        ScrubRoutes(care.scrub),
        care.backups,
        Definitions(core.store, core.namespaces, core.membership, config.topic.default_ttl_s, handlers),
        ClusterRoutes(
            core.directory, core.directory.environment.ownership, core.membership, core.links, security.digests
        ),
        Console(config.console.enabled),
        Contact(config.security.contact, core.clock.now_ms),
        Problems(),
        AsyncApi(service.catalogue, release, bool(config.tls.certificate)),
        Health(
            version=release,
            store_kind=core.store.traits.kind,
            decides=config.transactions.service,
            min_free_bytes=config.storage.min_free_bytes,
            directory=core.directory,
            space=core.space,
            transactions=core.authority.transactions,
            metrics=core.metrics,
            stopping=core.stopping,
            membership=core.membership,
            links=core.links,
            description=partial(description, ROUTES, release),
            are_descriptors_short=lambda: descriptors.are_short,
            security=lambda: security.stale,
            groups_of=security.guard.groups_of,
            is_leased=lambda: copy is None or copy.lease.is_current,
        ),
    )


def _among_instances(
    core: Core,
    cluster: Cluster,
    service: _Service,
    care: _Care,
    endpoints: tuple[Endpoint, ...],
    answers: AnswerBudget,
    accounting: Accounting,
) -> tuple[tuple[Endpoint, ...], Begin]:
    """Forward requests to owners, and answer what other instances ask."""
    local = Local(
        core.directory,
        service.topics,
        service.polling_many,
        service.streams,
        answers,
        core.security.guard,
    )
    endpoints = cluster.forward(endpoints, local, core.tasks)
    cluster.dispatcher.kinds[TOPICS_OPEN] = topics_open_handler(core.directory)
    cluster.dispatcher.kinds[SECURITY_DIGESTS] = security_digests_handler(core.security.digests)
    cluster.dispatcher.kinds[FINDINGS] = in_task(care.attention.handler)
    cluster.dispatcher.kinds[FIGURES] = in_task(service.catalogue.figures_handler)
    cluster.dispatcher.kinds[WHO] = who_handler(cluster.ownership.me.name)
    cluster.dispatcher.kinds |= TransactionCalls(core.authority, core.namespaces).kinds()
    add_link_gauges(core.metrics, cluster.links)
    return endpoints, partial(cluster.begin, service.streams)
