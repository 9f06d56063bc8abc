"""``publish`` with a producer, attributes, a routing key, or as one atomic batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import click

from plainsong.cli.exits import CommandFailed, Exit
from plainsong.cli.inputs import Piece
from plainsong.cli.producer import asked
from plainsong.cli.sending import Sending, messages_told
from plainsong.core import calls
from plainsong.core.producing.calls import open_session
from plainsong.core.producing.lightweight import MAX_BYTES, MAX_MESSAGES
from plainsong.messages import check_ttl
from protocol.requests import PublishRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from plainsong import Client, Receipt
    from plainsong.cli.inputs import Item
    from plainsong.cli.progress import Progress
    from plainsong.core.producing.calls import Known


class Extras(NamedTuple):
    """What the options say of all messages of the command."""

    producer: str | None = None
    sequence_id: int | None = None
    """Of the first message."""
    attributes: Mapping[str, str] = {}
    routing_key: str | None = None
    atomic: bool = False

    @property
    def given(self) -> bool:
        """Whether there is anything of this at all."""
        return self.producer is not None or bool(self.attributes) or self.routing_key is not None or self.atomic


def parse_attributes(texts: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` of a command line. Raises click.UsageError."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--attribute {text!r} is not NAME=VALUE")
        found[name] = value
    return found


class SendingWith(Sending):
    """Publishes with these extras; a producer's session is opened before its first message."""

    def __init__(self, client: Client, topic: str, ttl_s: int | None, progress: Progress, extras: Extras) -> None:
        super().__init__(client, topic, ttl_s, progress)
        if ttl_s is not None:
            check_ttl(ttl_s)
        self._extras = extras
        self._session: Known | None = None
        self._next_id = 0
        self._already = 0

    def all_of(self, pieces: Iterable[Piece]) -> None:
        """Publish; an atomic batch when all of it has been read. Raises CommandFailed."""
        super().all_of(_as_one(pieces) if self._extras.atomic else pieces)

    def publish(self, piece: Piece) -> Receipt:
        """One request. With a producer it may be sent again without a doubt."""
        extras, items = self._extras, piece.items
        request = PublishRequest([item.payload for item in items], ttl_s=self.ttl_s, atomic=extras.atomic)
        request.message_ttls_s = calls.own_ttls([item.ttl_s for item in items])
        request.routing_key = extras.routing_key
        request.attributes = _attributes(items, extras.attributes)
        if extras.producer is not None:
            self._put_producer(request, extras.producer)
        once = extras.producer is not None
        receipt: Receipt = asked(
            self.client, calls.publish(self.client.namespace, self.topic, request, retry_unknown=once)
        )
        if self._session is not None:
            # As of the opening: what an attempt of this very run has stored was not stored before.
            self._already += min(len(items), max(0, self._session.last_sequence_id + 1 - self._next_id))
        self._next_id += len(items)
        return receipt

    def _put_producer(self, request: PublishRequest, name: str) -> None:
        if self._session is None:
            opening = open_session(self.client.namespace, self.topic, name)
            # Opened twice it has another epoch, and this is the last one.
            self._session = asked(self.client, replace(opening, repeat="harmless"))
            first = self._extras.sequence_id
            self._next_id = self._session.last_sequence_id + 1 if first is None else first
        request.producer = name
        request.producer_epoch = self._session.epoch
        request.generation = self._session.generation
        request.sequence_ids = range(self._next_id, self._next_id + len(request.messages))

    @property
    def how(self) -> str:
        """As one batch, and how many were there already."""
        there = f", {messages_told(self._already)} of them stored before" if self._already else ""
        return (" in one batch" if self._extras.atomic else "") + there

    def told(self) -> dict[str, object]:
        """For programs."""
        if self._session is None:
            return super().told()
        told = {"producer": self._extras.producer, "lastSequenceId": self._next_id - 1, "storedBefore": self._already}
        return {**super().told(), **told}


def _as_one(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """All pieces as one. Raises CommandFailed when they are too large, or too many, for one request."""
    items: list[Item] = []
    size = read = 0
    for piece in pieces:
        items += piece.items
        size += sum(len(item.payload) for item in piece.items)
        read = piece.read_bytes
        if size > MAX_BYTES or len(items) > MAX_MESSAGES:
            raise CommandFailed(
                f"this is more than {MAX_BYTES >> 20} MiB or {MAX_MESSAGES} messages, too much for --atomic",
                hint="--tx takes any number",
                code=Exit.USAGE,
            )
    if items:
        yield Piece(items, 1, read)


def _attributes(items: Sequence[Item], shared: Mapping[str, str]) -> list[dict[str, str]] | None:
    found = [{**shared, **item.attributes} for item in items]
    return found if any(found) else None
