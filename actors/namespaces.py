"""Properties of namespaces: read at the start, durable before they are in force, shared by all topics.

enabled    producers are remembered      disabled    they are not      inherit    as the service's default says
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from protocol.effects import Table, put_one
from protocol.errors import InvalidProperty, nearest
from protocol.keys import (
    NAMESPACE,
    SYSTEM,
    DamagedRow,
    namespace_key,
    namespace_of,
    namespace_range,
    stop_after,
    topic_of,
    topic_range,
)
from protocol.names import TopicName
from protocol.records import Metadata, NamespaceProperties
from protocol.topic.producers.policy import INHERITED, NamespacePolicy
from storage.base import read_rows

if TYPE_CHECKING:
    from protocol.properties import Deduplication
    from storage.base import Row, Store

log = logging.getLogger(__name__)

#: What is claimed to write a namespace's row: no topic has an empty namespace.
_CLAIMED = TopicName("", "namespaces")
CHOICES: tuple[Deduplication, ...] = ("inherit", "enabled", "disabled")


class Namespaces:
    """What every namespace says; ``load`` it before topics are opened."""

    def __init__(self, store: Store, *, default: bool = True) -> None:
        """``default``: whether producers are remembered where nobody says (``deduplication.default``)."""
        self._store = store
        self._default = default
        self._known: dict[str, NamespaceProperties] = {}
        self._writing = trio.Lock()

    def __repr__(self) -> str:
        return f"<Namespaces {len(self._known)} with properties>"

    async def load(self) -> None:
        """Read all rows; one that cannot be read is told of, and counts as saying nothing. Raises StoreError."""
        start = SYSTEM + NAMESPACE
        found: list[Row] = []

        def take(rows: list[Row]) -> bool:
            found.extend(rows)
            return True

        await self._store.scan(Table.METADATA, start, stop_after(start), take)
        for key, value in found:
            try:
                self._known[namespace_of(key)] = NamespaceProperties.decode(value)
            except DamagedRow as error:
                log.warning("namespace row unreadable", extra={"key": key.hex(), "why": str(error)})

    def policy(self, namespace: str) -> NamespacePolicy:
        """What the namespace says about producers; asked for every step of every topic, never waits."""
        known = self._known.get(namespace)
        if known is None:
            return INHERITED
        enabled = None if known.deduplication == "inherit" else known.deduplication == "enabled"
        return NamespacePolicy(enabled, known.switched)

    def properties(self, namespace: str) -> dict[str, str]:
        """As ``GET`` answers them: every property, every value a string."""
        known = self._known.get(namespace, NamespaceProperties())
        return {"deduplication": known.deduplication}

    async def put(self, namespace: str, given: object) -> dict[str, str]:
        """Replace a namespace's properties by ``given`` (a decoded JSON object, or None); what they are now.

        Durable when this returns, and in force for the next step of each of its topics.

        Raises:
          InvalidProperty: an unknown key, or a value that is not allowed; nothing happened.
          StoreError: nobody knows whether it is written; it is not in force.
        """
        chosen = _parsed(given)
        async with self._writing:
            old = self._known.get(namespace, NamespaceProperties())
            switched = old.switched
            if self._remembers(old.deduplication) and not self._remembers(chosen):
                switched += 1
            new = NamespaceProperties(chosen, switched)
            if new != old:
                claim = await self._store.claim(_CLAIMED)
                await self._store.write([put_one(Table.METADATA, namespace_key(namespace), new.encode())], claim=claim)
                self._known[namespace] = new
        return self.properties(namespace)

    def _remembers(self, deduplication: Deduplication) -> bool:
        return self._default if deduplication == "inherit" else deduplication == "enabled"

    async def names(self) -> list[str]:
        """The namespaces that have a living topic or properties, sorted. Raises StoreError."""
        found = {name for name, known in self._known.items() if known.deduplication != "inherit"}
        start, stop = topic_range()
        while rows := await read_rows(self._store, Table.METADATA, start, stop, limit=1, values=False):
            try:
                namespace = topic_of(rows[0][0])[0].namespace
            except DamagedRow:
                start = rows[0][0] + b"\x00"
                continue
            start = namespace_range(namespace)[1]
            if namespace in found or await self._is_alive(namespace):
                found.add(namespace)
        return sorted(found)

    async def _is_alive(self, namespace: str) -> bool:
        """Whether a topic lives in it."""
        alive = False

        def look(rows: list[Row]) -> bool:
            nonlocal alive
            alive = any(map(_lives, rows))
            return not alive

        await self._store.scan(Table.METADATA, *namespace_range(namespace), look, first_chunk=8)
        return alive


def _lives(row: Row) -> bool:
    try:
        return Metadata.decode(row[1]).deleted_ms is None
    except DamagedRow:
        return True


def _parsed(given: object) -> Deduplication:
    values = {} if given is None else given
    if not isinstance(values, dict):
        raise InvalidProperty("properties are a JSON object", hint='for example {"deduplication": "disabled"}')
    for key in values:
        if key != "deduplication":
            raise InvalidProperty(f"unknown property {str(key)[:80]!r}", hint=nearest(str(key), ["deduplication"]))
    value = values.get("deduplication", CHOICES[0])
    for choice in CHOICES:
        if value == choice:
            return choice
    raise InvalidProperty(f"deduplication is {str(value)[:80]!r}", hint="use one of: " + ", ".join(CHOICES))
