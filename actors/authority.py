"""A store records its one authority on transactions; a change is refused while the store has undecided pointers.

A new authority does not know the pointers that the old one left undecided. It would count them as committed, and show
their messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.protocol.effects import Expect, Put, Table
from plainsong.protocol.keys import POINTER, SYSTEM, DamagedRow, parse_pointer_key, stop_after
from plainsong.protocol.names import TopicName
from plainsong.protocol.records import pack_record, unpack_record
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.transactions.ledger_rows import AUTHORITY, service_key
from storage.base import Deposed, StoreConflict, StoreUnusable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.base import Row, Store

#: A row of the metadata table; its field ``a`` is the name of the authority.
AUTHORITY_KEY = service_key(AUTHORITY)
#: The name to claim before writing it; no topic has an empty namespace.
_NAME = TopicName("", "authority")
#: Attempts when other instances start at the same time.
ATTEMPTS = 10
#: Topics named in an error.
MAX_NAMED_TOPICS = 5


class AuthorityChanged(StoreUnusable):
    """The store has messages of transactions that another authority has not decided."""


async def keep_authority(store: Store, chosen: str) -> None:
    """Make ``chosen`` (``transactions.service``) the store's authority; usually it already is.

    Raises:
      AuthorityChanged: the store has another authority and messages under undecided pointers; nothing was changed.
      StoreError: the store cannot be read or written.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            await _keep(store, chosen)
            return
        except (Deposed, StoreConflict):
            continue  # another instance is starting at the same time: read its row
    await _keep(store, chosen)


async def _keep(store: Store, chosen: str) -> None:
    """Make one attempt. Raises also Deposed, StoreConflict: this attempt changed nothing."""
    if await _kept(store) == chosen:
        return
    claim = await store.claim(_NAME)
    found = await store.get(Table.METADATA, AUTHORITY_KEY)
    before = await _kept(store)
    if before == chosen:
        return
    if before is not None and (topics := await _undecided(store)):
        shown = ", ".join(topics[:MAX_NAMED_TOPICS]) + (" and others" if len(topics) > MAX_NAMED_TOPICS else "")
        raise AuthorityChanged(
            f"transactions.service changed from {before!r} to {chosen!r}, but there are messages of undecided "
            f"transactions in {shown}",
            hint=f"start with transactions.service = {before!r}, finish or roll back these transactions, wait for a "
            "round of cleaning, then change the setting",
        )
    value = pack_record({"a": chosen})
    unchanged = [Expect(Table.METADATA, AUTHORITY_KEY, found)]
    await store.write([Put(Table.METADATA, b"", [AUTHORITY_KEY], [value])], claim=claim, expect=unchanged)


async def _kept(store: Store) -> str | None:
    value = await store.get(Table.METADATA, AUTHORITY_KEY)
    if value is None:
        return None
    try:
        return str(unpack_record(value, "authority").get("a"))
    except DamagedRow:
        return "unknown"


async def _undecided(store: Store) -> list[str]:
    """Return topics with rows of pointers that are not rolled back; at most one more than an error names."""
    start = SYSTEM + POINTER
    found: dict[str, None] = {}

    def take(rows: Sequence[Row]) -> bool:
        for key, value in rows:
            if _is_undecided(key, value):
                found[_topic(key)] = None
        return len(found) <= MAX_NAMED_TOPICS

    await store.scan(Table.METADATA, start, stop_after(start), take)
    return list(found)


def _is_undecided(key: bytes, value: bytes) -> bool:
    try:
        pointer = parse_pointer_key(key)[2]
        return pointer > 0 and not Pending.decode(pointer, value).rolled_back
    except DamagedRow:
        return True


def _topic(key: bytes) -> str:
    try:
        return str(parse_pointer_key(key)[0])
    except DamagedRow:
        return f"the damaged row {key.hex()}"
