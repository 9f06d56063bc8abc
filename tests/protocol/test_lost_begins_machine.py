"""Random clients, over HTTP and Tephra's own, and crashes: no pointer twice, none seen too early, no missed conflict.

Other stores see only what the snapshots of Tephra's clients show. So the machine examines these snapshots and the answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from transactions_in_memory import TransactionsInMemory

from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.asks import ChangeConflict
from plainsong.protocol.transactions.ledger import TEPHRA_POINTERS
from plainsong.protocol.transactions.transaction import Transaction
from plainsong.protocol.transactions.view import Verdict, View

PICK = st.integers(0, 9)
KEYS = st.lists(st.sampled_from([b"a", b"b"]), max_size=2)


@dataclass
class Known:
    """A client's record of its transaction."""

    snapshot: Transaction
    tephra: bool
    long: bool
    may_lack_changes: bool = False
    """True if the service crashed after its begin, and it has not been prepared since."""
    is_durable: bool = False
    """True once something was published under it."""
    keys: frozenset[bytes] = frozenset()
    """The keys of its latest prepare that succeeded."""
    state: str = "in_progress"
    pointers: list[int] = field(default_factory=list)
    """Its id, and those of its checkpoints that were answered."""

    def __post_init__(self):
        self.pointers.append(self.snapshot.transaction_id)

    @property
    def is_over(self) -> bool:
        return self.state != "in_progress"


class LostBeginsMachine(RuleBasedStateMachine):
    """A service that defers rows, and clients that never time out."""

    def __init__(self):
        super().__init__()
        self.at = TransactionsInMemory(defers_begins=True, timeout_ms=3_600_000, outcome_retention_ms=1 << 40)
        self.known = {}
        self.last = 0
        self.invalidated = set()
        self.crashes = 0
        #: Moment → the transactions shown to a reader as of that moment.
        self.shown = {}

    def _pick(self, pick):
        ids = sorted(self.known)
        return self.known[ids[-1 - pick % len(ids)]] if ids else None

    def _ask(self, ask):
        try:
            return self.at.ask(ask)
        except PlainsongError as error:
            return error

    @rule(tephra=st.booleans(), long=st.sampled_from([False, False, True]))
    def begin(self, tephra, long):
        snapshot = self.at.begin(tephra=tephra, long=long)
        self._note_issued(snapshot.transaction_id)
        self.known[snapshot.transaction_id] = Known(snapshot, tephra, long)

    def _note_issued(self, pointer):
        assert pointer > self.last, "no pointer is issued twice, or out of order"
        self.last = pointer

    @rule(pick=PICK)
    def checkpoint(self, pick):
        known = self._pick(pick)
        if known is None:
            return
        answer = self._ask(asks.Checkpoint(known.snapshot.transaction_id, known.snapshot))
        if not isinstance(answer, PlainsongError):
            self._note_issued(answer.transaction.write_pointer)
            known.pointers.append(answer.transaction.write_pointer)
            known.is_durable = True

    @rule(pick=PICK)
    def invalidate(self, pick):
        """Hide a transaction, whose client may abort it later."""
        known = self._pick(pick)
        if known is not None:
            self._ask(asks.Invalidate(known.snapshot.transaction_id))
            self.invalidated.add(known.snapshot.transaction_id)

    @rule(pick=PICK)
    def publish(self, pick):
        """Make the commit of a topic under a pointer that it may write under."""
        known = self._pick(pick)
        if known is None or self.at.standing(known.snapshot.transaction_id) != "in_progress":
            return
        pointer = known.snapshot.transaction_id
        self.at.publish(pointer)
        known.is_durable = True

    @rule(pick=PICK)
    def roll_back(self, pick):
        """Make the commit of a topic whose client rolls back a pointer; the topic does not know what a load lost."""
        known = self._pick(pick)
        if known is not None and self.at.standing(known.snapshot.transaction_id) in ("in_progress", "invalid"):
            self.at.publish(known.snapshot.transaction_id)

    @rule(pick=PICK, keys=KEYS, thrift=st.booleans())
    def prepare_and_commit_later(self, pick, keys, thrift):
        known = self._pick(pick)
        if known is None:
            return
        id_ = known.snapshot.transaction_id
        if not isinstance(self._ask(asks.Prepare(id_, keys, tephra=thrift)), PlainsongError):
            known.keys = frozenset(keys)
            known.may_lack_changes = False

    @rule(pick=PICK)
    def commit(self, pick):
        known = self._pick(pick)
        if known is None:
            return
        answer = self._ask(asks.Commit(known.snapshot.transaction_id))
        if isinstance(answer, ChangeConflict) and answer.key is None and answer.client_id is None:
            assert known.may_lack_changes, "no commit is refused without a reason"
            assert known.tephra
            assert not known.long
        if not isinstance(answer, PlainsongError):
            assert known.state in ("in_progress", "committed")
            known.state = "committed"

    @rule(pick=PICK)
    def abort(self, pick):
        known = self._pick(pick)
        if known is None:
            return
        answer = self._ask(asks.Abort(known.snapshot.transaction_id))
        if not isinstance(answer, PlainsongError):
            assert known.state in ("in_progress", "aborted")
            assert answer.state == ("invalid" if known.long else "aborted")
            known.state = "aborted"

    @rule(seconds=st.sampled_from([0.001, 0.5, 1, 4]))
    def time_passes(self, seconds):
        self.at.pass_s(seconds)
        self.at.tick()

    @rule(seconds=st.sampled_from([-100, -1, 1, 100]))
    def the_clock_jumps(self, seconds):
        self.at.wall_ms += seconds * 1000

    @rule(back_s=st.sampled_from([0, 0.5, 1]))
    def read_as_of(self, back_s):
        at_ms = self.at.wall_ms - int(back_s * 1000)
        answer = self._ask(asks.AsOf(at_ms))
        if not isinstance(answer, PlainsongError):
            view = answer.view()
            # A begin over HTTP that a crash lost is on no list; it has no rows.
            known = [(id_, each) for id_, each in self.known.items() if each.tephra or each.is_durable or each.is_over]
            seen = {id_ for id_, each in known if view.verdict(id_) is Verdict.DELIVER}
            assert all(self.known[id_].is_over for id_ in seen)
            assert self.shown.setdefault(at_ms, seen) == seen

    @rule(stopping=st.booleans())
    def crash(self, stopping):
        """Cut the power; if ``stopping``, during a stop, before its last commit."""
        if stopping:
            waits = any(not changes.is_written for changes in self.at.ledger.prepared.values())
            self.at.stop(keep_commits=int(waits))
        else:
            self.at.load()
        self.crashes += 1
        for known in self.known.values():
            known.may_lack_changes = True

    @rule()
    def stop(self):
        """A stop loses nothing, and makes nothing invalid."""
        before, invalid = dict.fromkeys(self.at.ledger.open), self.at.invalid()
        self.at.stop()
        assert dict.fromkeys(self.at.ledger.open) == before
        assert self.at.invalid() == invalid

    @invariant()
    def what_was_published_is_not_lost(self):
        for id_, known in self.known.items():
            if known.is_durable and known.state == "in_progress":
                assert self.at.state(id_) == ("invalid" if id_ in self.invalidated else "in_progress")

    @invariant()
    def no_snapshot_shows_what_may_still_be_written(self):
        # The view of a transaction that began now. None is begun, since an invariant must change nothing.
        ledger = self.at.ledger
        view = View(ledger.head.read_pointer, frozenset(ledger.in_progress), frozenset(ledger.invalid))
        for known in self.known.values():
            verdicts = {view.verdict(pointer) for pointer in known.pointers}
            if (known.tephra and known.state == "in_progress") or (known.long and known.state == "aborted"):
                assert Verdict.DELIVER not in verdicts
            if known.state == "committed":
                assert verdicts == {Verdict.DELIVER}

    @invariant()
    def no_conflict_is_missed(self):
        # As in Tephra, long transactions are checked only against the change sets that short ones need.
        committed = [known for known in self.known.values() if known.state == "committed" and not known.long]
        for one in committed:
            for other in committed:
                if one.keys & other.keys and one.snapshot.transaction_id < other.snapshot.transaction_id:
                    assert View.of(other.snapshot).verdict(one.snapshot.transaction_id) is Verdict.DELIVER

    @invariant()
    def a_crash_makes_few_pointers_invalid(self):
        others = {
            id_ for id_, known in self.known.items() if known.long and known.state == "aborted"
        } | self.invalidated
        many = sum(len(self.known[id_].pointers) for id_ in others)
        assert len(self.at.invalid()) <= self.crashes * TEPHRA_POINTERS + many


TestLostBeginsMachine = LostBeginsMachine.TestCase
if settings.get_current_profile_name() != "torture":
    TestLostBeginsMachine.settings = settings(max_examples=50, stateful_step_count=50, derandomize=True, database=None)
