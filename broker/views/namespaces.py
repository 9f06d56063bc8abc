"""Namespaces: which there are, and what they say for the topics in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from broker.views.route import json_answer
from protocol.names import TopicName
from protocol.topic.producers.policy import effective

if TYPE_CHECKING:
    from broker.http.exchange import HttpAnswer
    from broker.service import Service
    from broker.views.route import ViewRequest
    from protocol.properties import Deduplication


async def list_names(service: Service, request: ViewRequest) -> HttpAnswer:
    """The namespaces that have a topic or properties, sorted. Raises StoreError."""
    request.parameters()
    return json_answer(await service.namespaces.names())


async def show(service: Service, request: ViewRequest) -> HttpAnswer:
    """What a namespace says; one that nobody spoke of has the defaults. Raises InvalidName."""
    namespace = request.namespace
    request.parameters()
    return _shown(service, namespace)


async def put(service: Service, request: ViewRequest) -> HttpAnswer:
    """All properties replaced, durable and in force when this is answered.

    Raises:
      InvalidProperty: nothing happened. StoreError: nobody knows.
    """
    namespace = request.namespace
    request.parameters()
    await service.namespaces.put(namespace, request.json())
    return _shown(service, namespace)


def _shown(service: Service, namespace: str) -> HttpAnswer:
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
    found = effective(name, own, policy, default=service.config.deduplication.default)
    return {"enabled": found.enabled, "level": found.level}
