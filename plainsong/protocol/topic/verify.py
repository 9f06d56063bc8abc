"""Verifies a chained topic: that its messages match its entries, and that no entry is missing.

    survey(entry)      all entries first: which rows were rolled back or removed
    row(row)           then all rows and entries, in the order of their positions
    stored(row)        the payload rows of a row, after it
    entry(entry)
    end(…)

Every fault has the id at which it was found. Verification continues after a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from plainsong.protocol.ids import POSITION_BYTES, ordinal, position_at, published_ms, shown_id
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.plurals import counted
from plainsong.protocol.topic.chain import (
    BEGIN,
    COVERING,
    END,
    FOUND,
    MAX_ROWS,
    RESTORED,
    ROLLBACK,
    SET_ASIDE,
    ChainedRow,
    ChainEntry,
    StoredRows,
    digest_of_some,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from plainsong.protocol.rows import Stored
    from plainsong.protocol.topic.chain import StoredRow

#: Faults kept; further ones are only counted.
MAX_FAULTS = 100
#: Rows kept until their entry arrives; beyond that, they are reported as not covered.
_MAX_OPEN = 4 * MAX_ROWS
#: Rolled-back rows kept until an entry for their rollback arrives; beyond this number, they are faults at once.
_MAX_UNEXPLAINED = 100_000


class Fault(NamedTuple):
    """A difference between the topic and its chain."""

    kind: str
    """``changed``, ``removed``, ``inserted``, ``unreadable``, ``hidden`` (rolled back without an entry for it),
    ``shown`` (not rolled back despite an entry for it), ``entry-changed``, ``entry-removed``, ``other-chain``,
    ``cut-off``."""
    position: bytes
    detail: str

    @property
    def id(self) -> str:
        """The id at which it was found."""
        return shown_id(self.position)


class KnownHead(NamedTuple):
    """The last entry of a chain, as recorded at an earlier time."""

    generation: int
    number: int
    position: bytes
    link: bytes


@dataclass(slots=True)
class Verification:
    """The result of verifying a topic."""

    messages: int = 0
    """Messages that match their entries."""
    entries: int = 0
    before: int = 0
    """Messages without an entry, published while the topic was not chained."""
    expired: int = 0
    """Entries with messages that have expired, or were stored by a transaction that a restore has undone. Their links
    were verified, these messages were not."""
    set_aside: int = 0
    """Entries with rows that were set aside; only their links were verified."""
    found: int = 0
    """Entries that a load added for rows that a crash had left without one."""
    restored: int = 0
    """Number of restores of the topic from a backup."""
    begun: bytes | None = None
    """The position where the chain begins, if that entry still exists."""
    first: ChainEntry | None = None
    last: ChainEntry | None = None
    known: str = ""
    """The outcome for the known head: ``found``, ``cleaned`` (its entry has expired), or empty if none was given, or it
    is a fault."""
    faults: list[Fault] = field(default_factory=list)
    more_faults: int = 0

    @property
    def is_good(self) -> bool:
        return not self.faults


class Verifier:
    """Verifies one generation of a topic.

    Args:
      known: a head from an earlier time, which the chain must still contain.
      head: the head that the server reported at the start, which the entries must reach.
    """

    def __init__(
        self, topic: str, generation: int, known: KnownHead | None = None, head: KnownHead | None = None
    ) -> None:
        self.result = Verification()
        self._topic = topic
        self._generation = generation
        self._known = known
        self._head = head
        self._compared: set[int] = set()
        """Numbers of heads that were compared with their entry, or whose entry expired during the read."""
        self._rolled_back: dict[int, list[tuple[bytes, bytes]]] = {}
        self._taken_out: list[tuple[bytes, bytes]] = []
        self._restored = b""
        self._surveyed: ChainEntry | None = None
        self._covers = False
        self._open: list[ChainedRow] = []
        self._stored: dict[bytes, StoredRows] = {}
        """Position of an open row → its stored messages."""
        self._unexplained: dict[bytes, int] = {}
        if known is not None and known.generation != generation:
            there = f"the topic has generation {generation}, the known head {known.generation}"
            self._fault("other-chain", known.position, there)
            self._known = None

    # --- first ------------------------------------------------------------------------------------

    def survey(self, position: bytes, value: bytes) -> None:
        """Process an entry, in the order of positions; ``entry`` reports unreadable ones."""
        try:
            entry = ChainEntry.decode(position, value)
        except DamagedRow:
            return
        if self._surveyed is None:
            self._surveyed = entry
        if entry.kind == ROLLBACK:
            self._rolled_back.setdefault(entry.pointer, []).append((entry.first, entry.last))
        elif entry.kind == SET_ASIDE:
            self._taken_out.append((entry.first, entry.last))
        elif entry.kind == RESTORED:
            self._restored = max(self._restored, entry.last)

    # --- then -------------------------------------------------------------------------------------

    def row(self, row: ChainedRow, oldest_ms: int) -> None:
        """Process a row. ``oldest_ms``: messages published before this time have expired."""
        start = self._surveyed
        if self.result.entries == 0:
            if start is None or start.kind == BEGIN:
                self.result.before += 1
                return
            if row.position < (start.first if start.kind in COVERING else start.position):
                if published_ms(row.position) >= oldest_ms:
                    self._fault("entry-removed", row.position, "the entries of this message are gone")
                return
        elif not self._covers:
            self.result.before += 1
            return
        self._open.append(row)
        if row.stored is not None:
            self._stored[row.position] = StoredRows(row.position, row.stored)
        if len(self._open) > _MAX_OPEN:
            self._uncovered(self._open)
            self._open = []
            self._stored.clear()

    def stored(self, row: StoredRow) -> None:
        """Process a payload row of the previous row, in the order of their positions."""
        rows = self._stored.get(row.position)
        if rows is not None:
            rows.take(row.id[POSITION_BYTES:], row.value)

    def entry(self, position: bytes, value: bytes, *, oldest_ms: int, now_ms: int) -> None:
        """Process an entry, after the rows up to its position."""
        result = self.result
        try:
            entry = ChainEntry.decode(position, value)
        except DamagedRow as error:
            self._fault("entry-changed", position, error.detail)
            self._open = []
            self._stored.clear()
            return
        last = result.last
        if last is None:
            result.first = entry
            if entry.number == 1 and not entry.follows(bytes(len(entry.link))):
                self._fault("entry-changed", position, f"entry {entry.number} is not the first one of a chain")
            elif entry.number != 1 and published_ms(position) >= oldest_ms:
                # Cleaning keeps the last expired entry, so the first remaining entry has always expired.
                self._fault("entry-removed", position, f"entry {entry.number} is the first, and has not expired")
        elif entry.number > last.number + 1 and published_ms(position) < oldest_ms:
            # The entries in between expired during the read, and this is the last link that cleaning kept.
            self._clean(last.number + 1, entry.number - 1)
        elif entry.number != last.number + 1:
            self._fault("entry-removed", position, f"entry {entry.number} comes after entry {last.number}")
        elif not entry.follows(last.link):
            self._fault("entry-changed", position, f"the link of entry {entry.number} does not match its content")
        result.entries += 1
        result.last = entry
        if self._known is not None and entry.number == self._known.number:
            self._compare_known(entry, self._known)
        if self._head is not None and entry.number == self._head.number:
            self._compare_head(entry, self._head)
        self._take(entry, oldest_ms, now_ms)
        self._stored.clear()

    def _take(self, entry: ChainEntry, oldest_ms: int, now_ms: int) -> None:
        result, rows = self.result, self._open
        self._open = []
        if entry.kind in COVERING:
            self._covers = True
            result.found += entry.kind == FOUND
            self._verify(entry, rows, oldest_ms, now_ms)
            return
        self._uncovered(rows)
        if entry.kind == BEGIN:
            self._covers = True
            result.begun = entry.position
            if entry.of != (self._topic, self._generation) and not self._restored:
                # The chain of a topic restored under another name begins with the original name.
                self._fault("other-chain", entry.position, f"this is the chain of {entry.of}")
        elif entry.kind == END:
            self._covers = False
        else:
            self._covers = True
            result.restored += entry.kind == RESTORED

    def _clean(self, first: int, last: int) -> None:
        """Record that these entries have expired."""
        if self._known is not None and first <= self._known.number <= last:
            self._compared.add(self._known.number)
            self.result.known = "cleaned"
        if self._head is not None and first <= self._head.number <= last:
            self._compared.add(self._head.number)

    def _compare_known(self, entry: ChainEntry, known: KnownHead) -> None:
        self._compared.add(known.number)
        if (entry.position, entry.link) == (known.position, known.link):
            self.result.known = "found"
            return
        self.result.known = ""
        self._fault("other-chain", entry.position, f"entry {entry.number} differs from the known one")

    def _compare_head(self, entry: ChainEntry, head: KnownHead) -> None:
        self._compared.add(head.number)
        if (entry.position, entry.link) != (head.position, head.link):
            self._fault("other-chain", entry.position, f"entry {entry.number} is not the head that the topic reported")

    def _verify(self, entry: ChainEntry, rows: Sequence[ChainedRow], oldest_ms: int, now_ms: int) -> None:
        """Compare the rows up to an entry with the entry."""
        result = self.result
        self._uncovered([row for row in rows if row.position < entry.first])
        rows = [row for row in rows if row.position >= entry.first]
        if published_ms(entry.first) < oldest_ms:
            result.expired += 1
            return
        if any(first <= entry.position and entry.first <= last for first, last in self._taken_out):
            result.set_aside += 1
            return
        if any(self._is_undone(row) for row in rows):
            result.expired += 1
            return
        by_index = {ordinal(row.position) - ordinal(entry.first): row for row in rows}
        dead: dict[int, int] = {}
        left = set(range(entry.rows))
        good = True
        for group in entry.expiring:
            indexes = range(entry.rows) if group.indexes is None else group.indexes
            left.difference_update(indexes)
            if group.expires_ms < now_ms:
                dead.update(dict.fromkeys(indexes, group.expires_ms))
            else:
                good &= self._same(entry, sorted(indexes), group.expires_ms, group.digest, by_index)
        if left and entry.digest is None:
            self._fault("entry-changed", entry.position, f"entry {entry.number} does not cover some of its messages")
            good = False
        elif entry.digest is not None:
            good &= self._same(entry, sorted(left), 0, entry.digest, by_index)
        for index, row in by_index.items():
            if index not in dead:
                good &= self._sign(entry, row)
            elif (row.item is not None or row.stored is not None) and row.expires_ms != dead[index]:
                # The digest of expired rows is no longer checked, so none of them may still be visible.
                self._fault("changed", row.position, "a message has expired although this one has not")
                good = False
        result.expired += bool(dead)
        if good:
            result.messages += sum(row.messages for index, row in by_index.items() if index not in dead)

    def _is_undone(self, row: ChainedRow) -> bool:
        """Return True if a row's stored messages are gone because a restore has undone their transaction."""
        if row.stored is None or not row.stored.messages or row.pointer >= 0 or row.position > self._restored:
            return False
        return not self._stored[row.position].messages

    def _same(
        self,
        entry: ChainEntry,
        indexes: Sequence[int],
        expires_ms: int,
        digest: bytes,
        by_index: Mapping[int, ChainedRow],
    ) -> bool:
        start = ordinal(entry.first)
        missing = [index for index in indexes if index not in by_index]
        if missing:
            what = f"{len(missing)} of {counted(entry.rows, 'message')} in entry {entry.number} missing, this one first"
            self._fault("removed", position_at(start + missing[0]), what)
            return False
        rows = [by_index[index] for index in indexes]
        if entry.rows == 1 and rows[0].stored is not None:
            return self._same_stored(entry, rows[0], rows[0].stored, expires_ms, digest)
        unreadable = next((row for row in rows if row.item is None), None)
        if unreadable is not None:
            self._fault("unreadable", unreadable.position, "the message cannot be read")
            return False
        # Also check the time to live: a forged one would hide a message from readers long before it is cleaned.
        other = next((row for row in rows if abs(row.pointer) != entry.pointer or row.expires_ms != expires_ms), None)
        items = [row.item or b"" for row in rows]
        attributes = {at: row.attributes for at, row in enumerate(rows) if row.attributes}
        if other is not None or digest_of_some(range(len(rows)), items, attributes) != digest:
            at = position_at(start + indexes[0]) if other is None else other.position
            among = "" if len(rows) == 1 else f": it, or one of the {len(rows) - 1} published with it"
            self._fault("changed", at, f"the message is not what was published{among}")
            return False
        return True

    def _same_stored(self, entry: ChainEntry, row: ChainedRow, stored: Stored, expires_ms: int, digest: bytes) -> bool:
        found = self._stored[row.position]
        if (abs(row.pointer), row.expires_ms) == (entry.pointer, expires_ms) and found.digest() == digest:
            return True
        what = f"the {stored.messages} stored messages of entry {entry.number}"
        if found.unreadable is not None:
            self._fault("unreadable", row.position, f"one of {what} cannot be read, at {found.unreadable.hex()}")
        elif found.messages < stored.messages:
            self._fault("removed", row.position, f"{stored.messages - found.messages} of {what} are missing")
        elif found.messages > stored.messages:
            self._fault("inserted", row.position, f"{found.messages - stored.messages} exist in addition to {what}")
        else:
            self._fault("changed", row.position, f"{what}, or what publishes them, are not what was published")
        return False

    def _sign(self, entry: ChainEntry, row: ChainedRow) -> bool:
        """Check that a row is rolled back if and only if an entry says so."""
        pointer = abs(row.pointer)
        said = any(first <= row.position <= last for first, last in self._rolled_back.get(pointer, ()))
        if row.pointer > 0 and said:
            self._fault("shown", row.position, f"entry {entry.number}: the message was rolled back, and now is not")
            return False
        if row.pointer < 0 and not said and row.position > self._restored:
            if len(self._unexplained) >= _MAX_UNEXPLAINED:
                self._hidden(row.position, pointer)
                return False
            self._unexplained[row.position] = pointer
        return True

    def _hidden(self, position: bytes, pointer: int) -> None:
        self._fault("hidden", position, f"write pointer {pointer} is rolled back here, but no entry records it")

    def _uncovered(self, rows: Sequence[ChainedRow]) -> None:
        if rows:
            self._fault("inserted", rows[0].position, f"no entry covers this message ({len(rows)} in a row)")

    # --- the end ----------------------------------------------------------------------------------

    def end(self, *, undecided: Collection[int] = (), later: Sequence[tuple[bytes, bytes]] = ()) -> Verification:
        """Finish, after all rows and entries up to the last entry.

        Args:
          undecided: write pointers not known to be decided, whose rollback may be under way.
          later: position and value of entries after the last one, for rollbacks since then.
        """
        for position, value in later:
            self.survey(position, value)
        self._uncovered(self._open)
        self._open = []
        for position, pointer in self._unexplained.items():
            stretches = self._rolled_back.get(pointer, ())
            if pointer not in undecided and not any(first <= position <= last for first, last in stretches):
                self._hidden(position, pointer)
        if self._known is not None and self._known.number not in self._compared:
            self._missed(self._known, "is known", is_known=True)
        if self._head is not None and self._head.number not in self._compared:
            self._missed(self._head, "is the head that the topic reported")
        self.result.faults.sort(key=lambda fault: fault.position)
        return self.result

    def _missed(self, head: KnownHead, why: str, *, is_known: bool = False) -> None:
        """Report on a head whose number no entry had."""
        first, last = self.result.first, self.result.last
        if first is not None and first.number > head.number:
            if is_known:
                self.result.known = "cleaned"
            return
        number = 0 if last is None else last.number
        self._fault("cut-off", head.position, f"the chain ends with entry {number}, and entry {head.number} {why}")

    def _fault(self, kind: str, position: bytes, detail: str) -> None:
        if len(self.result.faults) < MAX_FAULTS:
            self.result.faults.append(Fault(kind, position, detail))
        else:
            self.result.more_faults += 1
