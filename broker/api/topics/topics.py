"""Topics and namespaces: create, change, show, list, delete and undelete."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from actors.mailbox import Prepared
from actors.namespaces import checked_properties
from broker.api.answers import json_answer, off_loop
from broker.api.change import change_answer
from broker.http.handlers import rendered
from broker.http.messages import Answer, flag
from broker.http.route import JSON_TYPE, Endpoint
from broker.security.guard import forbidden, target_of
from broker.security.identity import ANONYMOUS
from plainsong.protocol.codec import JSON
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import InvalidParameter, PlainsongError, TopicNotFound
from plainsong.protocol.keys import DamagedRow, namespace_range, topic_of
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import parse_properties
from plainsong.protocol.records import Metadata
from plainsong.protocol.topic.asks import Create, Describe, Remove, SetProperties, Undelete
from plainsong.protocol.topic.producer_state import effective_policy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from actors.directory import Directory
    from actors.namespaces import Namespaces
    from broker.api.topics.changes import TopicChanges
    from broker.catalogue import Catalogue
    from broker.http.handlers import RequestTasks
    from broker.http.messages import Answered, Request
    from broker.security.quotas import Quotas
    from plainsong.protocol.answers.topics import EffectiveDeduplication, NamespaceDescription, TopicDescription
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.errors import QuotaExceeded
    from plainsong.protocol.properties import Deduplication
    from plainsong.protocol.topic.asks import Description
    from storage.base import Row, Store

A = TypeVar("A")
#: Cost of sorting and writing one name, as bytes of JSON.
_NAME_BYTES = 32


class CreatorLocks:
    """A lock for each name that is creating topics."""

    def __init__(self) -> None:
        self._locks: dict[str, trio.Lock] = {}

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of a name."""
        lock = self._locks.setdefault(name, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and self._locks.get(name) is lock:
                del self._locks[name]


class KeptNames:
    """Recent lists of topics, reused until a topic is created, changed or deleted.

    Nothing is kept on a store that other instances write to.
    """

    #: Bytes of all lists, and of the largest one that is kept.
    MAX_BYTES = 1 << 20
    MAX_LIST_BYTES = 256 << 10
    #: Memory of a list in addition to its bytes and the namespace's.
    LIST_BYTES = 512

    def __init__(self, store: Store) -> None:
        self._store = store
        self._number: int | None = None
        self._bodies: dict[str, bytes] = {}
        self._bytes = 0

    @property
    def number(self) -> int | None:
        """The store's change number, which differs once any topic has changed; None if unknown."""
        return self._store.topics_number

    def get(self, namespace: str) -> bytes | None:
        """Return the list as a body, if it is kept and no topic has changed since."""
        return self._bodies.get(namespace) if self._number is not None and self._number == self.number else None

    def put(self, namespace: str, body: bytes, number: int | None) -> None:
        """Keep a list that was read when the store's change number was ``number``, or later."""
        if number is None or number != self.number or len(body) > self.MAX_LIST_BYTES:
            return
        if number != self._number:
            self._bodies, self._bytes, self._number = {}, 0, number
        self._drop(namespace)
        self._bodies[namespace] = body
        self._bytes += self.LIST_BYTES + len(namespace) + len(body)
        while self._bytes > self.MAX_BYTES:
            self._drop(next(iter(self._bodies)))

    def _drop(self, namespace: str) -> None:
        body = self._bodies.pop(namespace, None)
        if body is not None:
            self._bytes -= self.LIST_BYTES + len(namespace) + len(body)


def refuse_to_create(request: Request) -> None:
    """Raises Forbidden if the name may not create topics, and the request is not for an existing one."""
    name = request.name
    if not request.rights.on_topic("admin", *name) and "ifNotExists=true" not in request.query:
        raise forbidden(request.who, "admin", str(name))


def refused_here(endpoint: Endpoint) -> Endpoint:
    """Wrap the route that creates topics: the instance asked refuses too, not only the topic's owner."""
    route, handler = endpoint
    if route.name != "create_topic":
        return endpoint

    def create(request: Request, answered: Answered) -> None:
        try:
            refuse_to_create(request)
        except PlainsongError as error:
            answered(error)
            return
        handler(request, answered)

    return Endpoint(route, create)


@dataclass(frozen=True, slots=True)
class Topics:
    """The routes of topics."""

    directory: Directory
    store: Store
    policies: Policies
    default_ttl_s: int
    flat_properties: bool
    """True if a topic is shown as its properties alone, as clients of the original service expect."""
    changes: TopicChanges
    catalogue: Catalogue
    tasks: RequestTasks
    quotas: Quotas | None = None
    """Quotas of names; None if there are none."""
    creating: CreatorLocks = field(default_factory=CreatorLocks)
    kept_names: KeptNames = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept_names", KeptNames(self.store))

    def create(self, request: Request, answered: Answered) -> None:
        """Create a topic; with ``ifNotExists`` accept an existing one with the same properties.

        An existing topic needs no right to create it. Answers with TopicExists, InvalidProperty, Forbidden.
        """
        if self.quotas is not None:
            self.tasks.run(self._create, request, answered)
            return
        name = request.name
        ask, parameters = self._asked_to_create(request)
        if flag(parameters, "dryRun"):
            self.tasks.run(self._create, request, answered)
            return
        self._put(name, ask, request, lambda _: Answer(200), answered)

    async def _create(self, request: Request) -> Answer:
        """Like ``create``, with rights, quotas and dry runs."""
        name = request.name
        refuse_to_create(request)
        is_creator = request.rights.on_topic("admin", *name)
        if not is_creator and not await self._is_there(name):
            raise forbidden(request.who, "admin", str(name))
        ask, parameters = self._asked_to_create(request)
        if not is_creator:
            ask.dry_run = True  # it exists: only compare the properties
            await self.directory.ask(name, ask)
            return Answer(200)
        async with self._one_more(request) as is_full:
            if is_full is not None and not (ask.if_not_exists and await self._is_there(name)):
                raise is_full
            ask.dry_run = is_full is not None  # it exists: only compare the properties
            if flag(parameters, "dryRun"):
                return await self.changes.would_create(name, ask)
            await self.directory.ask(name, ask)
        return Answer(200)

    def _asked_to_create(self, request: Request) -> tuple[Create, dict[str, str]]:
        """Return the request to the topic, and the query. Raises InvalidParameter, InvalidProperty."""
        parameters = request.parameters("ifNotExists", "dryRun")
        if_not_exists = flag(parameters, "ifNotExists")
        given = request.json()
        properties = parse_properties(given, default_ttl_s=self.default_ttl_s)
        names = frozenset(given or ()) - {"generation"}
        return Create(properties, if_not_exists, creator=_creator(request), given=names), parameters

    def _put(
        self, name: TopicName, ask: Ask[A], request: Request, render: Callable[[A], Answer], answered: Answered
    ) -> None:
        """Ask the topic; ``render`` makes the answer from its result."""
        answer = Prepared(partial(rendered, request, render), answered)
        self.directory.put(name, ask, answer.settled, answer.prepare)

    @asynccontextmanager
    async def _one_more(self, request: Request) -> AsyncIterator[QuotaExceeded | None]:
        """Yield the refusal if the name has reached its quota of topics; wrap what would create another one.

        Creations of one name run one after the other, so that two requests cannot both take the last place.
        """
        most = None if self.quotas is None else self.quotas.max_topics(request.who)
        if self.quotas is None or most is None:
            yield None
            return
        async with self.creating.of(request.who.name):
            is_full = await self.catalogue.count_created_by(request.who.name) >= most
            yield self.quotas.too_many_topics(most) if is_full else None

    async def _is_there(self, name: TopicName) -> bool:
        try:
            await self.directory.ask(name, Describe())
        except TopicNotFound:
            return False
        return True

    async def set_properties(self, request: Request) -> Answer:
        """Replace all properties; a missing one gets its default. Answers with the effect.

        Raises:
          TopicNotFound, PreconditionFailed, InvalidProperty: nothing happened.
        """
        parameters = request.parameters("dryRun")
        dry_run = flag(parameters, "dryRun")
        ask = SetProperties(request.json(), self.default_ttl_s, if_match_of(request), dry_run)
        return await self.changes.set_properties(request.name, ask)

    def show(self, request: Request, answered: Answered) -> None:
        """Return the topic's name, its properties as strings, and its deduplication; or TopicNotFound."""
        name = request.name
        request.parameters()
        self._put(name, Describe(), request, partial(self._answer_with, name), answered)

    def _answer_with(self, name: TopicName, found: Description) -> Answer:
        metadata = found.metadata
        return json_answer(self._shown(name, metadata), headers=[("ETag", metadata.etag)])

    async def remove(self, request: Request) -> Answer:
        """Delete the topic and its messages for every reader. Answers with the effect.

        Raises:
          TopicNotFound, PreconditionFailed: nothing happened.
        """
        dry_run = flag(request.parameters("dryRun"), "dryRun")
        return await self.changes.remove(request.name, Remove(if_match_of(request), dry_run))

    async def undelete(self, request: Request) -> Answer:
        """Restore the deleted topic, with its messages. Answers with the topic and the effect.

        Raises:
          TopicExists, TopicNotFound, PartlyCleaned, PreconditionFailed, QuotaExceeded: nothing happened.
        """
        name = request.name
        dry_run = flag(request.parameters("dryRun"), "dryRun")
        ask = Undelete(self.changes.delete_grace_ms, if_match_of(request), dry_run, creator=_creator(request))
        async with self._one_more(request) as is_full:
            if is_full is not None:
                raise is_full
            return await self.changes.undelete(name, ask, lambda metadata: self._shown(name, metadata))

    def _shown(self, name: TopicName, metadata: Metadata) -> TopicDescription | dict[str, str]:
        properties = metadata.properties.shown(metadata.generation)
        if self.flat_properties:
            return dict(properties)
        effective = self.policies.shown(name, metadata.properties.deduplication)
        return {"name": name.topic, "properties": properties, "deduplication": effective}

    def list_names(self, request: Request, answered: Answered) -> None:
        """Return the names of the namespace's topics, sorted, without opening any of them.

        With ``deleted=true`` list deleted topics and their contents.
        """
        if not request.query and request.rights.on_namespace("inspect", request.namespace):
            body = self.kept_names.get(request.namespace)
            if body is not None:
                answered(Answer(200, body, JSON_TYPE))
                return
        self.tasks.run(self._list_names, request, answered)

    async def _list_names(self, request: Request) -> Answer:
        namespace = request.namespace
        if flag(request.parameters("deleted"), "deleted"):
            grace_ms = self.changes.delete_grace_ms
            gone = await self.catalogue.deleted(namespace, grace_ms)
            if not request.rights.on_namespace("inspect", namespace):
                gone = [each for each in gone if request.rights.any_on_topic(*each[0])]
            return json_answer([await self.catalogue.shown_deleted(*each, grace_ms) for each in gone])
        start, stop = namespace_range(namespace)
        names: list[str] = []

        def take(rows: Sequence[Row]) -> bool:
            names.extend(topic_of(key)[0].topic for key, value in rows if _lives((key, value)))
            return True

        is_whole = request.rights.on_namespace("inspect", namespace)
        kept = self.kept_names.get(namespace) if is_whole else None
        if kept is not None:
            return Answer(200, kept, JSON_TYPE)
        number = self.kept_names.number
        await self.store.scan(Table.METADATA, start, stop, take, first_chunk=1000)
        if not is_whole:
            names = [each for each in names if request.rights.any_on_topic(namespace, each)]
        # Not the order of keys: they end in a colon, which sorts after digits and hyphens.
        answer = await off_loop(len(names) * _NAME_BYTES, JSON, lambda: json_answer(sorted(names)))
        if is_whole and isinstance(answer.body, bytes):
            self.kept_names.put(namespace, answer.body, number)
        return answer


def _creator(request: Request) -> str:
    """Return the name that a new topic counts against; empty without authentication."""
    return "" if request.who == ANONYMOUS else request.who.name


#: One entity tag. Weak tags, as made by proxies, match nothing.
_ETAG = re.compile(r'\s*(?:W/)?("[\x21\x23-\x7e]*")\s*(?:,|$)')


def if_match_of(request: Request) -> frozenset[str] | None:
    """Return the etags of ``If-Match``; None if any state is accepted. Raises InvalidParameter."""
    given = request.headers.get("if-match")
    if given is None or given.strip() == "*":
        return None
    found, at = [], 0
    while at < len(given):
        tag = _ETAG.match(given, at)
        if tag is None:
            raise InvalidParameter(
                f"If-Match is {given[:80]!r}", hint=("send the ETag from GET unchanged, in its quotes")
            )
        if not tag.group().lstrip().startswith("W/"):
            found.append(tag.group(1))
        at = tag.end()
    return frozenset(found)


def _lives(row: Row) -> bool:
    try:
        return not Metadata.is_of_deleted(row[1]) or Metadata.decode(row[1]).deleted_ms is None
    except DamagedRow:
        return True  # list it: a request for the topic reports the damage


# --- namespaces ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamespaceRoutes:
    """The routes of namespaces."""

    namespaces: Namespaces
    policies: Policies

    async def list_names(self, request: Request) -> Answer:
        """Return the namespaces that have a topic or properties, sorted. Raises StoreError."""
        request.parameters()
        return json_answer([each for each in await self.namespaces.names() if request.rights.within(each)])

    async def show(self, request: Request) -> Answer:
        """Return a namespace's properties; one without any has the defaults. Raises InvalidName."""
        namespace = request.namespace
        request.parameters()
        return self._shown(namespace)

    async def put(self, request: Request) -> Answer:
        """Replace all properties; durable and in force when answered.

        Raises:
          InvalidProperty: nothing happened. StoreError: the outcome is unknown.
        """
        namespace = request.namespace
        if flag(request.parameters("dryRun"), "dryRun"):
            before, after = self.namespaces.properties(namespace), checked_properties(request.json())
            return change_answer("namespace.properties", target_of(request.path), before, after)
        await self.namespaces.put(namespace, request.json())
        return self._shown(namespace)

    def _shown(self, namespace: str) -> Answer:
        shown: NamespaceDescription = {
            "name": namespace,
            "properties": self.namespaces.properties(namespace),
            # For a topic of it that inherits the setting.
            "deduplication": self.policies.shown(TopicName(namespace, ""), "inherit"),
        }
        return json_answer(shown)


@dataclass(frozen=True, slots=True)
class Policies:
    """The effective deduplication of topics."""

    namespaces: Namespaces
    default: bool
    """``deduplication.default``."""

    def shown(self, name: TopicName, own: Deduplication) -> EffectiveDeduplication:
        """Return the effective deduplication of a topic, and the level that set it."""
        policy = self.namespaces.policy(name.namespace)
        found = effective_policy(name, own, policy, default=self.default)
        return {"enabled": found.enabled, "level": found.level}
