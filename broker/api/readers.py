"""Readers: positions that the daemon keeps for consumers without a store of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker.api.route import json_answer
from broker.http.messages import Answer
from plainsong.protocol.codec import json_values as values
from plainsong.protocol.errors import InvalidParameter, MalformedBody, NotFound
from plainsong.protocol.ids import parse_id
from plainsong.protocol.names import reader_name
from plainsong.protocol.topic.asks import ListReaders, RemoveReader, SetReader

if TYPE_CHECKING:
    from actors.directory import Directory
    from broker.http.messages import Request
    from plainsong.protocol.topic.asks import ReaderView


def message_id(value: Any, name: str) -> bytes:
    """An id in JSON: 40 hex digits, nothing else. Raises InvalidMessageId, MalformedBody."""
    return parse_id(value) if isinstance(value, str) else values.refuse(name, value, "40 hex digits")


_READER = {
    "position": ("position", message_id),
    "generation": ("generation", values.nullable(values.int32, "int")),
    "expected": ("expected", values.nullable(message_id)),
}


@dataclass(frozen=True, slots=True)
class Readers:
    """The routes of readers."""

    directory: Directory
    retention_ms: int

    async def list_all(self, request: Request) -> Answer:
        """All readers of the topic, by name. Raises TopicNotFound."""
        request.parameters()
        found = await self.directory.ask(request.name, ListReaders())
        return json_answer([self._shown(view) for view in found])

    async def show(self, request: Request) -> Answer:
        """One reader. Raises TopicNotFound, NotFound."""
        name, reader = request.name, reader_name(request.path["reader"])
        request.parameters()
        for view in await self.directory.ask(name, ListReaders()):
            if view.name == reader:
                return json_answer(self._shown(view))
        raise NotFound(f"topic {name} keeps no reader {reader}", hint="PUT its position first")

    async def put(self, request: Request) -> Answer:
        """Keep a position; with ``expected``, only if it is there now (null: only if there is none).

        Raises:
          TopicNotFound, PositionChanged, GenerationChanged, QuotaExceeded: nothing happened.
        """
        name, reader = request.name, reader_name(request.path["reader"])
        request.parameters()
        given = request.fields(_READER)
        if "position" not in given:
            raise MalformedBody("position is missing", hint='send {"position": "<40 hex digits>"}')
        generation = given.get("generation")
        if generation is not None and generation <= 0:
            raise InvalidParameter(f"generation is {generation}", hint="generations are counted from 1")
        ask = SetReader(
            reader,
            given["position"],
            generation=generation,
            expected=given.get("expected"),
            compare="expected" in given,
        )
        return json_answer(self._shown(await self.directory.ask(name, ask)))

    async def remove(self, request: Request) -> Answer:
        """Forget a position. Raises TopicNotFound, NotFound."""
        name, reader = request.name, reader_name(request.path["reader"])
        request.parameters()
        await self.directory.ask(name, RemoveReader(reader))
        return Answer(200)

    def _shown(self, view: ReaderView) -> dict[str, object]:
        return {
            "name": view.name,
            "position": view.reader.position.hex(),
            "generation": view.generation,
            "changedMs": view.reader.changed_ms,
            "expiresMs": view.reader.changed_ms + self.retention_ms,
        }
