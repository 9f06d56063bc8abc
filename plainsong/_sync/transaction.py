# Written by scripts/unasync.py from plainsong/_async/transaction.py: change that, and run it (make sync).
"""The client's transaction coordinator: its participants, the order of their steps, and the handling of failures.

    begin → start_tx on each │ … the work … │ tx_changes → prepare → commit_tx on each → commit → post_tx_commit

A failure before the decision undoes the transaction: ``rollback_tx`` on every member, then ``abort`` at the service if all
returned True, else ``invalidate``. The coordinator raises the first failure, with the later ones in its notes. A failure
after the decision does not change it. If the answer to the commit is lost, the coordinator queries the service; only if
that fails too is the transaction in doubt, and then nothing is undone.

The order and the rules are Apache Tephra's, except that messages come last, and that a lost answer to a commit is
queried.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, overload

from plainsong import transactions as service
from plainsong._sync._backend import TaskLock, call_participant, shielded
from plainsong._sync.transaction_messages import UNDO_S, TransactionMessages, left_s
from plainsong.calls import waiting_for_service
from plainsong.errors import Closed, NoTransaction, TransactionFailed, TransactionInProgress
from plainsong.messages import PENDING, Receipt, as_list, outgoing_request
from plainsong.participants import METHODS
from plainsong.positions import OLDEST
from plainsong.protocol.errors import (
    InvalidParameter,
    NoMessages,
    PlainsongError,
    TransactionConflict,
    TransactionNotFound,
    TransactionNotInProgress,
)
from plainsong.transactions import (
    DEFAULT_BUFFER_BYTES,
    DEFAULT_BUFFER_MESSAGES,
    BufferBounds,
    Failures,
    check_free,
    default_client_id,
    enter,
    failure_of,
    in_doubt,
    leave,
    timed_out,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Self

    from plainsong._sync.read import Reader
    from plainsong._sync.retry import Channel
    from plainsong.messages import Bodies, Outgoing, Page
    from plainsong.participants import TransactionAware
    from plainsong.positions import Start
    from plainsong.serializers import SerializerLike, SerializerOf
    from plainsong.transactions import Entered, Transaction, TransactionKind, TransactionState

T = TypeVar("T")
V = TypeVar("V")

log = logging.getLogger("plainsong.transaction")

#: How long it may take to undo a transaction, or to find out its outcome.
INTERRUPTED_S = 30.0
#: How often to query the outcome of a commit: a commit may cross an invalidation once, not repeatedly.
MAX_QUESTIONS = 3


class Enlisted(Protocol):
    """A reader inside the transaction, whose position the transaction saves."""

    @property
    def transactional(self) -> bool:
        """True if the participants commit its position."""
        ...

    def settle(self) -> None:
        """Saves the position of the finished messages."""
        ...


class TransactionClient(Protocol):
    """The methods of its client that a transaction uses: an ``Client``."""

    @property
    def _channel(self) -> Channel: ...

    @property
    def namespace(self) -> str:
        """The namespace of all topics of this client."""
        ...

    def publish(self, topic: str, messages: Any = (), *args: Any, **options: Any) -> Receipt:
        """``Client.publish``."""
        ...

    def poll(self, topic: str, start: Start = OLDEST, *args: Any, **options: Any) -> Page[Any]:
        """``Client.poll``."""
        ...

    def read(self, topics: str | Iterable[str], start: Start = OLDEST, *args: Any, **options: Any) -> Reader[Any]:
        """``Client.read``."""
        ...


class Member:
    """Wraps a participant and checks its results."""

    def __init__(self, participant: TransactionAware) -> None:
        for method in METHODS:
            if not callable(getattr(participant, method, None)):
                raise InvalidParameter(
                    f"{type(participant).__name__} cannot take part in a transaction: it has no {method}",
                    hint="see plainsong.TransactionAware",
                )
        self.participant = participant

    @property
    def name(self) -> str:
        """Its own name, or its type's."""
        try:
            return str(self.participant.name)
        except Exception:  # noqa: BLE001 - the name is only for error texts
            return type(self.participant).__name__

    def start_tx(self, transaction: Transaction) -> None:
        """``participant.start_tx``."""
        call_participant(self.participant.start_tx, transaction)

    def update_tx(self, transaction: Transaction) -> None:
        """``participant.update_tx``."""
        call_participant(self.participant.update_tx, transaction)

    def tx_changes(self) -> Collection[bytes]:
        """``participant.tx_changes``; raises TypeError unless it returns a collection of bytes."""
        changes: Any = call_participant(self.participant.tx_changes)
        if isinstance(changes, (bytes, bytearray, str)) or not all(isinstance(each, bytes) for each in changes):
            raise TypeError("tx_changes must return a collection of bytes")
        return list(changes)

    def commit_tx(self) -> bool:
        """``participant.commit_tx``; anything but True is a failure."""
        return bool((call_participant(self.participant.commit_tx)) is True)

    def post_tx_commit(self) -> None:
        """``participant.post_tx_commit``."""
        call_participant(self.participant.post_tx_commit)

    def rollback_tx(self) -> bool:
        """``participant.rollback_tx``; anything but True is a failure."""
        return bool((call_participant(self.participant.rollback_tx)) is True)

    def abandon_tx(self) -> None:
        """``participant.abandon_tx``, if it has one."""
        abandon = getattr(self.participant, "abandon_tx", None)
        if abandon is not None:
            call_participant(abandon)


class TransactionContext:
    """Runs transactions one after the other with the same participants; made by ``Client.transaction``, which explains the options.

    A ``with`` block begins the transaction and commits it at its end; an exception undoes it and propagates.
    Inside, ``client.publish``, ``poll`` and ``read`` take part automatically. Without a block, ``start`` and ``finish``
    (or ``abort``) do the same by hand; then only the methods of this object take part.

    Several threads may call ``publish``; everything else belongs to one thread at a time.
    """

    def __init__(
        self,
        client: TransactionClient,
        participants: Iterable[TransactionAware] = (),
        *,
        timeout_s: int | None = None,
        type: TransactionKind = "short",  # noqa: A002 - the service's word
        client_id: str | None = None,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        buffer_messages: int = DEFAULT_BUFFER_MESSAGES,
    ) -> None:
        self.client = client
        self._channel: Channel = client._channel
        self._options = (type, timeout_s, client_id)
        self._messages = TransactionMessages(self._channel, BufferBounds(buffer_bytes, buffer_messages))
        once = {id(each): Member(each) for each in participants}
        self._participants = list(once.values())
        self._readers: list[Enlisted] = []
        self._under_way: Transaction | None = None
        #: True once the commit has been sent: an interruption must not undo from then on.
        self._deciding = False
        #: How the last one ended; None before the first, and while one is under way.
        self._state: TransactionState | None = None
        self._lock = TaskLock()
        self._entered: Entered | None = None

    def __repr__(self) -> str:
        transaction = self._under_way
        name = f"{transaction.id}, in progress" if transaction else self._state or "not begun"
        return f"<TransactionContext {name}>"

    # --- its state ------------------------------------------------------------------------------

    @property
    def transaction(self) -> Transaction:
        """The transaction under way. Raises NoTransaction."""
        return self._require("this")

    @property
    def state(self) -> TransactionState | None:
        """``in_progress``, or how the last one ended (``unknown``: in doubt); None before the first."""
        return "in_progress" if self._under_way is not None else self._state

    @property
    def remaining_s(self) -> float:
        """Seconds until the transaction under way times out. Raises NoTransaction."""
        return self.transaction.remaining_s

    @property
    def receipts(self) -> dict[str, list[Receipt]]:
        """Receipts by topic: one for the commit, and one for each checkpoint before it."""
        return self._messages.receipts

    # --- participants ---------------------------------------------------------------------------

    def add(self, participant: TransactionAware) -> None:
        """Adds a participant after the others and before the messages; inside a transaction, calls its ``start_tx``.

        Raises:
          InvalidParameter: it lacks a method. Any error of its ``start_tx``; it takes part nevertheless.
        """
        if any(each.participant is participant for each in self._participants):
            return
        member = Member(participant)
        self._participants.append(member)
        if self._under_way is not None:
            member.start_tx(self._under_way)

    def remove(self, participant: TransactionAware) -> bool:
        """Removes a participant; returns whether it was one. Raises TransactionInProgress during a transaction."""
        if self._under_way is not None:
            raise TransactionInProgress("participants cannot leave a transaction in progress")
        before = len(self._participants)
        self._participants = [each for each in self._participants if each.participant is not participant]
        return len(self._participants) < before

    # --- the steps ------------------------------------------------------------------------------

    def start(self) -> Transaction:
        """Begins a transaction.

        Raises:
          TransactionInProgress: one is under way. TransactionsUnavailable, ConnectFailed, and other errors of the
            service. An error of a participant, or a TransactionFailed around it; the transaction was aborted.
        """
        return self._run_step(self._start)

    def finish(self) -> None:
        """Commits; ``docs/client.md`` lists everything that can happen.

        Raises:
          TransactionConflict, TransactionTooLarge, TransactionTimedOut, TransactionFailed, and every other error
            whose outcome is ``not-applied``: it was undone.
          CommittedWithErrors: it is committed. TransactionInDoubt: unknown. NoTransaction: there is none.
        """
        self._run_step(self._finish)

    def checkpoint(self) -> Transaction:
        """Persists the work so far, including messages, and continues under a new write pointer; readers see nothing yet.

        Raises:
          as ``finish`` does; the transaction was undone.
        """
        return self._run_step(self._checkpoint)

    def abort(self, cause: BaseException | None = None) -> TransactionState | None:
        """Undoes the transaction, if one is under way.

        Args:
          cause: the reason; failures of the undoing are added to its notes.
        Returns:
          ``aborted``, or ``invalid`` if not everything could be undone; None: there was nothing to abort.
        Raises:
          without a ``cause``, the first failure: TransactionFailed, or an error of the service.
        """
        with self._lock:
            return self._abort(cause)

    def _run_step(self, step: Callable[[], T]) -> T:
        """Runs a step that must not stay half done: an interruption first undoes the transaction, or completes its commit."""
        with self._lock:
            try:
                return step()
            except Exception:
                raise
            except BaseException:
                with shielded(INTERRUPTED_S) as scope:
                    self._interrupted()
                check_undone(scope)
                raise

    # --- messages --------------------------------------------------------------------------------

    @overload
    def publish(
        self, topic: str, messages: Bodies, *, ttl_s: int | None = None, serializer: None = None
    ) -> Receipt: ...
    @overload
    def publish(
        self,
        topic: str,
        messages: V | Outgoing | Iterable[V | Outgoing],
        *,
        ttl_s: int | None = None,
        serializer: SerializerOf[V],
    ) -> Receipt: ...
    def publish(
        self, topic: str, messages: Any, *, ttl_s: int | None = None, serializer: SerializerLike = None
    ) -> Receipt:
        """Publishes with the commit, in the order of the calls; the arguments are those of ``Client.publish``.

        Returns:
          a receipt without ids, which ``receipts`` has after the commit.
        Raises:
          NoTransaction, NotEncodable: nothing happened. A full buffer is stored with the daemon; after
            an error of that the transaction can only be undone.
        """
        request = outgoing_request(as_list(messages), serializer, ttl_s)
        with self._lock:
            transaction = self._require("publish")
            if self._messages.take(topic, request):
                self._spill(transaction)
        return Receipt(None, None, len(request.messages), PENDING)

    def _spill(self, transaction: Transaction) -> None:
        """Stores buffered messages with the daemon. Raises the same as ``Client.store``."""
        try:
            self._messages.spill()
        except PlainsongError as error:
            late = timed_out(transaction, error)
            if late is None:
                raise
            raise late from error

    def poll(self, topic: str, start: Start = OLDEST, **options: Any) -> Page[Any]:
        """``Client.poll`` with the transaction's snapshot."""
        return self.client.poll(topic, start, transaction=self.transaction, **options)

    def read(self, topics: str | Iterable[str], start: Start = OLDEST, **options: Any) -> Reader[Any]:
        """``Client.read`` with the transaction's snapshot; the end of the transaction saves the ``position``."""
        entered = enter(self)
        try:
            return self.client.read(topics, start, **options)
        finally:
            leave(entered)

    # --- as a block ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        check_free(self)
        self.start()
        self._entered = enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            leave(entered)
        if self._under_way is None:
            return  # ended by ``abort``
        if error is None:
            self.finish()
        else:
            with shielded(INTERRUPTED_S) as scope:
                self.abort(error)
            check_undone(scope)

    # --- start -----------------------------------------------------------------------------------

    def _require(self, what: str) -> Transaction:
        """The transaction under way. Raises NoTransaction."""
        if self._under_way is None:
            ended = "none was begun" if self._state is None else f"the last one is {self._state.replace('_', ' ')}"
            raise NoTransaction(
                f"{what} needs a transaction, and {ended}", hint=("direct=True works outside of any transaction")
            )
        return self._under_way

    @property
    def _members(self) -> list[Member | TransactionMessages]:
        return [*self._participants, self._messages]

    def _enlist(self, reader: Enlisted) -> None:
        """Adds a reader, whose position the end of the transaction saves."""
        self._readers.append(reader)

    def _start(self) -> Transaction:
        """Begins at the service, then starts each member."""
        if self._under_way is not None:
            raise TransactionInProgress(
                f"transaction {self._under_way.id} is in progress", hint="finish or abort it first"
            )
        transaction = begun(self._channel, *self._options)
        self._under_way, self._deciding, self._state, self._readers = transaction, False, None, []
        started: list[Member] = []
        for member in self._members:
            try:
                member.start_tx(transaction)
            except Exception as error:  # noqa: BLE001 - raised after the abort
                self._not_started(transaction, started, member.name, error)
            if isinstance(member, Member):
                started.append(member)
        return transaction

    def _not_started(self, transaction: Transaction, started: list[Member], name: str, error: Exception) -> NoReturn:
        """Aborts without rolling back, since nothing was done. Raises the failed start, or the abort's own error."""
        self._under_way, self._state = None, "aborted"
        raised = failure_of(transaction, f"starting {name}", error)
        for member in started:
            try:
                member.abandon_tx()
            except Exception as failed:  # noqa: BLE001 - the failed start is raised instead
                raised.add_note(f"{member.name} did not finish its part: {failed!r}")
        try:
            self._state = self._channel.call(service.abort(transaction.id), self._undo_s)
        except PlainsongError as failed:
            failed.add_note(f"after {name} had failed to start: {error!r}")
            raise failed from error
        raise raised

    # --- finish ------------------------------------------------------------------------------------

    def _finish(self) -> None:
        transaction = self._require("finish")
        failures = Failures("saving positions")
        try:
            self._save_positions(transactional=True)
            changes = self._changes(failures)
            if changes:
                failures.doing = "detecting conflicts"
                call = waiting_for_service(service.prepare(transaction.id, changes))
                self._channel.call(call, left_s(self._channel, transaction))
            self._persist(failures)
        except Exception as error:  # noqa: BLE001 - raised after the undoing
            self._fail(failures, error)
        self._decide(transaction)
        self._after_commit(transaction)

    def _changes(self, failures: Failures) -> list[bytes]:
        union: dict[bytes, None] = {}
        for member in self._members:
            failures.doing = f"collecting the changes of {member.name}"
            union.update(dict.fromkeys(member.tx_changes()))
        return list(union)

    def _persist(self, failures: Failures) -> None:
        for member in self._members:
            failures.doing = f"persisting {member.name}"
            if not (member.commit_tx()):
                raise TransactionFailed(f"{failures.doing}: commit_tx did not return True")

    def _decide(self, transaction: Transaction) -> None:
        failures = Failures("committing")
        self._deciding = True
        try:
            self._committed(transaction)
        except PlainsongError as error:
            if error.outcome == "unknown":
                self._under_way, self._state = None, "unknown"
                raise
            self._fail(failures, error)
        self._under_way, self._deciding, self._state = None, False, "committed"

    def _committed(self, transaction: Transaction) -> None:
        """Commits, and returns when that is certain.

        Raises:
          PlainsongError: with the outcome ``not-applied``: it is certainly not committed, and this request can no longer
            commit it. TransactionInDoubt: unknown.
        """
        try:
            self._channel.call(waiting_for_service(service.commit(transaction.id)))
        except (TransactionNotInProgress, TransactionConflict) as error:
            # A repeated commit gets the first one's answer, so no earlier attempt committed either.
            error.outcome = "not-applied"
            raise
        except Exception as error:
            # Closed by another thread: the request may have left.
            if isinstance(error, PlainsongError) and error.outcome == "not-applied" and not isinstance(error, Closed):
                raise
            self._find_out(transaction, error)

    def _find_out(self, transaction: Transaction, error: Exception) -> None:
        """Finds out the outcome of a commit without an answer."""
        channel = self._channel
        state: TransactionState = "unknown"
        for _ in range(MAX_QUESTIONS):
            try:
                state = (channel.call(waiting_for_service(service.get(transaction.id)))).state
                if state == "in_progress":
                    # The commit may still arrive: invalidate, so that it cannot take effect.
                    state = channel.call(waiting_for_service(service.invalidate(transaction.id)))
                break
            except TransactionNotInProgress:
                continue  # the transaction was decided between the two requests
            except PlainsongError as failed:
                raise in_doubt(transaction, f"the transaction service cannot be reached: {failed.detail}") from error
        if state == "committed":
            return
        if state in ("aborted", "invalid"):
            raise TransactionFailed(f"the commit of transaction {transaction.id} failed: it is {state}") from error
        raise in_doubt(transaction, f"the service calls it {state.replace('_', ' ')}") from error

    def _after_commit(self, transaction: Transaction) -> None:
        """Calls every member and saves positions, even if some of them fail."""
        failures = Failures("after the commit")
        steps: list[tuple[str, Callable[[], None]]] = [
            (f"after the commit: {member.name}", member.post_tx_commit) for member in self._members
        ]
        steps.append(("saving positions", lambda: self._save_positions(transactional=False)))
        for doing, step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - raised at the end
                failures.add(doing, error)
        self._readers = []
        if failures.errors:
            raise failures.after_commit(transaction)

    def _save_positions(self, *, transactional: bool) -> None:
        for reader in self._readers:
            if reader.transactional is transactional:
                reader.settle()

    # --- checkpoint, and the way back ---------------------------------------------------------------

    def _checkpoint(self) -> Transaction:
        transaction = self._require("checkpoint")
        failures = Failures()
        try:
            self._persist(failures)
            failures.doing = "creating a checkpoint"
            call = waiting_for_service(service.checkpoint(transaction))
            transaction = self._channel.call(call, left_s(self._channel, transaction))
            self._under_way = transaction
            for member in self._members:
                failures.doing = f"updating {member.name}"
                member.update_tx(transaction)
        except Exception as error:  # noqa: BLE001 - raised after the undoing
            self._fail(failures, error)
        return transaction

    def _interrupted(self) -> None:
        """Ends an interrupted step: undoes, or completes a commit that was sent. Logs errors instead of raising."""
        transaction = self._under_way
        if transaction is None:
            return
        if self._deciding:
            try:
                self._decide(transaction)
            except PlainsongError as error:
                log.warning("transaction %d, after an interruption: %s", transaction.id, error.detail)
                return
            try:
                self._after_commit(transaction)
            except PlainsongError as error:
                log.warning("transaction %d is committed: %s", transaction.id, error.detail)
            return
        failures = Failures("aborting")
        self._undo(transaction, failures)
        for failed in failures.errors:
            log.warning("transaction %d, after an interruption: %r", transaction.id, failed)

    def _abort(self, cause: BaseException | None = None) -> TransactionState | None:
        if self._under_way is None:
            return None
        failures = Failures("aborting")
        transaction = self._under_way
        self._undo(transaction, failures)
        if cause is not None:
            failures.add_notes_to(cause, self._state)
        elif failures.errors:
            raised = failure_of(transaction, failures.doing, failures.errors[0])
            failures.without_first().add_notes_to(raised, self._state)
            raise raised
        return self._state

    def _fail(self, failures: Failures, error: Exception) -> NoReturn:
        """Undoes the transaction and raises the first failure."""
        transaction = self._under_way
        assert transaction is not None
        raised = failure_of(transaction, failures.doing, error)
        later = Failures("aborting")
        self._undo(transaction, later)
        later.add_notes_to(raised, self._state)
        raise raised

    def _undo(self, transaction: Transaction, failures: Failures) -> None:
        """``rollback_tx`` on every member, then the service's decision; failures are collected, not raised."""
        clean = True
        for member in self._members:
            try:
                if not (member.rollback_tx()):
                    clean = False
                    failures.notes.append(f"{member.name} did not roll back: rollback_tx did not return True")
            except Exception as error:  # noqa: BLE001 - the other members must be rolled back too
                clean = False
                failures.add(f"rolling back {member.name}", error)
        self._under_way, self._deciding, self._readers = None, False, []
        self._state = "aborted" if clean else "invalid"
        call = service.abort(transaction.id) if clean else service.invalidate(transaction.id)
        try:
            self._state = self._channel.call(waiting_for_service(call), self._undo_s)
        except PlainsongError as error:
            gone = isinstance(error, (TransactionNotFound, TransactionNotInProgress))
            failures.add(
                "aborting at the service" if gone else "aborting at the service; the transaction ends at its time-out",
                error,
            )

    @property
    def _undo_s(self) -> float:
        return min(self._channel.settings.deadline_s, UNDO_S)


def check_undone(scope: Any) -> None:
    """Logs a warning if the time for undoing was over."""
    if scope is not None and scope.cancelled_caught:
        log.warning("a transaction could not be undone within %g s; it ends at its time-out", INTERRUPTED_S)


def begun(channel: Channel, kind: TransactionKind, timeout_s: int | None, client_id: str | None) -> Transaction:
    """Begins a transaction; its time counts from the sending of the request, never later than at the service."""
    clock = channel.clock
    sent_s = clock()

    def note() -> None:
        nonlocal sent_s
        sent_s = clock()

    name = default_client_id() if client_id is None else client_id
    transaction = channel.call(service.begin(kind, timeout_s, name, clock), on_send=note)
    return replace(transaction, begun_s=sent_s)


def publish_in_one(
    client: TransactionClient, topic: str, messages: Any, *, ttl_s: int | None, serializer: SerializerLike
) -> Receipt:
    """Publishes in a separate transaction. Raises the same as a commit."""
    if not as_list(messages):
        raise NoMessages("the list is empty")
    context = TransactionContext(client)
    context.start()
    try:
        context.publish(topic, messages, ttl_s=ttl_s, serializer=serializer)
    except BaseException as error:
        with shielded(INTERRUPTED_S) as scope:
            context.abort(error)
        check_undone(scope)
        raise
    context.finish()
    return context.receipts[topic][-1]
