"""A transaction in the hands of a task: an asynchronous block that commits at its end, or start and finish by hand."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from plainsong.core.operations import outgoing_request
from plainsong.messages import PENDING, Receipt
from plainsong.protocol.errors import NoMessages
from plainsong.starts import OLDEST
from plainsong.transactions import current
from plainsong.transactions.course import Course
from plainsong.transactions.messages import DEFAULT_BUFFER_BYTES, DEFAULT_BUFFER_MESSAGES, Bounds
from plainsong.transactions.requests import as_list

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable
    from typing import Self

    from plainsong.aio.client import AsyncClient
    from plainsong.aio.reader import AsyncReader
    from plainsong.core.effects import Steps
    from plainsong.messages import Page
    from plainsong.serializers import SerializerLike
    from plainsong.starts import Start
    from plainsong.transactions.participants import AnyParticipant
    from plainsong.transactions.values import Transaction, TransactionKind, TransactionState

T = TypeVar("T")

log = logging.getLogger("plainsong.transaction")

#: How long a cancelled task may take to undo its transaction, or to hear what became of it.
INTERRUPTED_S = 30.0


class AsyncTransactionContext:
    """Transactions one after the other, with the same participants; made by ``AsyncClient.transaction``, which explains the options.

    In an ``async with`` block the transaction begins with the block and is committed at its end; an exception undoes it
    and goes on. Inside, ``client.publish``, ``poll`` and ``read`` take part by themselves. Without a block, ``start``
    and ``finish`` (or ``abort``) do the same by hand; then only the methods of this object take part.

    ``publish`` may be called from several tasks; everything else belongs to one task at a time. A task that is cancelled
    inside the block leaves the transaction undone; in the middle of the commit, the commit is brought to its end.
    """

    def __init__(
        self,
        client: AsyncClient,
        participants: Iterable[AnyParticipant] = (),
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
        self._lock = anyio.Lock()
        self._holder: int | None = None
        self._entered: current.Entered | None = None

    def __repr__(self) -> str:
        transaction = self.course.transaction
        name = f"{transaction.id}, in progress" if transaction else self.course.state or "not begun"
        return f"<AsyncTransactionContext {name}>"

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

    async def add(self, participant: AnyParticipant) -> None:
        """One more, after the others and before the messages; under way, its ``start_tx`` is called.

        Raises:
          InvalidParameter: it has not all methods. What its ``start_tx`` raises; it takes part nevertheless.
        """
        await self._run(self.course.add(participant))

    def remove(self, participant: AnyParticipant) -> bool:
        """Whether it was one of them. Raises TransactionInProgress while one is under way."""
        return self.course.remove(participant)

    # --- the course ------------------------------------------------------------------------------

    async def start(self) -> Transaction:
        """Begin one.

        Raises:
          TransactionInProgress: one is under way. TransactionsUnavailable, ConnectFailed, and whatever the service
            answers. An error of a participant, or a TransactionFailed around it; the transaction was aborted.
        """
        return await self._whole(self.course.start())

    async def finish(self) -> None:
        """Commit it; see ``docs/client.md`` for everything that can happen.

        Raises:
          TransactionConflict, TransactionTooLarge, TransactionTimedOut, TransactionFailed, and every other error
            whose outcome is ``not-applied``: it was undone.
          CommittedWithErrors: it is committed. TransactionInDoubt: nobody knows. NoTransaction: there is none.
        """
        await self._whole(self.course.finish())

    async def checkpoint(self) -> Transaction:
        """Persist what there is, messages too, and go on under a new write pointer; readers still see nothing.

        Raises:
          as ``finish`` does; the transaction was undone.
        """
        return await self._whole(self.course.checkpoint())

    async def abort(self, cause: BaseException | None = None) -> TransactionState | None:
        """Undo it; see ``Course.abort``. ``invalid`` says that not everything could be undone."""
        async with self._alone():
            return await self._run(self.course.abort(cause))

    async def _whole(self, steps: Steps[T]) -> T:
        """Run steps that must not stay half done: whatever interrupts them, a way out is taken first."""
        async with self._alone():
            try:
                return await self._run(steps)
            except Exception:
                raise
            except BaseException:
                await _whatever_happens(self._run(self.course.interrupted()))
                raise

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """One task at a time; what a participant does meanwhile, in the same task, belongs to it."""
        task = anyio.get_current_task().id
        if self._holder == task:
            yield
            return
        async with self._lock:
            self._holder = task
            try:
                yield
            finally:
                self._holder = None

    # --- messages --------------------------------------------------------------------------------

    async def publish(
        self, topic: str, messages: Any, *, ttl_s: int | None = None, serializer: SerializerLike = None
    ) -> Receipt:
        """Publish with the commit, in the order of the calls; the arguments are those of ``AsyncClient.publish``.

        Returns:
          a receipt without ids: nothing has been published yet (see ``receipts`` after the commit).
        Raises:
          NoTransaction, NotEncodable: nothing happened. When much has come together it is stored with the daemon,
            and what that raises means that the transaction can only be undone.
        """
        request = outgoing_request(as_list(messages), serializer, ttl_s)
        async with self._alone():
            if self.course.take(topic, request):
                await self._run(self.course.spill())
        return Receipt(None, None, len(request.messages), PENDING)

    async def poll(self, topic: str, start: Start = OLDEST, **options: Any) -> Page:
        """``AsyncClient.poll`` with the transaction's snapshot: what was committed before it began, and what is its own."""
        return await self.client.poll(topic, start, transaction=self.transaction, **options)

    def read(self, topics: str | Iterable[str], start: Start = OLDEST, **options: Any) -> AsyncReader:
        """``AsyncClient.read`` with the transaction's snapshot and, with a ``position``, as a part of it."""
        entered = current.enter(self)
        try:
            return self.client.read(topics, start, **options)
        finally:
            current.leave(entered)

    # --- as a block ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        current.check_free(self)
        await self.start()
        self._entered = current.enter(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            current.leave(entered)
        if self.course.transaction is None:
            return  # ended by hand
        if error is None:
            await self.finish()
        else:
            await _whatever_happens(self.abort(error))


async def _whatever_happens(work: Coroutine[Any, Any, object]) -> None:
    """Bring ``work`` to its end also in a cancelled task, within ``INTERRUPTED_S``."""
    with anyio.move_on_after(INTERRUPTED_S, shield=True) as scope:
        await work
    if scope.cancelled_caught:
        log.warning("a transaction could not be undone within %g s; it ends at its time-out", INTERRUPTED_S)


async def publish_in_one(
    client: AsyncClient, topic: str, messages: Any, *, ttl_s: int | None, serializer: SerializerLike
) -> Receipt:
    """Publish in a transaction of its own, and say where it went. Raises as the end of a transaction does."""
    if not as_list(messages):
        raise NoMessages("the list is empty")
    context = AsyncTransactionContext(client)
    await context.start()
    try:
        await context.publish(topic, messages, ttl_s=ttl_s, serializer=serializer)
    except BaseException as error:
        await _whatever_happens(context.abort(error))
        raise
    await context.finish()
    return context.receipts[topic][-1]
