"""The ledger as the store's rows say it: the same at the first start, after a fall, and after a power cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.keys import DamagedRow
from protocol.transactions.manager.core import ManagerCore
from protocol.transactions.manager.ledger import Ledger
from protocol.transactions.manager.record import Record
from protocol.transactions.manager.rows import (
    AUTHORITY,
    CHANGES,
    ENLISTED,
    HEAD,
    PASS,
    TRANSACTION,
    ChangeSet,
    Head,
    LastPass,
    enlisted_topic,
    parse_service_key,
    service_key,
)
from protocol.transactions.transaction import POINTERS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.transactions.manager.settings import TransactionSettings
    from protocol.transactions.manager.step import Now


@dataclass(slots=True)
class Loading:
    """Gathers the rows of the service; nothing is guessed about one that cannot be read."""

    head: Head = field(default_factory=Head)
    last_pass: LastPass | None = None
    records: dict[int, Record] = field(default_factory=dict)
    changes: list[ChangeSet] = field(default_factory=list)
    enlisted: list[tuple[int, bytes]] = field(default_factory=list)

    def feed(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Take rows of ``SERVICE_RANGE``. Raises DamagedRow."""
        for key, value in rows:
            kind, pointer = parse_service_key(key)
            if kind == HEAD:
                self.head = Head.decode(value)
            elif kind == TRANSACTION:
                self.records[pointer] = Record.decode(pointer, value)
            elif kind == CHANGES:
                self.changes.append(ChangeSet.decode(pointer, value))
            elif kind == ENLISTED:
                self.enlisted.append((pointer, key))
            elif kind == PASS:
                self.last_pass = LastPass.decode(value)
            elif kind != AUTHORITY:
                raise DamagedRow(f"key {key.hex()}: the transaction service has no rows of this kind")

    def core(self, settings: TransactionSettings, now: Now) -> ManagerCore:
        """The manager with what was fed. A time-out goes on where the clock says it is, and never grows longer."""
        ledger = Ledger(settings)
        ledger.head, ledger.last_pass = self.head, self.last_pass
        known = [pointer for record in self.records.values() for pointer in (*record.pointers, record.decided_at)]
        ledger.head.last = max(ledger.head.last, *known) if known else ledger.head.last
        if not ledger.head.last:
            ledger.head.last = ledger.head.read_pointer = now.wall_ms * POINTERS_PER_MS
        decided: list[Record] = []
        for _, record in sorted(self.records.items()):
            if record.state == "in_progress":
                left_ms = min(max(0, record.expires_ms - now.wall_ms), record.expires_ms - record.started_ms)
                record.deadline_s = now.mono_s + left_ms / 1000
                ledger.begin(record)
            elif record.listed:
                ledger.list_invalid(record)
            else:
                decided.append(record)
        for record in sorted(decided, key=lambda each: each.decided_at):
            ledger.remember(record)
        return ManagerCore(ledger, self._take_changes(ledger) + self._take_enlisted(ledger))

    def _take_enlisted(self, ledger: Ledger) -> list[bytes]:
        """Give each open or invalid transaction its topics; returns the keys of rows that a crash left behind."""
        leftovers: list[bytes] = []
        for transaction_id, key in self.enlisted:
            record = ledger.by_pointer.get(transaction_id)
            if record is not None and (record.state == "in_progress" or record.listed):
                record.topics.add(enlisted_topic(key))
            else:
                leftovers.append(key)
        return leftovers

    def _take_changes(self, ledger: Ledger) -> list[bytes]:
        """Give each change set its place; returns the keys of those that a crash left behind."""
        leftovers: list[bytes] = []
        committed: list[ChangeSet] = []
        for changes in self.changes:
            record = ledger.by_pointer.get(changes.transaction_id)
            if changes.transaction_id in ledger.open:
                # With a commit pointer: the crash came between the set's row and the transaction's. It is open.
                prepared = ChangeSet(changes.transaction_id, changes.client_id, changes.keys)
                ledger.prepared.keep(prepared)
            elif changes.commit_pointer is None or (record is not None and record.state != "committed"):
                leftovers.append(service_key(CHANGES, changes.transaction_id))
            else:
                committed.append(changes)
        for changes in sorted(committed, key=lambda each: each.commit_pointer or 0):
            ledger.committed.add(changes)
        return leftovers
