"""Chained topics over HTTP: the head, signed if a secret is configured, and the entries with their messages."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.chain import MAX_ENTRIES, read_part
from broker.api.answers import json_answer, off_loop
from broker.http.messages import Answer, flag, one_of, whole_number
from broker.http.route import JSON_TYPE
from broker.security.files import FileUnusable, read_named
from plainsong.protocol.codec import JSON
from plainsong.protocol.codec.json_values import compact
from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.ids import parse_id, published_ms, shown_id
from plainsong.protocol.page import items_in
from plainsong.protocol.signatures import HINT, MAX_FILE_BYTES, NoSecret, secrets_in, signatures_of
from plainsong.protocol.topic.asks import DescribeChain
from plainsong.protocol.topic.chain import StoredRow

if TYPE_CHECKING:
    from actors.chain import ChainPart
    from actors.directory import Directory
    from actors.observe import Clock
    from broker.config.config import Config
    from broker.http.messages import Request
    from plainsong.protocol.answers.topics import ChainedMessage, ChainHeadFields, ChainPage, HeadSignature, SignedHead
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.asks import ChainView
    from plainsong.protocol.topic.chain import ChainedRow
    from storage.base import Store


@dataclass(frozen=True, slots=True)
class Chains:
    """The routes of chains, at the topic's owner."""

    directory: Directory
    store: Store
    clock: Clock
    secrets: tuple[bytes, ...] = ()
    """Secrets that sign heads; empty: heads are not signed."""

    async def head(self, request: Request) -> Answer:
        """Return the last entry of the topic's chain. Raises TopicNotFound, NotFound (the topic has no chain)."""
        request.parameters()
        view = await self.directory.ask(request.name, DescribeChain())
        head = _head(request.name, view)
        signed: SignedHead = {**head, "signature": self._signature(request.name, head)}
        return json_answer(signed)

    def _signature(self, name: TopicName, head: ChainHeadFields) -> HeadSignature | None:
        if not self.secrets:
            return None
        now_s = self.clock.now_ms() // 1000
        webhook_id = f"chain:{name}:{head['generation']}:{head['count']}"
        payload = f"{name} {head['generation']} {head['count']} {head['id']} {head['hash']}"
        return {
            "id": webhook_id,
            "timestamp": now_s,
            "payload": payload,
            "signature": signatures_of(self.secrets, webhook_id, now_s, payload.encode()),
        }

    async def entries(self, request: Request) -> Answer:
        """Return the entries after a given one, oldest first, and the messages that they cover.

        Raises:
          TopicNotFound, NotFound (the topic has no chain), GenerationChanged, InvalidParameter, InvalidMessageId.
        """
        parameters = request.parameters("after", "limit", "messages")
        limit = whole_number(parameters, "limit")
        if limit is not None and not 1 <= limit <= MAX_ENTRIES:
            raise InvalidParameter(f"limit is {limit}", hint=f"use 1 to {MAX_ENTRIES}")
        after = parse_id(parameters["after"]) if "after" in parameters else None
        one_of(parameters, "messages", ("true", "false"), "true")
        messages = flag({"messages": "true", **parameters}, "messages")
        part = await read_part(
            self.store,
            self.directory,
            request.name,
            after,
            limit or MAX_ENTRIES,
            messages=messages,
            max_bytes=request.page_bytes,
        )
        size = sum(len(row.value if isinstance(row, StoredRow) else row.item or row.value) for row in part.rows) + sum(
            len(value) for _, value in part.entries
        )
        body = await off_loop(size, JSON, lambda: _encoded(request.name, part))
        return Answer(200, body, JSON_TYPE)


def _head(name: TopicName, view: ChainView) -> ChainHeadFields:
    return {
        "topic": str(name),
        "generation": view.generation,
        "count": view.number,
        "id": shown_id(view.position),
        "atMs": published_ms(view.position),
        "hash": view.link.hex(),
    }


def _encoded(name: TopicName, part: ChainPart) -> bytes:
    shown: ChainPage = {
        "head": _head(name, part.view),
        "entries": [{"id": shown_id(position), "base64": _base64(value)} for position, value in part.entries],
        "messages": [_message(row) for row in part.rows],
        "next": None if part.next is None else part.next.hex(),
        "oldestMs": part.view.oldest_ms,
        "nowMs": part.view.now_ms,
        "undecided": [str(pointer) for pointer in part.view.undecided],
    }
    return compact(shown).encode()


def _message(row: ChainedRow | StoredRow) -> ChainedMessage:
    if isinstance(row, StoredRow):
        return {"id": row.id.hex(), "base64": None, "row": _base64(row.value)}
    shown: ChainedMessage = {"id": shown_id(row.position), "base64": None}
    if row.stored is not None:
        shown["row"] = _base64(row.value)
    if row.item is not None:
        ((_, payload),) = items_in(row.item)
        shown["base64"] = _base64(payload)
    if row.pointer:
        shown["writePointer"] = str(row.pointer)
    if row.attributes:
        shown["attributes"] = dict(row.attributes)
    if row.ttl_s is not None:
        shown["ttlSeconds"] = row.ttl_s
    return shown


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


def chain_secrets(config: Config) -> tuple[bytes, ...]:
    """Read the secrets of the settings. Raises FileUnusable."""
    setting, file = "topic.chain_secret_file", config.topic.chain_secret_file
    if not file:
        return ()
    try:
        return secrets_in(read_named(setting, file, MAX_FILE_BYTES, HINT))
    except NoSecret as error:
        raise FileUnusable(setting, f"{file}: {error}", HINT) from None
