"""Where undecided transactions have rows, over all topics of all instances: what the service needs to find them again.

Topics are enlisted before they write, and the service keeps that. What was written before topics were enlisted, when
this store was another kind of store or had one instance, stands in the topics' own rows about pointers, which are read
once by every new owner of the service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from protocol.effects import Table
from protocol.keys import POINTER, SYSTEM, DamagedRow, parse_pointer_key, stop_after

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from protocol.names import TopicName
    from protocol.transactions.manager.core import ManagerCore
    from storage.base import Row, Store


class Whereabouts(Protocol):
    """Which topics have, or are about to have, rows of which pointers; ``PointerIndex`` is one, of its own topics."""

    def topics_of(self, pointers: Iterable[int]) -> set[TopicName]:
        """The topics that have, or may have, rows of any of these."""
        ...

    def oldest_by_topic(self) -> Mapping[TopicName, int]:
        """The oldest such pointer of each topic that has one."""
        ...


async def topics_by_pointer(store: Store) -> dict[int, set[TopicName]]:
    """The topics with rows about each transaction's pointer. Raises StoreError."""
    found: dict[int, set[TopicName]] = {}

    def take(rows: list[Row]) -> bool:
        for key, _ in rows:
            try:
                name, _, pointer = parse_pointer_key(key)
            except DamagedRow:
                continue  # the topic's own load says so
            if pointer > 0:  # below, somebody stages: no transaction is about it
                found.setdefault(pointer, set()).add(name)
        return True

    await store.scan(Table.METADATA, SYSTEM + POINTER, stop_after(SYSTEM + POINTER), take, values=False)
    return found


class Everywhere:
    """Implements ``Whereabouts`` from what the service keeps and what the store says."""

    def __init__(self) -> None:
        self._found: dict[int, set[TopicName]] = {}
        self._core: ManagerCore | None = None

    def __len__(self) -> int:
        return len(self._found)

    async def load(self, store: Store, core: ManagerCore) -> None:
        """Begin with what the service keeps, and rows of pointers that it has not settled. Raises StoreError."""
        found = await topics_by_pointer(store)
        self._core = core
        self._found = {each: names for each, names in found.items() if core.is_unsettled(each)}

    async def find(self, store: Store) -> None:
        """Read all rows about pointers that the store has. Raises StoreError."""
        self._found = await topics_by_pointer(store)

    def dropped(self, pointers: Iterable[int]) -> None:
        """These are decided, or off the invalid list, and have no rows that anybody needs to find."""
        for pointer in pointers:
            self._found.pop(pointer, None)

    def topics_of(self, pointers: Iterable[int]) -> set[TopicName]:
        """See ``Whereabouts.topics_of``."""
        found: set[TopicName] = set()
        for pointer in pointers:
            found |= self._found.get(pointer, set())
            if self._core is not None:
                found |= self._core.enlisted(pointer)
        return found

    def oldest_by_topic(self) -> dict[TopicName, int]:
        """See ``Whereabouts.oldest_by_topic``."""
        oldest: dict[TopicName, int] = {}
        for pointer in sorted({*self._found, *(() if self._core is None else self._core.unsettled())}):
            for name in self.topics_of((pointer,)):
                oldest.setdefault(name, pointer)
        return oldest
