"""The actor: the one writer of some rows, which decides requests in turn and answers once they are durable.

    load ──► wait ──► step ──► commit ──► settle ──► wait …
      ▲                          │
      └────────── fall ◄─────────┘ the store failed, or another owner has come

*wait* for requests or the nearest deadline; *step*: the core decides, without waiting; *commit*: make its rows durable;
*settle*: only then give the answers. While a commit is written requests gather, and the next one carries them all:
that is the group commit. Where other instances may claim the rows, a turn that answers without writing asks the store
whether the claim still holds: one check for all that gathered.

An actor that falls tells every request under way what is known of its outcome, and ends. ``Supervision`` starts it
again from disk: recovery and the first start are the same code. After another owner has come it stays down.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import trio

from actors.mailbox import Turns
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import NoOwner, PlainsongError, ShuttingDown
from storage.base import BeginsWrites, Deposed, NothingWritten

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence

    from actors.mailbox import Mailbox, Ticket
    from plainsong.protocol.effects import Ask, Operation
    from storage.base import Claim, Store

    Answers = list[tuple[Hashable, object | PlainsongError]]
    #: An actor's ``run``.
    Run = Callable[[Callable[[], None]], Awaitable[None]]


log = logging.getLogger(__name__)
#: Pauses after a fall: it is loaded again at once, then with growing pauses; the last one repeats.
RESTART_PAUSES_S = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0)


class Core(Protocol):
    """The rules and their state; each actor knows the rest of its core's interface."""

    def next_deadline_s(self) -> float | None:
        """When a step is due although no request has arrived."""
        ...


class Step(Protocol):
    """What one step of a core decided."""

    @property
    def answers(self) -> Answers:
        """Each ticket and its answer."""
        ...


CoreT = TypeVar("CoreT", bound=Core)
StepT = TypeVar("StepT", bound=Step)


@dataclass(slots=True, eq=False)
class _Turn(Generic[StepT]):
    """One turn of an actor, as far as it has come."""

    tickets: Sequence[Ticket[Any]]
    step: StepT | None = None
    operations: Sequence[Operation] = ()
    answers: Answers = field(default_factory=list)
    is_prepared: bool = False
    """Whether the core is as it is behind the commit; ``error`` says what went wrong with that."""
    error: Exception | None = None


class Actor(ABC, Generic[CoreT, StepT]):
    """Owns a core; other tasks use the mailbox, or read the core between two turns."""

    #: Requests that change nothing, so that a failed commit cannot leave their outcome unknown.
    reads: ClassVar[tuple[type[Ask[Any]], ...]]

    def __init__(
        self, store: Store, mailbox: Mailbox, *, commit_requests: int, commit_bytes: int, turns: Turns | None = None
    ) -> None:
        """``commit_requests``, ``commit_bytes``: a commit takes no more beyond either; ``turns``: where it says so."""
        self._store = store
        self._shared = store.traits.shared
        self._mailbox = mailbox
        self._commit_requests = commit_requests
        self._commit_bytes = commit_bytes
        self._begin_commit = store.begin if isinstance(store, BeginsWrites) else None
        self._turns = turns or Turns()
        self._in_turn = False
        #: Set when a turn without the task ends; None: nobody waits for that.
        self._over: trio.Event | None = None
        #: Whether what waits now is for such a turn.
        self._turn_is_due = False
        #: What such a turn failed of.
        self._failure: Exception | None = None
        #: What the task sleeps until.
        self._deadline_s: float | None = None
        #: None while loading, and after the end.
        self.core: CoreT | None = None
        self.claim: Claim | None = None

    async def run(self, on_loaded: Callable[[], None] = lambda: None) -> None:
        """Claim, load, then serve the mailbox until it is closed and empty; call ``on_loaded`` before the first turn.

        Raises what the store raises, after every request under way has been told. Deposed: another owner has come.
        """
        core, claim = await self._load()
        self.core, self.claim, self._failure = core, claim, None
        error: Callable[[], PlainsongError] = self._fallen
        try:
            self._begin(core, claim)
            on_loaded()
            self._have_first_turn()
            while True:
                try:
                    tickets = await self._wait(core)
                except trio.EndOfChannel:
                    await self._close(core, claim)
                    return
                await self._turn(core, claim, self._ready(core, tickets))
                del tickets  # they are large, and the next wait may be long
        except Deposed:
            error = self._moved
            raise
        finally:
            await self._turn_over()
            self.core = self.claim = None
            self._end(core, error)

    def _have_first_turn(self) -> None:
        """Have the requests that waited for the load taken without the task, with those of other actors in one commit."""
        if self._begin_commit is not None and self._turns.are_run and len(self._mailbox):
            self._turn_is_due = True
            self._turns.wake_for(self)

    async def _wait(self, core: CoreT) -> Sequence[Ticket[Any]]:
        """The requests that have arrived; none when a deadline has come, or a turn that was due has been taken."""
        self._deadline_s = core.next_deadline_s()
        is_due, self._turn_is_due = self._turn_is_due, False
        await self._mailbox.wait(self._deadline_s, turn_is_due=is_due)
        await self._turn_over()
        if self._failure is not None:
            raise self._failure
        return self._mailbox.take(self._commit_requests, self._commit_bytes)

    async def _turn(self, core: CoreT, claim: Claim, tickets: Sequence[Ticket[Any]]) -> None:
        """One step and, if it has rows to write, one commit; then, and only then, the answers."""
        self._in_turn = True
        turn: _Turn[StepT] = _Turn(tickets)
        try:
            step = self._decide(core, turn)
            if turn.operations:
                await self._write(claim, step, turn.operations)
                self._committed(core, step)
            turn.answers = self._settled(core, step)
            if self._shared and turn.answers and not turn.operations:
                await self._store.check(claim)
        except BaseException as error:
            self._turn_fails(turn, error)
            raise
        finally:
            self._in_turn = False
        self._settle(core, step, turn.answers)

    async def _write(self, claim: Claim, step: StepT, operations: Sequence[Operation]) -> None:
        self._commit_begins(step)
        try:
            await self._store.write(operations, claim=claim)
        finally:
            self._commit_ends(step)

    def _decide(self, core: CoreT, turn: _Turn[StepT]) -> StepT:
        step = turn.step = self._step(core, turn.tickets)
        turn.operations = self._operations(core, step)
        return step

    def _turn_fails(self, turn: _Turn[StepT], error: BaseException) -> None:
        tickets = [*turn.tickets, *(as_ticket(ticket) for ticket, _ in turn.answers)]
        self._fail(tickets, turn.step, turn.operations, error)

    # --- a turn without the task ------------------------------------------------------------------
    #
    # Whoever brings mail may have the turn taken on the spot, while the task sleeps: a store that takes a commit without
    # a task says later, on the event loop, what became of it. That spares the loop four turns for each commit.

    def turn_now(self) -> None:
        """Take a turn for the mail that waits, if the task sleeps and the store allows it; else it is the task's."""
        core = self.core
        if self._in_turn:
            return  # what follows this turn sees the mail
        if core is None or self._begin_commit is None or not self._mailbox.is_waited_for:
            self._mailbox.wake()
            return
        turn: _Turn[StepT] = _Turn(())
        self._in_turn = self._mailbox.held = True
        try:
            turn.tickets = self._mailbox.take(self._commit_requests, self._commit_bytes)
            turn.tickets = self._ready(core, turn.tickets)
            step = self._decide(core, turn)
            if turn.operations:
                self._commit_begins(step)
                try:
                    self._begin_commit(
                        turn.operations,
                        partial(self._written, core, turn, step),
                        partial(self._prepare, core, turn, step),
                    )
                except BaseException:
                    self._commit_ends(step)
                    raise
                return
            turn.answers = self._settled(core, step)
        except (Exception, trio.EndOfChannel) as error:  # noqa: BLE001  # raised again, in the task
            self._fall(turn, error)
            return
        self._end_turn(core, turn, step)

    def _prepare(self, core: CoreT, turn: _Turn[StepT], step: StepT) -> None:
        """Go on as if the commit of such a turn were durable, while the disk works; nobody is told."""
        turn.is_prepared = True
        try:
            self._go_on(core, turn, step)
            for ticket, answer in turn.answers:
                as_ticket(ticket).prepare(answer)
        except Exception as error:  # noqa: BLE001  # raised again once the commit is settled
            turn.error = error

    def _go_on(self, core: CoreT, turn: _Turn[StepT], step: StepT) -> None:
        self._committed(core, step)
        turn.answers = self._settled(core, step)

    def _written(self, core: CoreT, turn: _Turn[StepT], step: StepT, failed: PlainsongError | None) -> None:
        """What became of the commit of such a turn."""
        try:
            self._commit_ends(step)
            if failed is not None:
                raise failed
            if turn.error is not None:
                raise turn.error
            if not turn.is_prepared:
                self._go_on(core, turn, step)
        except Exception as error:  # noqa: BLE001  # raised again, in the task
            self._fall(turn, error)
            return
        self._end_turn(core, turn, step)

    def _end_turn(self, core: CoreT, turn: _Turn[StepT], step: StepT) -> None:
        self._leave_turn()
        deadline_s = core.next_deadline_s()
        if deadline_s is not None and (self._deadline_s is None or deadline_s < self._deadline_s):
            self._mailbox.wake()
        elif len(self._mailbox):
            self._turns.soon(self)
        try:
            # The next commit begins before these answers take their time: the disk waits for nobody.
            self._turns.run()
        finally:
            self._settle(core, step, turn.answers)

    def _fall(self, turn: _Turn[StepT], error: Exception) -> None:
        """Such a turn failed: its requests are told, and the task raises the error."""
        self._turn_fails(turn, error)
        self._failure = error
        if turn.is_prepared:
            self.core = None  # nobody may read in it what is not durable, until the task has noticed
        self._leave_turn()
        self._mailbox.wake()

    def _leave_turn(self) -> None:
        self._in_turn = self._mailbox.held = False
        if self._over is not None:
            self._over.set()

    async def _turn_over(self) -> None:
        """Wait until no turn is under way without the task; not to be cancelled, since its commit may happen."""
        if self._in_turn:  # seldom, and a scope costs more than all else here
            with trio.CancelScope(shield=True):
                while self._in_turn:
                    self._over = trio.Event()
                    await self._over.wait()
        self._over = None

    def _fail(
        self,
        tickets: Iterable[Ticket[Any]],
        step: StepT | None,
        operations: Sequence[Operation],
        error: BaseException,
    ) -> None:
        """Tell each request of a turn that failed whether it is certain that nothing happened.

        What the core refused was refused; but where other instances may own the rows by now, a refusal may rest on
        rows that are not current, and is not given.
        """
        refusals = [
            (as_ticket(ticket), answer)
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

    # --- each actor's own -------------------------------------------------------------------------

    @abstractmethod
    async def _load(self) -> tuple[CoreT, Claim]:
        """Claim the rows, then load the core from them."""

    @abstractmethod
    def _begin(self, core: CoreT, claim: Claim) -> None:
        """Prepare what the turns need."""

    @abstractmethod
    def _ready(self, core: CoreT, tickets: Sequence[Ticket[Any]]) -> Sequence[Ticket[Any]]:
        """The tickets for the step that follows; nothing runs in between."""

    @abstractmethod
    def _step(self, core: CoreT, tickets: Sequence[Ticket[Any]]) -> StepT:
        """Let the core decide."""

    @abstractmethod
    def _operations(self, core: CoreT, step: StepT) -> Sequence[Operation]:
        """The rows to write; empty if the step changes nothing on disk."""

    @abstractmethod
    def _commit_begins(self, step: StepT) -> None:
        """The operations of the step are about to be written."""

    @abstractmethod
    def _commit_ends(self, step: StepT) -> None:
        """They were written, or not."""

    @abstractmethod
    def _committed(self, core: CoreT, step: StepT) -> None:
        """They are durable, or will be before anybody looks."""

    @abstractmethod
    def _settled(self, core: CoreT, step: StepT) -> Answers:
        """Let the core know that the step is durable, or will be before anybody looks; returns the answers, true then."""

    @abstractmethod
    def _settle(self, core: CoreT, step: StepT, answers: Answers) -> None:
        """Give the answers, and report the step."""

    @abstractmethod
    async def _close(self, core: CoreT, claim: Claim) -> None:
        """The mailbox is closed and empty: answer what waits inside, and write what makes the next load shorter."""

    @abstractmethod
    def _end(self, core: CoreT, error: Callable[[], PlainsongError]) -> None:
        """Settle what still waits inside, with ``error`` where nothing happened, and undo what ``_begin`` did."""

    @abstractmethod
    def _moved(self) -> NoOwner:
        """Another instance is the owner now; nothing happened."""

    @abstractmethod
    def _fallen(self) -> PlainsongError:
        """The actor fell or ends while the request waits inside it; nothing happened."""

    @abstractmethod
    def _unavailable(self, why: str) -> PlainsongError:
        """The store failed; nothing happened."""

    @abstractmethod
    def _outcome_unknown(self, why: str) -> PlainsongError:
        """The commit failed, and may have happened."""


def as_ticket(ticket: Hashable) -> Ticket[Any]:
    """The ticket that a core was given, and gives back with its answer."""
    return ticket  # type: ignore[return-value]  # a core knows it as a Hashable


def settle_all(answers: Answers) -> None:
    """Give each ticket its answer."""
    for ticket, answer in answers:
        as_ticket(ticket).settle(answer)


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("the daemon is shutting down")


class Supervision(ABC):
    """Keeps an actor running until its mailbox is closed or another owner has come.

    An actor that falls is started again from disk, at once and then with growing pauses.
    """

    def __init__(self, mailbox: Mailbox, what: str, extra: Mapping[str, str] | None = None) -> None:
        """``what``, ``extra``: how the log names the actor."""
        self.mailbox = mailbox
        #: Set once the actor was loaded, could not be, or is not going to be.
        self.first_load_ended = trio.Event()
        #: The store has said that another instance has claimed the rows.
        self.deposed = False
        #: Another instance is to own the rows.
        self.given_away = False
        self._what = what
        self._extra = dict(extra or {})
        self._closing = trio.Event()
        self._backoff = Backoff(RESTART_PAUSES_S)
        self._begun_s = 0.0

    @property
    def is_elsewhere(self) -> bool:
        """Whether another instance owns the rows, or is to own them."""
        return self.deposed or self.given_away

    def close(self, *, given_away: bool = False) -> None:
        """Refuse new requests; the actor serves those that wait, then ends.

        Args:
          given_away: another instance is to own the rows. An actor that has fallen does not claim them again: requests
            that wait are told that it moved.
        """
        self.given_away |= given_away
        self._closing.set()
        self.mailbox.closed_for = self._gone
        self.mailbox.close()

    async def _supervise(self, run: Run, after: trio.Event | None = None) -> None:
        """Run the actor until it returns; when this ends, nothing waits in the mailbox.

        Args:
          after: set once the previous actor of the same rows has ended: never two at once.
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
            except Exception as error:  # noqa: BLE001  # whatever made it fall, it is started again from disk
                pause_s = self._fell(error)
            if self._closing.is_set() and (pause_s or not len(self.mailbox)):
                return  # no caller waits; what could not be written at the end costs the next load time, no more
            if pause_s:
                with trio.move_on_after(pause_s):
                    await self._closing.wait()

    def _loaded(self) -> None:
        self._backoff.reset()
        if not self._closing.is_set():
            self.mailbox.closed_for = None
        self.first_load_ended.set()
        self._report_loaded(trio.current_time() - self._begun_s)

    def _fell(self, error: Exception) -> float:
        """Report a fall, and refuse requests if they would have to wait; returns the pause before the next load."""
        pause_s = self._backoff.failed()
        log.error(
            "%s fell, loading it again",
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

    # --- each kind of actor's own -----------------------------------------------------------------

    @abstractmethod
    def _refuse(self, error: Exception) -> None:
        """The actor fell, ``_backoff.failures`` times since the last load: refuse requests until it is loaded."""

    @property
    @abstractmethod
    def _moved(self) -> Callable[[], NoOwner]:
        """Makes the error that says: another instance is the owner now; nothing happened.

        The mailbox keeps it, so it is no method of this object: each would wait with the other for the garbage collector.
        """

    @abstractmethod
    def _report_loaded(self, load_s: float) -> None:
        """The actor was loaded, in ``load_s`` seconds."""

    @abstractmethod
    def _report_fall(self, error: Exception) -> None:
        """The actor fell."""

    @abstractmethod
    def _report_deposed(self, error: Deposed) -> None:
        """The store said that another instance has claimed the rows."""
