"""What the daemon is asked before anything may go, and once more before each part: is it still the same topic?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.maintain.plan import Limits
from plainsong.core.attempts import Call
from plainsong.core.calls import topic_path
from plainsong.core.effects import Request
from protocol.errors import GenerationChanged
from protocol.ids import FIRST_BOUND
from protocol.names import TopicName

if TYPE_CHECKING:
    from plainsong import Client
    from plainsong.core.effects import Answer

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Waiting:
    """Rows of a topic that nobody can see any more, and that are still there."""

    created_ms: int
    """When the generation was made."""
    expired: int
    """Expired messages."""
    estimated: bool
    """``expired`` is a lower bound: there were too many to count."""


def store_kind(client: Client) -> str:
    """What the daemon keeps its tables in: ``leveldb``, ``memory``."""
    return str(_run(client, Call(Request("GET", "/version"), _json)).get("store", ""))


def limits_of(client: Client, topic: str) -> Limits:
    """What may go, as ``Limits``; the topic notes its time on disk first. Raises TopicNotFound."""
    path = topic_path(client.namespace, topic, "/maintenance?longs=string")
    told = _run(client, Call(Request("POST", path), _json, "harmless"))
    return Limits.of(TopicName(client.namespace, topic), told)


def waiting(client: Client, topic: str) -> Waiting:
    """What the topic still holds for nobody. Raises TopicNotFound."""
    told = client.stats(topic, reader=FIRST_BOUND)
    reader = told["reader"]
    return Waiting(int(told["createdMs"]), int(reader["expiredUnread"]), bool(reader["estimated"]))


def check_unchanged(client: Client, limits: Limits) -> None:
    """Ask for the topic's generation again: a plan is of one generation, and void in any other.

    Raises:
      GenerationChanged, TopicNotFound: it has another one, or is gone.
      PlainsongError: nobody could be asked; the plan must not be carried out.
    """
    generation = int(client.properties(limits.name.topic)["generation"])
    if generation != limits.generation:
        raise GenerationChanged(f"topic {limits.name} is generation {generation} by now, not {limits.generation}")


def _run(client: Client, call: Call[A]) -> A:
    return client._shell.run(client._operations.call(call))


def _json(answer: Answer) -> dict[str, Any]:
    return dict(json.loads(answer.body))
