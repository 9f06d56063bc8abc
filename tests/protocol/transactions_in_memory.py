"""The transaction manager on a dict of rows: one request at a time, and power cuts after any row."""

from __future__ import annotations

from itertools import islice

from model_store import single_rows

from plainsong.protocol.effects import Put
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.ledger import ManagerNow, TransactionSettings
from plainsong.protocol.transactions.manager import LedgerLoader
from plainsong.protocol.transactions.transaction import TransactionType

START_MS = 1_700_000_000_000


class TransactionsInMemory:
    """A manager, its disk and its clocks."""

    def __init__(self, *, defers_begins=False, **settings):
        self.defers_begins = defers_begins
        self.settings = TransactionSettings(**settings)
        self.rows = {}
        self.wall_ms = START_MS
        self.mono_s = 0.0
        self.load()

    @property
    def now(self):
        return ManagerNow(self.wall_ms, self.mono_s)

    @property
    def ledger(self):
        return self.core.ledger

    def load(self):
        """Load the manager from the rows, as after a crash."""
        loading = LedgerLoader()
        loading.feed(sorted(self.rows.items()))
        self.core = loading.core(self.settings, self.now, defers_begins=self.defers_begins)

    def pass_s(self, seconds):
        """Advance both clocks."""
        self.mono_s += seconds
        self.wall_ms += int(seconds * 1000)

    def ask_all(self, *wanted, keep_rows=None):
        """Return the answers of one step; with ``keep_rows`` the power is cut after that many rows, without answers."""
        step = self.core.step(list(enumerate(wanted)), self.now)
        self._write(self.core.operations(step), keep_rows)
        if keep_rows is not None:
            self.load()
            return None
        self.step = step
        return [answer for _, answer in self.core.settled(step)]

    def _write(self, operations, keep_rows=None):
        for index, row in enumerate(single_rows(operations)):
            if keep_rows is not None and index >= keep_rows:
                break
            if isinstance(row, Put):
                self.rows[row.prefix] = row.values[0]
            else:
                self.rows.pop(row.keys[0], None)

    def publish(self, pointer):
        """Make the commit of a topic under a pointer."""
        self._write(self.core.begins([pointer]))
        self.core.begun([pointer])

    def stop(self, keep_commits=None):
        """Close the service, and load it again; with ``keep_commits`` the power is cut after that many commits."""
        for operations in islice(self.core.close(), keep_commits):
            self._write(operations)
        self.load()

    def ask(self, ask):
        """Return the answer, or raise it if it is an error."""
        answer = self.ask_all(ask)[0]
        if isinstance(answer, PlainsongError):
            raise answer
        return answer

    def tick(self):
        """Run a step for time-outs that are due."""
        self.ask_all()

    # --- shortcuts --------------------------------------------------------------------------------

    def begin(self, *, long=False, **more):
        return self.ask(asks.Begin(TransactionType.LONG if long else TransactionType.SHORT, **more)).transaction

    def new(self, **more):
        """Return the id of a new transaction."""
        return self.begin(**more).transaction_id

    def prepare(self, transaction_id, *keys, tephra=False):
        return self.ask(asks.Prepare(transaction_id, keys, tephra=tephra))

    def commit(self, transaction_id):
        return self.ask(asks.Commit(transaction_id)).state

    def abort(self, transaction_id):
        """Abort a transaction without rows."""
        return self.ask(asks.Abort(transaction_id)).state

    def invalidate(self, transaction_id):
        return self.ask(asks.Invalidate(transaction_id)).state

    def checkpoint(self, transaction_id, transaction=None):
        return self.ask(asks.Checkpoint(transaction_id, transaction)).transaction

    def state(self, pointer):
        return self.ask(asks.LookAt(pointer)).state

    def standing(self, pointer):
        return self.core.standing(pointer)

    def pointers_of(self, pointer):
        return self.core.pointers_of(pointer)

    def verdict(self, pointer):
        """Return a committed reader's verdict on a row with this pointer: deliver, skip or hold."""
        return self.core.view().verdict(pointer).name.lower()

    def invalid(self):
        return list(self.core.visible.invalids())
