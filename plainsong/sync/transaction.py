"""A transaction in the hands of a thread: a block that commits at its end, or start and finish by hand."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

from plainsong.core.operations import outgoing_request
from plainsong.messages import PENDING, Receipt
from plainsong.protocol.errors import NoMessages
from plainsong.starts import OLDEST
from plainsong.transactions import current
from plainsong.transactions.course import Course
from plainsong.transactions.messages import DEFAULT_BUFFER_BYTES, DEFAULT_BUFFER_MESSAGES, Bounds
from plainsong.transactions.requests import as_list

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from plainsong.core.effects import Steps
    from plainsong.messages import Page
    from plainsong.serializers import SerializerLike
    from plainsong.starts import Start
    from plainsong.sync.client import Client
    from plainsong.sync.reader import Reader
    from plainsong.transactions.participants import TransactionAware
    from plainsong.transactions.values import Transaction, TransactionKind, TransactionState

T = TypeVar("T")


class TransactionContext:
    """Transactions one after the other, with the same participants; made by ``Client.transaction``, which explains the options.

    In a ``with`` block the transaction begins with the block and is committed at its end; an exception undoes it
    and goes on. Inside, ``client.publish``, ``poll`` and ``read`` take part by themselves. Without a block, ``start``
    and ``finish`` (or ``abort``) do the same by hand; then only the methods of this object take part.

    ``publish`` may be called from several threads; everything else belongs to one thread at a time.
    """

    def __init__(
        self,
        client: Client,
        participants: Iterable[TransactionAware] = (),
        *,
        timeout_s: int | None = None,
        type: TransactionKind = "short",  # noqa: A002 - the service's word
        client_id: str | None = None,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        buffer_messages: int = DEFAULT_BUFFER_MESSAGES,
    ) -> None:
        bounds = Bounds(buffer_bytes, buffer_messages)
        self.client = client
        self.course = Course(
            client._operations, participants, bounds, kind=type, timeout_s=timeout_s, client_id=client_id
        )
        self._run = client._shell.run
        self._lock = threading.RLock()
        self._entered: current.Entered | None = None

    def __repr__(self) -> str:
        transaction = self.course.transaction
        name = f"{transaction.id}, in progress" if transaction else self.course.state or "not begun"
        return f"<TransactionContext {name}>"

    # --- what is known of it ---------------------------------------------------------------------

    @property
    def transaction(self) -> Transaction:
        """The transaction under way. Raises NoTransaction."""
        return self.course.needed("this")

    @property
    def state(self) -> TransactionState | None:
        """``in_progress``, or how the last one ended (``unknown``: in doubt); None before the first."""
        return "in_progress" if self.course.transaction is not None else self.course.state

    @property
    def remaining_s(self) -> float:
        """Seconds until the transaction under way times out. Raises NoTransaction."""
        return self.transaction.remaining_s

    @property
    def receipts(self) -> dict[str, list[Receipt]]:
        """What was published, by topic: one for each flush of its messages (the commit, and checkpoints before it)."""
        return self.course.messages.receipts

    # --- who takes part --------------------------------------------------------------------------

    def add(self, participant: TransactionAware) -> None:
        """One more, after the others and before the messages; under way, its ``start_tx`` is called.

        Raises:
          InvalidParameter: it has not all methods. What its ``start_tx`` raises; it takes part nevertheless.
        """
        self._run(self.course.add(participant))

    def remove(self, participant: TransactionAware) -> bool:
        """Whether it was one of them. Raises TransactionInProgress while one is under way."""
        return self.course.remove(participant)

    # --- the course ------------------------------------------------------------------------------

    def start(self) -> Transaction:
        """Begin one.

        Raises:
          TransactionInProgress: one is under way. TransactionsUnavailable, ConnectFailed, and whatever the service
            answers. An error of a participant, or a TransactionFailed around it; the transaction was aborted.
        """
        return self._whole(self.course.start())

    def finish(self) -> None:
        """Commit it; see ``docs/client.md`` for everything that can happen.

        Raises:
          TransactionConflict, TransactionTooLarge, TransactionTimedOut, TransactionFailed, and every other error
            whose outcome is ``not-applied``: it was undone.
          CommittedWithErrors: it is committed. TransactionInDoubt: nobody knows. NoTransaction: there is none.
        """
        self._whole(self.course.finish())

    def checkpoint(self) -> Transaction:
        """Persist what there is, messages too, and go on under a new write pointer; readers still see nothing.

        Raises:
          as ``finish`` does; the transaction was undone.
        """
        return self._whole(self.course.checkpoint())

    def abort(self, cause: BaseException | None = None) -> TransactionState | None:
        """Undo it; see ``Course.abort``. ``invalid`` says that not everything could be undone."""
        with self._lock:
            return self._run(self.course.abort(cause))

    def _whole(self, steps: Steps[T]) -> T:
        """Run steps that must not stay half done: whatever interrupts them, a way out is taken first."""
        with self._lock:
            try:
                return self._run(steps)
            except Exception:
                raise
            except BaseException:
                self._run(self.course.interrupted())
                raise

    # --- messages --------------------------------------------------------------------------------

    def publish(
        self, topic: str, messages: Any, *, ttl_s: int | None = None, serializer: SerializerLike = None
    ) -> Receipt:
        """Publish with the commit, in the order of the calls; the arguments are those of ``Client.publish``.

        Returns:
          a receipt without ids: nothing has been published yet (see ``receipts`` after the commit).
        Raises:
          NoTransaction, NotEncodable: nothing happened. When much has come together it is stored with the daemon,
            and what that raises means that the transaction can only be undone.
        """
        request = outgoing_request(as_list(messages), serializer, ttl_s)
        with self._lock:
            if self.course.take(topic, request):
                self._run(self.course.spill())
        return Receipt(None, None, len(request.messages), PENDING)

    def poll(self, topic: str, start: Start = OLDEST, **options: Any) -> Page:
        """``Client.poll`` with the transaction's snapshot: what was committed before it began, and what is its own."""
        return self.client.poll(topic, start, transaction=self.transaction, **options)

    def read(self, topics: str | Iterable[str], start: Start = OLDEST, **options: Any) -> Reader:
        """``Client.read`` with the transaction's snapshot and, with a ``position``, as a part of it."""
        entered = current.enter(self)
        try:
            return self.client.read(topics, start, **options)
        finally:
            current.leave(entered)

    # --- as a block ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        current.check_free(self)
        self.start()
        self._entered = current.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            current.leave(entered)
        if self.course.transaction is None:
            return  # ended by hand
        if error is None:
            self.finish()
        else:
            self.abort(error)


def publish_in_one(
    client: Client, topic: str, messages: Any, *, ttl_s: int | None, serializer: SerializerLike
) -> Receipt:
    """Publish in a transaction of its own, and say where it went. Raises as the end of a transaction does."""
    if not as_list(messages):
        raise NoMessages("the list is empty")
    context = TransactionContext(client)
    context.start()
    try:
        context.publish(topic, messages, ttl_s=ttl_s, serializer=serializer)
    except BaseException as error:
        context.abort(error)
        raise
    context.finish()
    return context.receipts[topic][-1]
