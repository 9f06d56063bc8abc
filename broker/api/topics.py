"""Topics and namespaces: created, changed, shown, listed, deleted and undeleted.

Topics: made, changed, shown, listed, deleted and brought back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from broker.api.route import json_answer, off_loop
from broker.http.messages import HttpAnswer, flag
from plainsong.protocol.codec import JSON
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import TopicNotFound
from plainsong.protocol.keys import DamagedRow, namespace_range, topic_of
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import parse_properties
from plainsong.protocol.records import Metadata
from plainsong.protocol.topic.asks import Create, Describe, Remove, SetProperties, Undelete
from plainsong.protocol.topic.producer_state import effective_policy

if TYPE_CHECKING:
    from broker.http.messages import ViewRequest
    from broker.service import Service
    from plainsong.protocol.properties import Deduplication
    from plainsong.protocol.topic.asks import Description
    from storage.base import Row

#: What sorting and writing one name is worth, in bytes of JSON.
_NAME_BYTES = 32


async def create(service: Service, request: ViewRequest) -> HttpAnswer:
    """A new topic, or with ``ifNotExists`` the equal one that is there. Raises TopicExists, InvalidProperty."""
    name = request.name
    if_not_exists = flag(request.parameters("ifNotExists"), "ifNotExists")
    given = request.json()
    generation = None
    if isinstance(given, dict) and "generation" in given:
        generation = await _last_generation(service, name)
    properties = parse_properties(given, generation=generation, default_ttl_s=service.config.topic.default_ttl_s)
    await service.directory.ask(name, Create(properties, if_not_exists))
    return HttpAnswer(200)


async def _last_generation(service: Service, name: TopicName) -> int | None:
    """What a client that looked at the topic earlier may send back with its properties."""
    try:
        return (await service.directory.ask(name, Describe())).metadata.generation
    except TopicNotFound:
        state = service.directory.peek(name)
        return None if state is None or state.metadata is None else state.metadata.generation


async def set_properties(service: Service, request: ViewRequest) -> HttpAnswer:
    """All properties replaced; an absent one has its default again. Raises TopicNotFound, InvalidProperty."""
    request.parameters()
    ask = SetProperties(request.json(), service.config.topic.default_ttl_s)
    await service.directory.ask(request.name, ask)
    return HttpAnswer(200)


async def show(service: Service, request: ViewRequest) -> HttpAnswer:
    """The topic's name and properties, all of them strings, and whether producers are remembered. Raises TopicNotFound."""
    name = request.name
    request.parameters()
    return _shown(service, name, await service.directory.ask(name, Describe()))


async def remove(service: Service, request: ViewRequest) -> HttpAnswer:
    """The topic and its messages are gone for every reader. Raises TopicNotFound."""
    request.parameters()
    await service.directory.ask(request.name, Remove())
    return HttpAnswer(200)


async def undelete(service: Service, request: ViewRequest) -> HttpAnswer:
    """The deleted topic is back, with its messages. Raises TopicExists, TopicNotFound, PartlyCleaned."""
    name = request.name
    request.parameters()
    return _shown(service, name, await service.directory.ask(name, Undelete()))


def _shown(service: Service, name: TopicName, described: Description) -> HttpAnswer:
    metadata = described.metadata
    properties = metadata.properties.shown(metadata.generation)
    if service.config.http.flat_topic_properties:
        return json_answer(properties)
    effective = shown_policy(service, name, metadata.properties.deduplication)
    return json_answer({"name": name.topic, "properties": properties, "deduplication": effective})


async def list_names(service: Service, request: ViewRequest) -> HttpAnswer:
    """The names of the namespace's topics, sorted, read from the store without opening any of them."""
    start, stop = namespace_range(request.namespace)
    request.parameters()
    names: list[str] = []

    def take(rows: list[Row]) -> bool:
        names.extend(topic_of(key)[0].topic for key, value in rows if _lives((key, value)))
        return True

    await service.store.scan(Table.METADATA, start, stop, take, first_chunk=1000)
    # Keys end in a colon, which sorts after digits and hyphens: their order is not that of the names.
    return await off_loop(len(names) * _NAME_BYTES, JSON, lambda: json_answer(sorted(names)))


def _lives(row: Row) -> bool:
    try:
        return Metadata.decode(row[1]).deleted_ms is None
    except DamagedRow:
        return True  # it is there, and asking for it says what is wrong with it


# --- namespaces ------------------------------------------------------------------------------------
#
# Namespaces: which there are, and what they say for the topics in them.


async def list_namespaces(service: Service, request: ViewRequest) -> HttpAnswer:
    """The namespaces that have a topic or properties, sorted. Raises StoreError."""
    request.parameters()
    return json_answer(await service.namespaces.names())


async def show_namespace(service: Service, request: ViewRequest) -> HttpAnswer:
    """What a namespace says; one that nobody spoke of has the defaults. Raises InvalidName."""
    namespace = request.namespace
    request.parameters()
    return _shown_namespace(service, namespace)


async def put_namespace(service: Service, request: ViewRequest) -> HttpAnswer:
    """All properties replaced, durable and in force when this is answered.

    Raises:
      InvalidProperty: nothing happened. StoreError: nobody knows.
    """
    namespace = request.namespace
    request.parameters()
    await service.namespaces.put(namespace, request.json())
    return _shown_namespace(service, namespace)


def _shown_namespace(service: Service, namespace: str) -> HttpAnswer:
    return json_answer(
        {
            "name": namespace,
            "properties": service.namespaces.properties(namespace),
            # What holds for a topic of it that says nothing itself.
            "deduplication": shown_policy(service, TopicName(namespace, ""), "inherit"),
        }
    )


def shown_policy(service: Service, name: TopicName, own: Deduplication) -> dict[str, Any]:
    """Whether a topic remembers producers, and who said so."""
    policy = service.namespaces.policy(name.namespace)
    found = effective_policy(name, own, policy, default=service.config.deduplication.default)
    return {"enabled": found.enabled, "level": found.level}
