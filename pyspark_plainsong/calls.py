"""Requests to the daemon by name, and its answers as plain data: topics, positions, frames, staging, producers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote

from plainsong.protocol.frames import FRAMES_END, FRAMES_TYPE
from pyspark_plainsong.offsets import FIRST, after, before
from pyspark_plainsong.wire import BrokerError, refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark_plainsong.wire import Answer, Wire


class Extent(NamedTuple):
    """The end and the size of a bounded read."""

    end: bytes
    """The exclusive bound, 20 bytes: where the next read starts."""
    messages: int
    size_bytes: int
    """Bytes on the wire, ids included."""
    splits: tuple[bytes, ...]
    """Bounds between the parts, ascending."""
    earliest: bytes
    """The bound before which everything has expired by the topic's time to live."""
    generation: int
    expired: bool
    """Messages at or after the start have expired by the topic's time to live, or may have."""


class News(NamedTuple):
    """The topics with and without new messages."""

    topics: frozenset[str]
    """Topics with messages to read."""
    quiet: Mapping[str, bytes]
    """Topics without messages, decided or not, and the position up to which there are none."""
    unreadable: Mapping[str, str]
    """Topics that cannot be read, with the error's code."""


class FramesPage(NamedTuple):
    """A page of messages."""

    body: bytes
    """Complete frames."""
    last_id: bytes | None
    """The id after which the next page starts; None: the topic never had a message."""
    end: str
    """Why the page ends: ``end``, ``more`` or ``held``."""
    held_by: str | None
    """The write pointer of the undecided transaction that blocks the reader."""
    set_aside: int
    """Number of damaged rows in the page's range that an operator has set aside."""


class TransactionService(NamedTuple):
    """The transaction service of the daemon."""

    service: str
    """``embedded``, ``tephra`` or ``off``."""
    available: bool
    why: str
    """Why the service is not available."""


class ProducerState(NamedTuple):
    """The state that a topic keeps of a producer."""

    producer: str
    epoch: int
    last_sequence_id: int
    """-1 for a new producer."""
    generation: int
    recent: tuple[tuple[int, int], ...] = ()
    """The first and the last sequence id of each of its last publishes, five at most."""

    def has(self, sequence_id: int) -> bool:
        """True if one of the ``recent`` publishes has the id."""
        return any(first <= sequence_id <= last for first, last in self.recent)


# --- calls -----------------------------------------------------------------------------------------

AVRO_2 = "avro/binary; version=2"
Isolation = Literal["committed", "uncommitted"]
#: Topics that one request can wait for.
MAX_AWAITED = 1000


class Calls:
    """The calls for the topics of one namespace. Each raises ``BrokerError``. Can be pickled."""

    def __init__(self, wire: Wire, namespace: str) -> None:
        self.wire = wire
        self.namespace = namespace
        self._topics = f"/v1/namespaces/{quote(namespace, safe='')}/topics"

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self.wire.close()

    # --- topics and positions ------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        found = self.wire.ask("GET", self._topics).json()
        return [str(name) for name in found]

    def generation(self, topic: str) -> int:
        """Return the generation of a topic that exists."""
        found = self.wire.ask("GET", self._path(topic)).json()
        return int(found.get("properties", found)["generation"])  # the answer itself with http.flat_topic_properties

    def end(self, topic: str) -> tuple[bytes, int]:
        """Return the position after all published messages, and the number of open transactions with messages here."""
        found = self.wire.ask("GET", self._path(topic, "stats")).json()
        return bytes.fromhex(found["end"]), int(found["openTransactions"])

    def after(self, topic: str, position: bytes, isolation: Isolation) -> tuple[bytes, int]:
        """Return the position after all published messages, and about how many a reader at ``position`` has not read."""
        reader = "" if position == FIRST else f"?reader={before(position).hex()}"
        found = self.wire.ask("GET", self._path(topic, "stats") + reader).json()
        end, ahead = bytes.fromhex(found["end"]), found.get("reader")
        if ahead is None:
            return end, int(found["messages"])
        return end, int(ahead["visible"]) + (int(ahead["hidden"]) if isolation == "uncommitted" else 0)

    def offsets(
        self,
        topic: str,
        *,
        start: bytes | int | None = None,
        end: bytes | int | None = None,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        splits: int | None = None,
        isolation: Isolation = "uncommitted",
        as_of_ms: int | None = None,
    ) -> Extent:
        """Return the extent of a bounded read from ``start``, and the bounds that cut it into parts.

        Args:
          start: an id, or a time in milliseconds, both inclusive; None: the oldest message.
          end: the same, exclusive; None: the end of the topic.
          splits: the number of parts of about equal size in bytes, 1 to 1000.
          as_of_ms: read what had been committed by this moment; None: by now.
        """
        asked: dict[str, Any] = {
            "start": _position(start),
            "end": _position(end),
            "maxMessages": max_messages,
            "maxBytes": max_bytes,
            "splits": splits,
            "isolation": isolation,
            "asOfMs": as_of_ms,
        }
        body = _json({name: value for name, value in asked.items() if value is not None})
        found = self.wire.ask("POST", self._path(topic, "offsets"), body).json()
        return Extent(
            end=bytes.fromhex(found["end"]),
            messages=int(found["count"]),
            size_bytes=int(found["bytes"]),
            splits=tuple(bytes.fromhex(bound) for bound in found["splits"]),
            earliest=bytes.fromhex(found["earliest"]),
            generation=int(found["generation"]),
            expired=bool(found["expired"]),
        )

    def standing(self, topic: str, position: bytes) -> Extent:
        """Return the topic's generation, and whether messages after a position have expired; reads no message."""
        return self.offsets(topic, start=position, end=position)

    def wait_for_news(self, starts: Mapping[str, bytes], *, isolation: Isolation, wait_ms: int) -> News:
        """Wait until one of the topics (at most ``MAX_AWAITED``) has a message at or after its start.

        The response carries at most one message; the other topics only report that there are more.

        Raises:
          BrokerError: the request failed. A single unreadable topic is reported in ``News.unreadable`` instead.
        """
        asked = {topic: {"startFrom": start.hex(), "limit": 1} for topic, start in starts.items()}
        body = _json({"topics": asked, "waitMs": wait_ms, "limit": len(asked), "isolation": isolation, "maxBytes": 1})
        path = self._topics.removesuffix("/topics") + "/poll"
        found = self.wire.ask("POST", path, body, wait_s=wait_ms / 1000).json()["topics"]
        return News(
            frozenset(topic for topic, each in found.items() if each.get("messages") or each.get("end") == "more"),
            {
                topic: after(bytes.fromhex(each["lastId"])) if each["lastId"] else FIRST
                for topic, each in found.items()
                if each.get("end") == "end" and not each["messages"]
            },
            {topic: str(each["error"]["code"]) for topic, each in found.items() if each.get("error")},
        )

    def poll_frames(
        self,
        topic: str,
        *,
        start: bytes,
        end_before: bytes,
        limit: int,
        isolation: Isolation,
        wait_ms: int = 0,
        pointers: bool = False,
        attributes: bool = False,
        as_of_ms: int | None = None,
    ) -> FramesPage:
        """Return a page of messages from the id ``start`` (inclusive) to ``end_before`` (exclusive), as frames.

        Args:
          wait_ms: how long to wait for the first message if a transaction blocks it.
          pointers, attributes: include these in the frames.
          as_of_ms: as for ``offsets``.
        """
        asked = {
            "startFrom": start.hex(),
            "endBefore": end_before.hex(),
            "limit": limit,
            "isolation": isolation,
            "waitMs": wait_ms,
        } | ({} if as_of_ms is None else {"asOfMs": as_of_ms})
        accept = FRAMES_TYPE + ("; fields=pointer" if pointers else "") + ("; version=2" if attributes else "")
        answer = self.wire.ask(
            "POST", self._path(topic, "poll"), _json(asked), accept=accept, wait_s=wait_ms / 1000, whole=_has_its_end
        )
        last = answer.headers.get("plainsong-last-id")
        return FramesPage(
            answer.body,
            None if last is None else bytes.fromhex(last),
            answer.headers.get("plainsong-end", "more"),
            answer.headers.get("plainsong-held-by"),
            int(answer.headers.get("plainsong-set-aside", 0)),
        )

    def transaction_service(self) -> TransactionService:
        """Return the daemon's transaction service and its availability."""
        found = self.wire.ask("GET", "/readyz", statuses=(200, 503)).json()  # 503 (not ready) has the same body
        service = found["transactions"]
        return TransactionService(
            str(service["service"]), available=bool(service["available"]), why=str(service["why"] or "")
        )

    # --- writing -------------------------------------------------------------------------------

    def store(self, topic: str, body: bytes) -> None:
        """Store messages, invisible until they are published.

        Args:
          body: a PublishRequest of Avro version 2. Its sequence ids make the request repeatable.
        """
        self.wire.ask("POST", self._path(topic, "store"), body, content_type=AVRO_2)

    def publish_staged(
        self,
        topic: str,
        *,
        producer: str,
        sequence_id: int,
        segments: Sequence[str],
        epoch: int | None = None,
        generation: int | None = None,
        repeatable: bool = True,
    ) -> None:
        """Publish the messages that the producer stored under ``segments``, atomically.

        Args:
          repeatable: False if the topic does not remember sequence ids.
        """
        asked = {
            "messages": [],
            "producer": producer,
            "sequenceIds": [sequence_id],
            "segments": list(segments),
            "producerEpoch": epoch,
            "generation": generation,
        }
        answer = self._publish(topic, asked, repeatable=repeatable)
        if not _is_receipt(answer):
            raise refused(self.wire.url, 200, answer.headers, answer.body)

    def publish_under(
        self, topic: str, *, pointer: int, segments: Sequence[str], generation: int | None = None
    ) -> None:
        """Publish the messages stored under a write pointer and ``segments``, as part of the pointer's transaction.

        A repetition does nothing.
        """
        asked = {
            "messages": [],
            "transactionWritePointer": pointer,
            "segments": list(segments),
            "generation": generation,
        }
        self._publish(topic, asked)

    def rollback(self, topic: str, pointer: int) -> None:
        """Roll back all messages of a write pointer in the topic."""
        self.wire.ask("POST", self._path(topic, "rollback"), _json({"transactionWritePointer": pointer}))

    def open_producer(
        self, topic: str, producer: str, *, retention_s: int | None = None, generation: int | None = None
    ) -> ProducerState:
        """Open a producer session, which fences publishes of earlier sessions that are still in flight."""
        asked = {"retentionSeconds": retention_s, "generation": generation}
        body = _json({name: value for name, value in asked.items() if value is not None})
        return _producer(self.wire.ask("PUT", self._path(topic, "producers", producer), body).json())

    def producer(self, topic: str, producer: str) -> ProducerState | None:
        """Return the topic's state of a producer; None if the producer or the topic does not exist."""
        try:
            return _producer(self.wire.ask("GET", self._path(topic, "producers", producer)).json())
        except BrokerError as error:
            if error.code in ("producer_not_found", "topic_not_found"):
                return None
            raise

    def forget_producer(self, topic: str, producer: str) -> None:
        """Delete the topic's state of a producer, which must not publish again."""
        self.wire.ask("DELETE", self._path(topic, "producers", producer))

    def _publish(self, topic: str, asked: dict[str, Any], *, repeatable: bool = True) -> Answer:
        body = _json({name: value for name, value in asked.items() if value is not None})
        return self.wire.ask("POST", self._path(topic, "publish"), body, repeatable=repeatable)

    def _path(self, topic: str, *further: str) -> str:
        return "/".join((self._topics, *(quote(part, safe="") for part in (topic, *further))))


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _is_receipt(answer: Answer) -> bool:
    try:
        found = answer.json()
    except ValueError:
        return False
    return isinstance(found, dict) and "generation" in found


def _position(position: bytes | int | None) -> str | int | None:
    return position.hex() if isinstance(position, bytes) else position


def _has_its_end(body: bytes) -> bool:
    return body[-24:-4] == FRAMES_END


def _producer(found: dict[str, Any]) -> ProducerState:
    recent = tuple((int(each["first"]), int(each["last"])) for each in found["recent"])
    last, generation = int(found["lastSequenceId"]), int(found["generation"])
    return ProducerState(str(found["producer"]), int(found["epoch"]), last, generation, recent)
