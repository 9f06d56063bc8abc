"""Readers: positions that the daemon stores for consumers without their own store."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from broker.api.answers import json_answer
from broker.api.change import change_answer
from broker.http.messages import Answer, flag
from plainsong.protocol.codec import json_values as values
from plainsong.protocol.errors import InvalidParameter, MalformedBody, NotFound
from plainsong.protocol.ids import parse_id
from plainsong.protocol.names import reader_name
from plainsong.protocol.topic.asks import ListReaders, RemoveReader, SetReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actors.directory import Directory
    from broker.http.messages import Request
    from plainsong.protocol.answers.messages import ReaderRow
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.asks import ReaderView


def message_id(value: Any, name: str) -> bytes:
    """Parse an id in JSON: 40 hex digits, nothing else. Raises InvalidMessageId, MalformedBody."""
    return parse_id(value) if isinstance(value, str) else values.refuse(name, value, "40 hex digits")


_READER = {
    "position": ("position", message_id),
    "generation": ("generation", values.nullable(values.int32, "int")),
    "expected": ("expected", values.nullable(message_id)),
}


#: The header in which a poll sends its reader's name.
READER_HEADER = "plainsong-reader"
#: Named readers of a topic that are remembered; the one silent for longest is evicted.
MAX_NAMED = 1_000
#: Topics with remembered readers; the one idle for longest is evicted.
MAX_TOPICS = 10_000
#: Named readers are shown for this long after their last poll.
NAMED_MS = 3_600_000


class NamedReader(NamedTuple):
    """The position of a reader that sends its name in its polls."""

    position: bytes
    seen_ms: int
    by: str
    """The authenticated name of its last poll."""


class NamedReaders:
    """Readers that send their name in their polls; kept only in memory."""

    def __init__(self) -> None:
        self._topics: OrderedDict[TopicName, OrderedDict[str, NamedReader]] = OrderedDict()

    def polled(self, name: TopicName, request: Request, position: bytes | None, now_ms: int) -> None:
        """Record the position of a poll's answer. Raises InvalidName: the header is not a reader's name."""
        reader = reader_name(request.headers[READER_HEADER])
        if position is None:
            return  # the topic never had a message
        readers = self._topics.setdefault(name, OrderedDict())
        self._topics.move_to_end(name)
        readers[reader] = NamedReader(position, now_ms, request.who.name)
        readers.move_to_end(reader)
        if len(readers) > MAX_NAMED:
            readers.popitem(last=False)
        if len(self._topics) > MAX_TOPICS:
            self._topics.popitem(last=False)

    def of(self, name: TopicName, now_ms: int) -> dict[str, NamedReader]:
        """Return the readers of a topic that polled within the last hour."""
        readers: Mapping[str, NamedReader] = self._topics.get(name, {})
        return {reader: seen for reader, seen in readers.items() if seen.seen_ms > now_ms - NAMED_MS}


@dataclass(frozen=True, slots=True)
class Readers:
    """The routes of readers."""

    directory: Directory
    retention_ms: int

    async def list_all(self, request: Request) -> Answer:
        """List the topic's readers, by name. Raises TopicNotFound."""
        request.parameters()
        found = await self.directory.ask(request.name, ListReaders())
        return json_answer([self._shown(view) for view in found])

    async def show(self, request: Request) -> Answer:
        """Return one reader. Raises TopicNotFound, NotFound."""
        name, reader = request.name, reader_name(request.path["reader"])
        request.parameters()
        for view in await self.directory.ask(name, ListReaders()):
            if view.name == reader:
                return json_answer(self._shown(view))
        raise NotFound(f"topic {name} has no reader {reader}", hint="PUT its position first")

    async def put(self, request: Request) -> Answer:
        """Store a position; with ``expected``, only if it is the current one (null: only if there is none).

        Raises:
          TopicNotFound, PositionChanged, GenerationChanged, QuotaExceeded: nothing happened.
        """
        name, reader = request.name, reader_name(request.path["reader"])
        dry_run = flag(request.parameters("dryRun"), "dryRun")
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
            dry_run=dry_run,
        )
        before = await self._find(name, reader) if dry_run else None
        after = self._shown(await self.directory.ask(name, ask))
        return change_answer("reader.reset", f"{name}/{reader}", before, after) if dry_run else json_answer(after)

    async def remove(self, request: Request) -> Answer:
        """Delete a position. Raises TopicNotFound, NotFound."""
        name, reader = request.name, reader_name(request.path["reader"])
        dry_run = flag(request.parameters("dryRun"), "dryRun")
        before = await self._find(name, reader) if dry_run else None
        await self.directory.ask(name, RemoveReader(reader, dry_run))
        return change_answer("reader.delete", f"{name}/{reader}", before, None) if dry_run else Answer(200)

    async def _find(self, name: TopicName, reader: str) -> ReaderRow | None:
        """Return the current reader; None if it does not exist. Raises TopicNotFound."""
        found = await self.directory.ask(name, ListReaders())
        return next((self._shown(view) for view in found if view.name == reader), None)

    def _shown(self, view: ReaderView) -> ReaderRow:
        return {
            "name": view.name,
            "position": view.reader.position.hex(),
            "generation": view.generation,
            "changedMs": view.reader.changed_ms,
            "expiresMs": view.reader.changed_ms + self.retention_ms,
        }
