"""Messages that could not be worked off, in a topic of their own: each once, with where it came from and why.

Every dead letter has a producer of its own, whose name is made of the message's id: sent again after a crash it is
stored once. When the reader's position is behind the message for good, nobody sends it again, and the producer is
forgotten.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING

from plainsong.messages import Outgoing
from protocol.checks import MAX_ATTRIBUTE_BYTES
from protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plainsong.messages import Message
    from plainsong.sync.client import Client

#: Bytes of ``error`` at most, and what there must be room for whatever the message brings.
MAX_ERROR_BYTES = 1024
MIN_ERROR_BYTES = 200
#: For the daemon to take one; then it is tried again, or the end may come.
DEADLINE_S = 15.0


class DeadLetters:
    """A topic for dead letters.

    Args:
      topic: in the client's own namespace.
      reader: who gives messages up: his position's name. Two readers of one topic have dead letters of their own.
    """

    def __init__(self, client: Client, topic: str, reader: str) -> None:
        self.topic = topic
        self._client = client
        self._reader = reader

    def put(self, message: Message, why: str, attempts: int) -> None:
        """Publish a message as a dead letter; the same again is stored once. Raises PlainsongError."""
        letter = Outgoing(message.payload, attributes=attributes_of(message, why, attempts))
        name = self._name(message)
        with self._client.producer(self.topic, name, optional=True, deadline_s=DEADLINE_S) as producer:
            producer.publish([letter], sequence_ids=[0], deadline_s=DEADLINE_S)

    def forget(self, message: Message) -> None:
        """Nobody will put this one again. Where this fails, the topic forgets by itself after a while."""
        with suppress(PlainsongError):
            self._client.delete_producer(self.topic, self._name(message))

    def _name(self, message: Message) -> str:
        whole = f"{self._reader}\n{self._client.namespace}:{message.topic}:{message.id}"
        return f"on-{hashlib.sha256(whole.encode()).hexdigest()[:32]}"


def attributes_of(message: Message, why: str, attempts: int) -> dict[str, str]:
    """The message's own attributes, and ``originalTopic``, ``originalId``, ``attempts`` and ``error``.

    Together they keep to the bound of all attributes: ``error`` is shortened, and where that is not enough its own are left out.
    """
    told = {"originalTopic": message.topic, "originalId": str(message.id), "attempts": str(attempts)}
    kept = {name: value for name, value in message.attributes.items() if name not in (*told, "error")}
    said = why.encode("utf-8", "replace")[:MAX_ERROR_BYTES]
    if _room(kept, told) < min(len(said), MIN_ERROR_BYTES):
        kept = {}
    error = said[: _room(kept, told)].decode("utf-8", "ignore")
    return {**kept, **told, "error": error}


def _room(kept: Mapping[str, str], told: Mapping[str, str]) -> int:
    """Bytes that are left for the text of ``error``."""
    return MAX_ATTRIBUTE_BYTES - size_of({**kept, **told, "error": ""})


def size_of(attributes: Mapping[str, str]) -> int:
    """Bytes of names and values, as the bound counts them."""
    return sum(len(name.encode()) + len(value.encode()) for name, value in attributes.items())
