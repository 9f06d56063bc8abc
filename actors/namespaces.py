"""Properties of namespaces: read at startup, durable before they take effect, shared by all topics.

    enabled    producers are remembered      disabled    they are not      inherit    the service's default

If several instances share the store, the instance that writes a row notifies the others before it answers, and they
read the row again. An instance that cannot be notified reads all rows again within ``REFRESH_S``, and as soon as it has
rejoined the cluster. Reads and writes may complete out of order. Of two results the later one wins, whichever arrives
first: a read counts from its beginning, a write from its end.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import InvalidProperty, PlainsongError, nearest
from plainsong.protocol.keys import (
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
from plainsong.protocol.properties import shown_value
from plainsong.protocol.records import Metadata, NamespaceProperties
from plainsong.protocol.topic.producer_state import INHERITED, NamespacePolicy
from storage.base import NAMESPACES_NAME, Deposed, read_rows

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from plainsong.protocol.answers.topics import NamespaceSettings
    from plainsong.protocol.properties import Deduplication
    from storage.base import Row, Store

log = logging.getLogger(__name__)
#: The interval for reading all rows again on a shared store.
REFRESH_S = 15.0
#: Attempts at a change when other instances make changes at the same time.
ATTEMPTS = 3
CHOICES: tuple[Deduplication, ...] = ("inherit", "enabled", "disabled")


class Namespaces:
    """The properties of every namespace; ``load`` them before topics are opened."""

    def __init__(
        self, store: Store, *, default: bool = True, notify: Callable[[str], Awaitable[object]] | None = None
    ) -> None:
        """
        Args:
          default: whether producers are remembered in a namespace that inherits (``deduplication.default``).
          notify: makes other instances read a namespace again, and waits for them within a bound; must not raise.
        """
        self._notify = notify
        self._store = store
        self._default = default
        self._known: dict[str, NamespaceProperties] = {}
        #: The producer policy of each namespace that has properties, for the steps of its topics.
        self.policies: dict[str, NamespacePolicy] = {}
        #: Logical time, which advances when a read begins or a write ends; and the time of each namespace's known value.
        self._moments = 0
        self._known_at: dict[str, int] = {}
        self._writing = trio.Lock()
        self._reload = trio.Event()

    def __repr__(self) -> str:
        return f"<Namespaces {len(self._known)} with properties>"

    async def load(self) -> None:
        """Read all rows; damaged ones are logged and skipped. Raises StoreError."""
        start, begun = SYSTEM + NAMESPACE, self._moment()
        found: list[Row] = []

        def take(rows: Sequence[Row]) -> bool:
            found.extend(rows)
            return True

        await self._store.scan(Table.METADATA, start, stop_after(start), take)
        for key, value in found:
            try:
                self._keep(namespace_of(key), NamespaceProperties.decode(value), begun)
            except DamagedRow as error:
                log.warning("namespace row unreadable", extra={"key": key.hex(), "why": str(error)})

    async def read_again(self, namespace: str) -> None:
        """Read a namespace that another instance has changed. Raises StoreError, DamagedRow: nothing changes."""
        taken = False
        while not taken:  # a stale read may hide a newer write of another instance
            begun = self._moment()
            value = await self._store.get(Table.METADATA, namespace_key(namespace))
            taken = self._keep(namespace, None if value is None else NamespaceProperties.decode(value), begun)

    def _moment(self) -> int:
        self._moments += 1
        return self._moments

    def _keep(self, namespace: str, known: NamespaceProperties | None, moment: int) -> bool:
        """Store a namespace's properties, None if it has no row; return False if a later value is known already."""
        if moment < self._known_at.get(namespace, 0):
            return False  # the read was slow, and may have returned a value that has been replaced since
        self._known_at[namespace] = moment
        if known is None:
            self._known.pop(namespace, None)
            self.policies.pop(namespace, None)
            return True
        self._known[namespace] = known
        enabled = None if known.deduplication == "inherit" else known.deduplication == "enabled"
        self.policies[namespace] = NamespacePolicy(enabled, known.switched)
        return True

    def reload_soon(self) -> None:
        """Make ``run`` read all rows now: this instance may have missed changes while it was not in the cluster."""
        self._reload.set()

    async def run(self) -> None:
        """Read all rows periodically on a shared store; otherwise return at once."""
        while self._store.traits.shared:
            with trio.move_on_after(REFRESH_S):
                await self._reload.wait()
            self._reload = trio.Event()
            try:
                await self.load()
            except PlainsongError as error:
                log.warning("namespaces not read again", extra={"why": error.detail})

    def policy(self, namespace: str) -> NamespacePolicy:
        """Return the namespace's policy for producers."""
        return self.policies.get(namespace, INHERITED)

    def properties(self, namespace: str) -> NamespaceSettings:
        """Return all properties as ``GET`` answers them; every value is a string."""
        known = self._known.get(namespace, NamespaceProperties())
        return {"deduplication": known.deduplication}

    @staticmethod
    def checked(given: object) -> NamespaceSettings:
        """Return a client's properties in the form of ``properties``. Raises InvalidProperty."""
        return {"deduplication": _parsed(given)}

    async def put(self, namespace: str, given: object) -> NamespaceSettings:
        """Set a namespace's properties to ``given`` (a decoded JSON object, or None); return the new ones.

        They are durable when this returns, and take effect in the next step of each of its topics.

        Raises:
          InvalidProperty: an unknown key, or a value that is not allowed; nothing happened.
          StoreError: the outcome is unknown; the change is not in effect here.
        """
        chosen = _parsed(given)
        async with self._writing:
            for attempt in range(ATTEMPTS):
                try:
                    changed = await self._put(namespace, chosen)
                    break
                except Deposed:
                    if attempt + 1 == ATTEMPTS:
                        raise
            # Notify even if nothing changed: an earlier writer may have failed before it notified the others.
            if (changed or self._store.traits.shared) and self._notify is not None:
                await self._notify(namespace)
        return self.properties(namespace)

    async def _put(self, namespace: str, chosen: Deduplication) -> bool:
        """Return True if the row had to be written. Raises Deposed if another instance writes one at the same time."""
        shared = self._store.traits.shared
        claim = await self._store.claim(NAMESPACES_NAME) if shared else None
        if shared:
            await self.read_again(namespace)
        old = self._known.get(namespace, NamespaceProperties())
        switched = old.switched
        if self._remembers(old.deduplication) and not self._remembers(chosen):
            switched += 1
        new = NamespaceProperties(chosen, switched)
        if new == old:
            return False
        row = put_one(Table.METADATA, namespace_key(namespace), new.encode())
        claim, begun = claim or await self._store.claim(NAMESPACES_NAME), self._moment()
        await self._store.write([row], claim=claim)
        if self._known_at.get(namespace, 0) < begun:
            self._keep(namespace, new, self._moment())
        else:
            await self.read_again(namespace)  # a concurrent read may be older than this write, or newer
        return True

    def _remembers(self, deduplication: Deduplication) -> bool:
        return self._default if deduplication == "inherit" else deduplication == "enabled"

    async def names(self) -> list[str]:
        """Return the namespaces that have a living topic or properties, sorted. Raises StoreError."""
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
        """Return True if a namespace has a living topic."""
        alive = False

        def any_lives(rows: Sequence[Row]) -> bool:
            nonlocal alive
            alive = any(map(_lives, rows))
            return not alive

        await self._store.scan(Table.METADATA, *namespace_range(namespace), any_lives, first_chunk=8)
        return alive


def _lives(row: Row) -> bool:
    try:
        return Metadata.decode(row[1]).deleted_ms is None
    except DamagedRow:
        return True


def checked_properties(given: object) -> NamespaceSettings:
    """Return all properties that a namespace would have. Raises InvalidProperty."""
    return {"deduplication": _parsed(given)}


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
    raise InvalidProperty(f"deduplication is {shown_value(value)}", hint="use one of: " + ", ".join(CHOICES))
