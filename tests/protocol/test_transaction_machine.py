"""The transaction manager against a simple model, with rows, late writers, jumping clocks and power cuts.

The model contains acknowledged operations. A decision that a power cut interrupted may have happened or not; the
machine asks once after the restart, and from then on the answer must never change.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from transactions_in_memory import TransactionsInMemory

from plainsong.protocol.errors import PlainsongError, TransactionConflict
from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.asks import CompletePass
from plainsong.protocol.transactions.transaction import Transaction, TransactionType, issued_ms

LIFETIME_MS = 60_000
KEYS = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=2)
PICK = st.integers(0, 30)


@dataclass
class Known:
    """The model of one transaction."""

    pointers: list
    short: bool
    state: str = "in_progress"
    deadline_s: float = 0.0
    keys: frozenset = frozenset()
    conflicted: bool = False
    aborting: bool = False
    committed_after: int = 0
    """The last pointer issued before its commit."""


class ManagerMachine(RuleBasedStateMachine):
    """One manager, its rows, and topics as a set of pointers with visible rows."""

    def __init__(self):
        super().__init__()
        self.at = TransactionsInMemory(max_outcomes=3, max_lifetime_ms=LIFETIME_MS, outcome_retention_ms=LIFETIME_MS)
        self.known = {}
        self.last = 0
        #: Pointers with rows that have not been rolled back.
        self.rows = set()
        #: Moment → the transactions shown to a reader as of that moment.
        self.shown = {}

    # --- clients ----------------------------------------------------------------------------------

    @rule(long=st.booleans(), timeout_s=st.sampled_from([1, 5, 30]))
    def begin(self, long, timeout_s):
        self._passed()
        ask = asks.Begin(TransactionType.LONG) if long else asks.Begin(timeout_s=timeout_s)
        tx = self.at.ask(ask).transaction
        assert tx.transaction_id > self.last, "ids are above all ever issued"
        open_ = sorted(p for each in self.known.values() if each.state == "in_progress" for p in each.pointers)
        assert list(tx.in_progress) == open_
        self.last = tx.transaction_id
        lasts_s = LIFETIME_MS / 1000 if long else timeout_s
        self.known[tx.transaction_id] = Known(
            [tx.transaction_id], not long, deadline_s=self.at.mono_s + min(lasts_s, LIFETIME_MS / 1000)
        )

    @rule(pick=PICK)
    def checkpoint(self, pick):
        id_, known = self._one(pick)
        if known is None:
            return
        answer = self._try(asks.Checkpoint(id_, Transaction(0, id_, id_)))
        if known.state == "in_progress" and not known.aborting:
            pointer = answer.transaction.write_pointer
            assert pointer > self.last
            self.last = pointer
            known.pointers.append(pointer)
            assert list(answer.transaction.checkpoint_write_pointers) == known.pointers[1:]
        else:
            assert isinstance(answer, PlainsongError)

    @rule(pick=PICK, keys=KEYS)
    def prepare(self, pick, keys):
        id_, known = self._one(pick)
        if known is None:
            return
        conflict = self._conflicts(id_, keys)
        answer = self._try(asks.Prepare(id_, keys))
        if known.state != "in_progress" or known.aborting:
            assert isinstance(answer, PlainsongError)
        elif conflict and known.short:
            assert isinstance(answer, TransactionConflict)
            known.conflicted = True
        elif isinstance(answer, TransactionConflict):
            assert conflict
            assert not known.short, "only a long one is checked against no more than what is kept"
            known.conflicted = True
        else:
            known.keys, known.conflicted = frozenset(keys), False

    @rule(pick=PICK)
    def commit(self, pick):
        id_, known = self._one(pick)
        if known is None:
            return
        before = self.last
        answer = self._try(asks.Commit(id_))
        if known.state == "committed":
            assert isinstance(answer, PlainsongError) or (answer.state, answer.changed) == ("committed", False)
        elif known.state != "in_progress" or known.aborting:
            assert isinstance(answer, PlainsongError)
        elif known.conflicted or (known.short and self._conflicts(id_, known.keys)):
            assert isinstance(answer, TransactionConflict)
            known.conflicted = True
        elif isinstance(answer, TransactionConflict):
            assert not known.short
            assert self._conflicts(id_, known.keys)
            known.conflicted = True
        else:
            assert answer.changed
            known.state, known.committed_after = "committed", before

    @rule(pick=PICK, complete=st.booleans(), crash=st.booleans())
    def abort(self, pick, complete, crash):
        id_, known = self._one(pick)
        if known is None:
            return
        has_rows = bool(self.rows.intersection(known.pointers))
        answer = self._try(asks.Abort(id_, has_rows))
        if isinstance(answer, asks.RollFirst):
            assert list(answer.pointers) == known.pointers
            known.aborting = known.state == "in_progress"
            if crash:
                self._restart()
                return
            if complete:
                self.rows.difference_update(known.pointers)
            answer = self._try(asks.FinishAbort(id_, complete))
        if isinstance(answer, PlainsongError):
            assert known.state != "in_progress"
        else:
            assert answer.state in ("aborted", "invalid")
            assert known.state != "committed"
            assert not known.short or answer.state == "aborted" or not complete or known.state == "invalid"
            known.state, known.aborting = answer.state, False

    @rule(pick=PICK)
    def invalidate(self, pick):
        id_, known = self._one(pick)
        if known is None:
            return
        answer = self._try(asks.Invalidate(id_))
        if known.state == "in_progress":
            assert answer.changed
            known.state, known.aborting = "invalid", False

    @rule(pick=PICK, which=PICK)
    def write(self, pick, which):
        """Write a row as a topic does: never under a decided pointer, never past the lifetime."""
        _, known = self._one(pick)
        if known is None:
            return
        pointer = known.pointers[which % len(known.pointers)]
        lives = issued_ms(pointer) + LIFETIME_MS > self.at.wall_ms
        if lives and self.at.standing(pointer) in ("in_progress", "unknown"):
            self.rows.add(pointer)

    @rule(back_s=st.sampled_from([-1, 0, 0.5, 1, 4, 30, 100]))
    def read_as_of(self, back_s):
        """A reader as of a moment always sees the same transactions, including all those seen as of earlier moments."""
        self._passed()
        at_ms = self.at.wall_ms - int(back_s * 1000)
        answer = self._try(asks.AsOf(at_ms))
        if isinstance(answer, PlainsongError):
            assert answer.code in ("as_of_too_old", "invalid_parameter")
            assert (answer.code == "as_of_too_old") == (at_ms < self.at.ledger.head.oldest_ms)
            assert answer.code == "as_of_too_old" or at_ms > self.at.wall_ms
            return
        view = answer.view()
        verdicts = {id_: {view.verdict(each).name for each in one.pointers} for id_, one in self.known.items()}
        for pointer in self.rows:
            assert view.verdict(pointer).name in ("DELIVER", "SKIP"), "nothing holds such a reader"
        committed = {id_ for id_, one in self.known.items() if one.state == "committed"}
        assert all(len(verdicts[id_]) == 1 for id_ in committed), "all of a transaction, or nothing"
        seen = {id_ for id_ in committed if verdicts[id_] == {"DELIVER"}}
        hidden = {p for id_, one in self.known.items() if id_ not in committed for p in one.pointers}
        assert all(view.verdict(each).name == "SKIP" for each in self.rows & hidden)
        assert self.shown.setdefault(at_ms, seen) == seen
        for other_ms, others in self.shown.items():
            assert seen <= others if at_ms <= other_ms else others <= seen

    # --- cleaning ---------------------------------------------------------------------------------

    @rule(complete=st.booleans())
    def a_pass(self, complete):
        self._passed()
        visible = self.at.core.visible
        passed = CompletePass(self.at.wall_ms, visible.invalids(), visible.upper_bound())
        self.rows.difference_update(passed.invalids[: None if complete else 1])
        if complete:
            self.at.ask(asks.KeepPass(passed))

    @rule()
    def truncate(self):
        self._passed()
        invalids = self.at.core.visible.invalids()[:2]
        self.rows.difference_update(invalids)
        self.at.ask(asks.Unlist(invalids))

    # --- other events ---------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 1, 4, 30, 61]))
    def time_passes(self, seconds):
        self.at.pass_s(seconds)

    @rule(seconds=st.sampled_from([-100, -1, 1, 100]))
    def the_clock_jumps(self, seconds):
        self.at.wall_ms += seconds * 1000

    @rule()
    def restart(self):
        self._restart()

    @rule(
        picks=st.lists(PICK, min_size=1, max_size=3),
        what=st.lists(st.integers(0, 4), min_size=3, max_size=3),
        rows=st.integers(0, 12),
    )
    def the_power_is_cut(self, picks, what, rows):
        """Commit several requests at once; only the first rows reach the disk, and there are no answers."""
        self._passed()
        wanted, touched = [asks.Begin()], {}
        for pick, kind in zip(picks, what, strict=False):
            id_, known = self._one(pick)
            if known is None:
                continue
            has_rows = bool(self.rows.intersection(known.pointers))
            wanted.append(
                (
                    asks.Commit(id_),
                    asks.Abort(id_, has_rows),
                    asks.Invalidate(id_),
                    asks.Prepare(id_, [b"a"]),
                    asks.Commit(id_),
                )[kind]
            )
            touched.setdefault(id_, set()).add(("committed", "aborted", "invalid", "in_progress", "committed")[kind])
        self.at.ask_all(*wanted, keep_rows=rows)
        for id_, states in touched.items():
            self._learn(id_, states)
        for record in list(self.at.ledger.open.values()):
            if record.transaction_id not in self.known:
                # Its begin was written but not answered, so it never gets messages.
                assert record.transaction_id > self.last
                self.last = record.transaction_id
                self.known[record.transaction_id] = Known([record.transaction_id], True)
        self._reload_deadlines()

    # --- the model --------------------------------------------------------------------------------

    def _one(self, pick):
        self._passed()
        ids = sorted(self.known)
        if not ids:
            return None, None
        id_ = ids[-1 - pick % min(len(ids), 6)]
        return id_, self.known[id_]

    def _try(self, ask):
        try:
            return self.at.ask(ask)
        except PlainsongError as error:
            return error

    def _passed(self):
        """Apply time-outs that are due: the manager handles them before anything else."""
        self.at.tick()
        for known in self.known.values():
            if known.state == "in_progress" and known.deadline_s <= self.at.mono_s:
                known.state, known.aborting = "invalid", False

    def _conflicts(self, id_, keys):
        return any(
            each.state == "committed" and each.committed_after >= id_ and each.keys.intersection(keys)
            for each in self.known.values()
        )

    def _restart(self):
        self.at.load()
        self._reload_deadlines()

    def _reload_deadlines(self):
        for record in self.at.ledger.open.values():
            left_s = record.deadline_s - self.at.mono_s
            assert 0 <= left_s <= (record.expires_ms - record.started_ms) / 1000, "a restart prolongs nothing"
            self.known[record.transaction_id].deadline_s = record.deadline_s

    def _learn(self, id_, states):
        """Update the model after a partial commit: the state is unchanged, or one of those requested."""
        known = self.known[id_]
        record = self.at.ledger.by_pointer.get(id_)
        if record is None:
            assert known.state != "in_progress", "an open transaction is never forgotten"
            return
        if record.state != known.state:
            assert known.state in ("in_progress", "invalid"), "what was acknowledged stays"
            assert record.state in states or (not known.short and record.state == "invalid")
            known.state = record.state
            known.committed_after = record.decided_at
        known.aborting, known.conflicted = record.aborting, record.must_prepare
        prepared = self.at.ledger.prepared.get(id_)
        if known.state == "in_progress":
            keys = prepared.keys if prepared else frozenset()
            assert keys in (known.keys, {b"a"}), "what it changed is known as long as it is open"
            known.keys = keys
        elif known.state == "committed":
            kept = {each.transaction_id: each.keys for each in self.at.ledger.committed}
            known.keys = kept.get(id_, known.keys)

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def readers_see_what_is_committed_and_nothing_else(self):
        view = self.at.core.view()
        committed = {p for known in self.known.values() if known.state == "committed" for p in known.pointers}
        for pointer in self.rows:
            shown = view.verdict(pointer).name == "DELIVER"
            assert shown == (pointer in committed), "promise 4"
        for pointer in committed:
            assert view.verdict(pointer).name == "DELIVER"

    @invariant()
    def what_was_acknowledged_is_what_is_said(self):
        for id_, known in self.known.items():
            record = self.at.ledger.by_pointer.get(id_)
            if record is None:
                assert known.state != "in_progress"
                assert all(self.at.standing(each) == "committed" for each in known.pointers)
            elif not (record.state == "in_progress" and record.deadline_s <= self.at.mono_s):
                assert record.state == known.state
                assert list(record.pointers) == known.pointers

    @invariant()
    def memory_and_disk_are_bounded_and_agree(self):
        ledger = self.at.ledger
        assert len(ledger.outcomes) <= 3 + 4
        assert len([key for key in self.at.rows if key[2:3] == b"t"]) == len(
            {id(r) for r in ledger.by_pointer.values()}
        )
        sets = {int.from_bytes(key[3:], "big") for key in self.at.rows if key[2:3] == b"s"}
        assert sets >= set(ledger.prepared) | {each.transaction_id for each in ledger.committed}
        assert ledger.in_progress == sorted(p for each in ledger.open.values() for p in each.pointers)


TestManagerMachine = ManagerMachine.TestCase
if settings.get_current_profile_name() != "torture":
    TestManagerMachine.settings = settings(max_examples=50, stateful_step_count=50, derandomize=True, database=None)
