"""The actor: the one writer of some rows, which decides requests in turn and answers once they are durable.

    load ──► wait ──► step ──► commit ──► settle ──► wait …
      ▲                          │
      └────────── fall ◄─────────┘ the store failed, or another owner has claimed the rows

*wait* for requests or the nearest deadline; *step*: the core decides, without waiting; *commit*: make its rows durable;
*settle*: only then send the answers. Step, commit and settle are one turn, which needs no task: the actor's own task
serves only the load, the deadlines and the close. Requests that arrive during a commit go into the next one together:
that is the group commit. If other instances may claim the rows, a turn that answers without writing first has the
store check that the claim still holds, once for all of its requests.

When an actor falls, every request under way gets an error that says what is known about its outcome. ``Supervision``
then starts the actor again from disk: recovery and the first start are the same code. Once another owner has claimed
the rows it stays down.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import trio

from actors.mailbox import RunQueue
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import NoOwner, PlainsongError, ShuttingDown
from storage.base import Deposed, NothingWritten
from storage.spawned import in_task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence

    from actors.mailbox import Mailbox, Ticket
    from plainsong.protocol.effects import Ask, Operation
    from storage.base import Claim, Store

    #: The answer for each ticket. A core treats a ticket as any hashable object.
    Answers = list[tuple[Any, object | PlainsongError]]
    #: An actor's ``run``.
    Run = Callable[[Callable[[], None]], Awaitable[None]]


log = logging.getLogger(__name__)
#: The longest time that the turn after a late commit waits for more requests, as a fraction of that commit's duration.
GATHERING = 0.25
#: Pauses before loading again after a fall; the last one repeats.
RESTART_PAUSES_S = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0)


class Core(Protocol):
    """The rules and their state; each kind of actor uses more of its core than this."""

    def next_deadline_s(self) -> float | None:
        """Return when a step is due even if no request arrives, on trio's clock; None: never."""
        ...


class Step(Protocol):
    """The decisions of one step of a core."""

    @property
    def answers(self) -> Answers:
        """The answer for each ticket."""
        ...


CoreT = TypeVar("CoreT", bound=Core)
StepT = TypeVar("StepT", bound=Step)


@dataclass(slots=True, eq=False)
class Turn(Generic[StepT]):
    """The state of one turn of an actor."""

    tickets: Sequence[Ticket[Any]]
    step: StepT | None = None
    operations: Sequence[Operation] = ()
    answers: Answers = field(default_factory=list)
    begun_s: float | None = None
    """When its commit began, on trio's clock, if the store answers late."""
    is_prepared: bool = False
    """True once the core has moved to its state after the commit; ``error`` is set if that failed."""
    error: Exception | None = None


class Actor(ABC, Generic[CoreT, StepT]):
    """Owns a core; other tasks use the mailbox, or read the core between two turns."""

    #: Requests that change nothing, so that a failed commit cannot leave their outcome unknown.
    reads: ClassVar[tuple[type[Ask[Any]], ...]]

    def __init__(
        self,
        store: Store,
        mailbox: Mailbox,
        *,
        commit_requests: int,
        commit_bytes: int,
        run_queue: RunQueue | None = None,
    ) -> None:
        """
        Args:
          commit_requests, commit_bytes: a commit takes no more requests once either is reached.
          run_queue: runs the actor's turns.
        """
        self._store = store
        self._shared = store.traits.shared
        #: True if turns may take long: requests that do not depend on the commit are then answered before the turn
        #: ends.
        self._answers_late = store.traits.answers_late
        self._mailbox = mailbox
        self._commit_requests = commit_requests
        self._commit_bytes = commit_bytes
        self._run_queue = run_queue or RunQueue(store)
        #: After a late commit, the next turn waits until this time for as many requests as were last seen at once.
        self._gathers_until_s = 0.0
        self._gathered_requests = 0
        #: The turn under way; None between two turns.
        self._turn: Turn[StepT] | None = None
        #: Set when the turn under way ends; None if no task waits for that.
        self._over: trio.Event | None = None
        #: Why a turn failed.
        self._failure: Exception | None = None
        #: When the task wakes by itself.
        self._deadline_s: float | None = None
        #: None while loading, and after the end.
        self.core: CoreT | None = None
        self.claim: Claim | None = None

    # --- the task: load, deadlines, close (``Supervision`` restarts it) -------------------------------

    async def run(self, on_loaded: Callable[[], None] = lambda: None) -> None:
        """Claim, load, then serve the mailbox until it is closed and empty; call ``on_loaded`` before the first turn.

        Raises what the store raises, after every request under way has received its error. Deposed: another owner has
        claimed the rows.
        """
        core, claim = await self._load()
        self.core, self.claim, self._failure = core, claim, None
        error: Callable[[], PlainsongError] = self._fall_error
        try:
            self._begin(core, claim)
            on_loaded()
            self._mailbox.on_mail = self._has_arrived
            if self._has_mail():
                self._run_queue.wake_for(self)
            while not await self._is_over(core):
                if self._has_mail() or self._is_due():
                    self._run_queue.soon(self)
                self._run_queue.run_due()
            await self._close_after_last_turn(core, claim)
        except Deposed:
            error = self._moved
            raise
        finally:
            await self._turn_over()
            self._mailbox.on_mail = None
            self.core = self.claim = None
            self._end(core, error)

    async def _is_over(self, core: CoreT) -> bool:
        """Sleep until the task is needed; return True once the mailbox is closed and empty. Raises a turn's failure."""
        if self._failure is None:
            is_late = self._turn is not None and self._answers_late
            self._deadline_s = self._deadline_in_turn_s(core) if is_late else self._next_deadline_s(core)
            await self._mailbox.wait(self._deadline_s)
            if self._turn is not None and self._answers_late and not self._mailbox.is_closed:
                return False
        await self._turn_over()
        if self._failure is not None:
            raise self._failure
        return self._mailbox.is_closed and not self._has_mail()

    def _is_due(self) -> bool:
        return self._deadline_s is not None and trio.current_time() >= self._deadline_s

    async def _close_after_last_turn(self, core: CoreT, claim: Claim) -> None:
        self._turn = Turn(())
        try:
            await self._close(core, claim)
        finally:
            self._leave_turn()

    async def _turn_over(self) -> None:
        """Wait until no turn is under way; shielded from cancellation, since its commit may still happen."""
        if self._turn is not None:  # rare, and the scope is the most expensive part
            with trio.CancelScope(shield=True):
                while self._turn is not None:
                    self._over = trio.Event()
                    await self._over.wait()
        self._over = None

    # --- the turn: step, commit, settle ---------------------------------------------------------------
    #
    # It needs no task: the store reports a commit's outcome on the event loop. ``RunQueue`` runs the turns of all actors
    # that have mail, so that their writes share one commit.

    def wake(self) -> None:
        """Wake the task, which takes the turn if no other caller has taken it."""
        self._mailbox.wake()

    def _wake_by(self, deadline_s: float | None) -> bool:
        """Wake the task if it would sleep past ``deadline_s``; return True if it was woken."""
        is_early = deadline_s is not None and (self._deadline_s is None or deadline_s < self._deadline_s)
        if is_early:
            self.wake()
        return is_early

    def _has_arrived(self) -> None:
        """Mail has arrived, and its sender does not run the turns."""
        if self._turn is None or self._answers_late:  # otherwise the end of the turn handles it
            self._run_queue.soon(self)
            self.wake()

    def _has_mail(self) -> bool:
        return len(self._mailbox) > 0

    def turn_now(self) -> None:
        """Take a turn for the waiting mail. During a turn or a load, which end by starting one, only park polls."""
        core, claim = self.core, self.claim
        if core is None or claim is None:
            return
        if self._turn is not None:
            if self._answers_late:
                self._wait_in_turn(core, self._turn)
            return
        if self._answers_late and self._gathers():
            return
        turn: Turn[StepT] = Turn(())
        self._turn = turn
        try:
            turn.tickets = self._mailbox.take(self._commit_requests, self._commit_bytes)
            turn.tickets = self._ready(core, turn.tickets)
            step = turn.step = self._step(core, turn.tickets)
            turn.operations = self._operations(core, step)
            if turn.operations:
                self._begin_commit(core, claim, turn, step)
                return
            turn.answers = self._settled(core, step)
            if self._run_queue.check is not None and any(
                not isinstance(ticket.ask, self.reads) for ticket, _ in turn.answers
            ):
                self._run_queue.check()
            if self._shared and turn.answers:
                in_task(partial(self._store.check, claim), partial(self._checked, core, turn, step))
                return
        except Exception as error:  # noqa: BLE001  # raised again, in the task
            self._fall(turn, error)
            return
        self._end_turn(core, turn, step)

    def _begin_commit(self, core: CoreT, claim: Claim, turn: Turn[StepT], step: StepT) -> None:
        self._commit_begins(step)
        written, prepare = partial(self._written, core, turn, step), partial(self._prepare, core, turn, step)
        try:
            self._store.begin(turn.operations, written, claim=claim, while_syncing=prepare)
        except BaseException:
            self._commit_ends(step, is_durable=False)
            raise
        if self._answers_late:
            turn.begun_s = trio.current_time()
            self._wait_in_turn(core, turn)

    def _gathers(self) -> bool:
        """True while the next turn waits for more requests.

        Clients that were just answered often send again at once. Without the wait, two groups of clients would take
        turns, and each request would wait for the object store twice.
        """
        is_waiting = len(self._mailbox) < self._gathered_requests and not self._mailbox.is_closed
        if is_waiting and trio.current_time() < self._gathers_until_s:
            return True
        self._gathered_requests = 0
        return False

    def _next_deadline_s(self, core: CoreT) -> float | None:
        """Return when a turn is due even if no request arrives; None: never."""
        deadline_s = core.next_deadline_s()
        if not self._gathered_requests:
            return deadline_s
        return self._gathers_until_s if deadline_s is None else min(deadline_s, self._gathers_until_s)

    def _prepare(self, core: CoreT, turn: Turn[StepT], step: StepT) -> None:
        """Do the work that follows the commit while the disk syncs; no answer is given yet."""
        turn.is_prepared = True
        try:
            turn.answers = self._settled(core, step)
            for ticket, answer in turn.answers:
                ticket.prepare(answer)
        except Exception as error:  # noqa: BLE001  # raised again once the commit's outcome is known
            turn.error = error

    def _written(self, core: CoreT, turn: Turn[StepT], step: StepT, failed: Exception | None) -> None:
        """Complete the turn after its commit, or fail it; called by the store with the outcome."""
        try:
            self._commit_ends(step, is_durable=failed is None)
            if failed is not None:
                raise failed
            if turn.error is not None:
                raise turn.error
            if not turn.is_prepared:
                turn.answers = self._settled(core, step)
        except Exception as error:  # noqa: BLE001  # raised again, in the task
            self._fall(turn, error)
            return
        self._end_turn(core, turn, step)

    def _checked(self, core: CoreT, turn: Turn[StepT], step: StepT, failed: Exception | None) -> None:
        """Complete the turn if the claim still holds, or fail it; called with the outcome of the check."""
        if failed is not None:
            self._fall(turn, failed)
        else:
            self._end_turn(core, turn, step)

    def _end_turn(self, core: CoreT, turn: Turn[StepT], step: StepT) -> None:
        self._leave_turn()
        if turn.begun_s is not None:
            now_s = trio.current_time()
            self._gathered_requests = len(turn.tickets) + len(self._mailbox)
            self._gathers_until_s = now_s + GATHERING * (now_s - turn.begun_s)
        if not self._wake_by(self._next_deadline_s(core)) and self._has_mail():
            self._run_queue.soon(self)
        try:
            # Begin the next commit before sending these answers, so that the disk does not idle.
            self._run_queue.run()
        finally:
            self._settle(core, step, turn.answers)

    def _fall(self, turn: Turn[StepT], error: Exception) -> None:
        """Fail a turn: settle its requests with errors, and have the task raise the failure."""
        tickets = [*turn.tickets, *(ticket for ticket, _ in turn.answers)]
        self._fail(tickets, turn.step, turn.operations, error)
        self._failure = error
        self.core = None  # it may contain state that is not durable
        self._leave_turn()
        self.wake()

    def _leave_turn(self) -> None:
        self._turn = None
        if self._over is not None:
            self._over.set()

    def _fail(
        self,
        tickets: Iterable[Ticket[Any]],
        step: StepT | None,
        operations: Sequence[Operation],
        error: BaseException,
    ) -> None:
        """Settle each request of a failed turn with an error that says whether it may have happened.

        Requests that the core refused get the refusal, except on a shared store: another instance may own the rows by
        now, so the refusal may be based on outdated rows.
        """
        refusals = [
            (ticket, answer)
            for ticket, answer in (step.answers if step is not None else ())
            if isinstance(answer, PlainsongError)
        ]
        if not self._shared:
            for ticket, refusal in refusals:
                ticket.settle(refusal)
        refused = {ticket for ticket, _ in refusals}
        nothing_written = (
            not operations
            or isinstance(error, NothingWritten)
            or (isinstance(error, Deposed) and error.happened is False)
        )
        why = error.detail if isinstance(error, PlainsongError) else "the daemon failed"
        for ticket in tickets:
            if not (nothing_written or isinstance(ticket.ask, self.reads) or ticket in refused):
                ticket.settle(self._outcome_unknown(why))
            elif isinstance(error, Deposed):
                ticket.settle(self._moved())
            else:
                ticket.settle(self._unavailable(why))

    # --- while the second copy does not confirm commits --------------------------------------------

    def turn_refused(self, refusal: Callable[[], PlainsongError]) -> None:
        """Refuse waiting requests that would change something; answer the others, if possible."""
        self._mailbox.refuse(refusal, but=self.reads)
        if self._turn is None:
            self.turn_now()
        elif self.core is not None:
            self._refuse_in_turn(self.core, self._turn, refusal)

    def end_late(self, refusal: Callable[[], PlainsongError]) -> None:
        """Answer the requests of a turn whose commit is not confirmed in time; the turn itself continues."""
        turn = self._turn
        if turn is None:
            return
        answers = turn.step.answers if turn.step is not None else ()
        refused = {ticket for ticket, answer in answers if isinstance(answer, PlainsongError)}
        for ticket in turn.tickets:
            if ticket in refused or isinstance(ticket.ask, self.reads):
                ticket.settle(refusal())
                ticket.abandoned = True  # otherwise it would be parked at the end of the turn
            else:
                ticket.settle(self._outcome_unknown(refusal().detail))

    def _refuse_in_turn(self, core: CoreT, turn: Turn[StepT], refusal: Callable[[], PlainsongError]) -> None:
        """Refuse the waiting requests that cannot be answered without a step, and answer the others."""
        del core, turn
        self._mailbox.refuse(refusal)

    def _wait_in_turn(self, core: CoreT, turn: Turn[StepT]) -> None:
        """During a turn that may take long, let polls wait, and answer those whose wait is over."""

    def _deadline_in_turn_s(self, core: CoreT) -> float | None:
        """Return when ``_wait_in_turn`` is due even if no request arrives; None: never."""
        del core
        return None

    # --- to be implemented by each actor ----------------------------------------------------------

    @abstractmethod
    async def _load(self) -> tuple[CoreT, Claim]:
        """Claim the rows, then load the core from them."""

    @abstractmethod
    def _begin(self, core: CoreT, claim: Claim) -> None:
        """Prepare what the turns need."""

    @abstractmethod
    def _ready(self, core: CoreT, tickets: Sequence[Ticket[Any]]) -> Sequence[Ticket[Any]]:
        """Return the tickets for the step, which follows at once; nothing runs in between."""

    @abstractmethod
    def _step(self, core: CoreT, tickets: Sequence[Ticket[Any]]) -> StepT:
        """Run one step of the core."""

    @abstractmethod
    def _operations(self, core: CoreT, step: StepT) -> Sequence[Operation]:
        """Return the rows to write; empty if the step changes nothing on disk."""

    @abstractmethod
    def _commit_begins(self, step: StepT) -> None:
        """Called before the step's operations are written."""

    @abstractmethod
    def _commit_ends(self, step: StepT, *, is_durable: bool) -> None:
        """Called once the step's operations are durable, or their commit has failed."""

    @abstractmethod
    def _settled(self, core: CoreT, step: StepT) -> Answers:
        """Apply the effects of a step, and return its answers; it is durable, or will be before either is observed."""

    @abstractmethod
    def _settle(self, core: CoreT, step: StepT, answers: Answers) -> None:
        """Send the answers, and report the step."""

    @abstractmethod
    async def _close(self, core: CoreT, claim: Claim) -> None:
        """Answer requests in the core, and save what makes the next load faster; the mailbox is closed and empty."""

    @abstractmethod
    def _end(self, core: CoreT, error: Callable[[], PlainsongError]) -> None:
        """Settle requests that still wait in the core, with ``error`` if nothing happened; undo ``_begin``."""

    @abstractmethod
    def _moved(self) -> NoOwner:
        """Return the error for a request that had no effect because another instance is now the owner."""

    @abstractmethod
    def _fall_error(self) -> PlainsongError:
        """Return the error for a request that had no effect because the actor fell or ended while it waited."""

    @abstractmethod
    def _unavailable(self, why: str) -> PlainsongError:
        """Return the error for a request that had no effect because the store failed."""

    @abstractmethod
    def _outcome_unknown(self, why: str) -> PlainsongError:
        """Return the error for a request whose commit failed, and may have happened nevertheless."""


def as_ticket(ticket: Hashable) -> Ticket[Any]:
    """Return a ticket that went through a core, which treats it as opaque."""
    return ticket  # type: ignore[return-value]  # a core sees only a Hashable


def complete_all(answers: Answers) -> None:
    """Give each ticket its answer. If notifying one caller raises, the others still get their answers."""
    for ticket, answer in answers:
        try:
            ticket.settle(answer)
        except Exception:
            log.exception("an answer could not be delivered")


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("the daemon is shutting down")


class Supervision(ABC):
    """Keeps an actor running until its mailbox is closed or another owner has claimed the rows.

    An actor that falls is started again from disk, at once the first time, then with increasing pauses.
    """

    def __init__(self, mailbox: Mailbox, what: str, extra: Mapping[str, str] | None = None) -> None:
        """``what``, ``extra``: name the actor in the log."""
        self.mailbox = mailbox
        #: Set once the first load has succeeded, has failed, or will not be attempted.
        self.first_load_ended = trio.Event()
        #: The store has reported that another instance has claimed the rows.
        self.deposed = False
        #: Another instance will own the rows.
        self.given_away = False
        self._what = what
        self._extra = dict(extra or {})
        self._closing = trio.Event()
        self._backoff = Backoff(RESTART_PAUSES_S)
        self._begun_s = 0.0

    @property
    def is_elsewhere(self) -> bool:
        """True if another instance owns the rows, or will own them."""
        return self.deposed or self.given_away

    def close(self, *, given_away: bool = False) -> None:
        """Refuse new requests; the actor answers those that wait, then ends.

        Args:
            given_away: another instance will own the rows. A fallen actor does not claim them again: waiting requests
              get NoOwner.
        """
        self.given_away |= given_away
        self._closing.set()
        self.mailbox.closed_for = self._gone
        self.mailbox.close()

    async def _supervise(self, run: Run, after: trio.Event | None = None) -> None:
        """Run the actor until it returns, then drain the mailbox.

        Args:
          after: set once the previous actor of the same rows has ended: two never run at once.
        """
        try:
            if after is not None:
                await after.wait()
            await self._keep_running(run)
        finally:
            self.mailbox.closed_for = gone = self._gone
            self.mailbox.close()
            self.mailbox.drain(gone)
            self.first_load_ended.set()

    async def _keep_running(self, run: Run) -> None:
        while not self.given_away:
            self._begun_s = trio.current_time()
            try:
                await run(self._loaded)
                return
            except Deposed as error:
                self.deposed = True
                self.mailbox.closed_for = self._gone
                self._report_deposed(error)
                return
            except NoOwner:
                self.given_away = True
                return
            except Exception as error:  # noqa: BLE001  # after any failure it is started again from disk
                pause_s = self._handle_crash(error)
            if self._closing.is_set() and (pause_s or not len(self.mailbox)):
                return  # no caller waits, and the write that failed would only have shortened the next load
            if pause_s:
                with trio.move_on_after(pause_s):
                    await self._closing.wait()

    def _loaded(self) -> None:
        self._backoff.reset()
        if not self._closing.is_set():
            self.mailbox.closed_for = None
        self.first_load_ended.set()
        self._report_loaded(trio.current_time() - self._begun_s)

    def _handle_crash(self, error: Exception) -> float:
        """Report a fall, and refuse requests if they would have to wait; return the pause before the next load."""
        pause_s = self._backoff.failed()
        log.error(
            "%s failed, loading it again",
            self._what,
            extra={**self._extra, "why": str(error), "failures": self._backoff.failures},
            exc_info=None if isinstance(error, PlainsongError) else error,
        )
        self._report_fall(error)
        self._refuse(error)
        self.first_load_ended.set()
        return pause_s

    @property
    def _gone(self) -> Callable[[], PlainsongError]:
        """Makes the error for requests once the actor has ended, or is about to."""
        return self._moved if self.is_elsewhere else _shutting_down

    # --- to be implemented by each kind of actor --------------------------------------------------

    @abstractmethod
    def _refuse(self, error: Exception) -> None:
        """Refuse requests until the actor is loaded again, after ``_backoff.failures`` falls since the last load."""

    @property
    @abstractmethod
    def _moved(self) -> Callable[[], NoOwner]:
        """Makes the error for requests that had no effect because another instance is now the owner.

        Not a bound method of this object: the mailbox stores it, and the reference cycle would keep both alive until
        the next collection.
        """

    @abstractmethod
    def _report_loaded(self, load_s: float) -> None:
        """Report a load that took ``load_s`` seconds."""

    @abstractmethod
    def _report_fall(self, error: Exception) -> None:
        """Report a fall."""

    @abstractmethod
    def _report_deposed(self, error: Deposed) -> None:
        """Report that another instance has claimed the rows."""
