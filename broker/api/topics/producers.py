"""The routes of producers: open a session, show, list, delete."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.reading import producer_of
from broker.api.answers import json_answer
from broker.api.change import change_answer
from broker.api.transactions.transactions import longs
from broker.http.messages import Answer, flag, whole_number
from plainsong.protocol.codec import json_values as values
from plainsong.protocol.errors import InvalidParameter, ProducerNotFound, TooManyProducers
from plainsong.protocol.ids import behind_position
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.requests import check_producer_name
from plainsong.protocol.topic.asks import Describe, GetProducer, ListProducers, OpenProducer, RemoveProducer

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.directory import Directory
    from actors.observe import Clock
    from broker.api.topics.topics import Policies
    from broker.api.transactions.transactions import Numbers
    from broker.http.messages import Request
    from plainsong.protocol.answers.messages import PublishResponseFields
    from plainsong.protocol.answers.topics import (
        ProducerList,
        ProducerRow,
        ProducerSnapshot,
        ProducerState,
        RecentPublish,
    )
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.requests import PublishResponse
    from plainsong.protocol.topic.asks import ProducerView, ResultView, SnapshotView
    from storage.base import Store

DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000
_SESSION = {
    "retentionSeconds": ("retention_s", values.nullable(values.int64)),
    "generation": ("generation", values.nullable(values.int32)),
    "discardStaged": ("discard_staged", values.nullable(values.boolean)),
}


@dataclass(frozen=True, slots=True)
class Producers:
    directory: Directory
    store: Store
    clock: Clock
    policies: Policies
    refused: Callable[[str], None]
    """Counts a refusal, by code."""

    async def open_new(self, request: Request) -> Answer:
        """Open a session under a new, generated name. Raises the same as ``open_named``."""
        return await self._open(request, secrets.token_hex(16), must_be_new=True)

    async def open_named(self, request: Request) -> Answer:
        """Open a session under a name, and fence older ones durably before answering.

        Raises:
          TopicNotFound, GenerationChanged, DeduplicationDisabled, TooManyProducers: nothing happened.
        """
        return await self._open(request, _producer(request))

    async def _open(self, request: Request, producer: str, *, must_be_new: bool = False) -> Answer:
        name = request.name
        as_number = longs(request.parameters("longs"))
        given = request.fields(_SESSION)
        for key in ("retention_s", "generation"):
            if given.get(key) is not None and given[key] <= 0:
                raise InvalidParameter(f"{key.removesuffix('_s')} is {given[key]}", hint="use a number above 0")
        retention_s = given.get("retention_s")
        ask = OpenProducer(
            producer,
            None if retention_s is None else retention_s * 1000,
            must_be_new=must_be_new,
            generation=given.get("generation"),
            discard_staged=given.get("discard_staged") is True,
        )
        return json_answer(_shown(await self._ask(name, ask), as_number))

    async def _ask(self, name: TopicName, ask: OpenProducer) -> ProducerView:
        try:
            return await self.directory.ask(name, ask)
        except TooManyProducers as error:
            self.refused(error.code)
            raise

    async def show(self, request: Request) -> Answer:
        """Return one producer; with ``generation`` also one of a deleted topic that has not been cleaned yet.

        Raises:
          TopicNotFound, ProducerNotFound, GenerationChanged, ProducerExpired: see ``producer_of``.
        """
        name, producer = request.name, _producer(request)
        parameters = request.parameters("generation", "longs")
        generation, as_number = whole_number(parameters, "generation"), longs(parameters)
        if generation is not None and generation <= 0:
            raise InvalidParameter(f"generation is {generation}", hint="generations are counted from 1")
        found = await producer_of(self.directory, self.store, name, producer, generation)
        return json_answer(_shown(found, as_number))

    async def list_page(self, request: Request) -> Answer:
        """List producers by name, with the state of the topic's deduplication. Raises TopicNotFound."""
        name = request.name
        parameters = request.parameters("after", "limit")
        limit = whole_number(parameters, "limit")
        if limit is not None and not 0 < limit <= MAX_LIMIT:
            raise InvalidParameter(f"limit is {limit}", hint=f"use 1 to {MAX_LIMIT}")
        described = await self.directory.ask(name, Describe())
        ask = ListProducers(parameters.get("after", ""), DEFAULT_LIMIT if limit is None else limit)
        page = await self.directory.ask(name, ask)
        shown: ProducerList = {
            "deduplication": self.policies.shown(name, described.metadata.properties.deduplication),
            "enabledFrom": behind_position(page.enabled_from),
            "generation": described.metadata.generation,
            "count": page.total,
            "snapshot": _snapshot(page.snapshot, self.clock.now_ms()),
            "lastReplay": {"entries": page.snapshot.replayed_entries, "ms": page.snapshot.replay_ms},
            "producers": [_listed(view) for view in page.producers],
            "next": page.producers[-1].name if page.more else None,
        }
        return json_answer(shown)

    async def remove(self, request: Request) -> Answer:
        """Delete a producer; messages that it sends again are stored again. Raises TopicNotFound, ProducerNotFound."""
        name, producer = request.name, _producer(request)
        dry_run = flag(request.parameters("dryRun"), "dryRun")
        before = None
        if dry_run:
            with suppress(ProducerNotFound, DamagedRow):  # it has only staged messages, or a damaged row
                before = _shown(await self.directory.ask(name, GetProducer(producer)), longs({}))
        await self.directory.ask(name, RemoveProducer(producer, dry_run))
        return change_answer("producer.delete", f"{name}/{producer}", before, None) if dry_run else Answer(200)


def _producer(request: Request) -> str:
    """Return the name in the path. Raises InvalidParameter."""
    producer = request.path["producer"]
    check_producer_name(producer)
    return producer


def _shown(view: ProducerView, as_number: Numbers) -> ProducerState:
    return {
        "producer": view.name,
        "epoch": view.epoch,
        "lastSequenceId": view.last_sequence_id,
        "generation": view.generation,
        "enabledFrom": behind_position(view.enabled_from),
        "activeMs": view.active_ms,
        "expiresMs": view.expires_ms,
        "recent": [_recent(each, as_number) for each in view.recent],
    }


def _recent(result: ResultView, as_number: Numbers) -> RecentPublish:
    return {
        "first": result.first,
        "last": result.last,
        "firstId": result.first_id.hex(),
        "lastId": result.last_id.hex(),
        "response": None if result.response is None else _response(result.response, as_number),
    }


def _response(response: PublishResponse, as_number: Numbers) -> PublishResponseFields:
    """Return the JSON form of a publish response, without ``duplicate``."""
    pointer = response.write_pointer
    return {
        "transactionWritePointer": None if pointer is None else as_number(pointer),
        "startTimestamp": response.start_timestamp_ms,
        "startSequenceId": response.start_sequence_id,
        "endTimestamp": response.end_timestamp_ms,
        "endSequenceId": response.end_sequence_id,
    }


def _listed(view: ProducerView) -> ProducerRow:
    return {
        "producer": view.name,
        "epoch": view.epoch,
        "pushed": view.pushed,
        "persisted": view.last_sequence_id,
        "activeMs": view.active_ms,
        "expiresMs": view.expires_ms,
        "damaged": view.damaged,
    }


def _snapshot(snapshot: SnapshotView, now_ms: int) -> ProducerSnapshot:
    return {
        "position": behind_position(snapshot.position),
        "ageMs": max(0, now_ms - snapshot.at_ms) if snapshot.at_ms else None,
        "entriesSince": snapshot.entries_since,
    }
