"""Transactions of a client: as a block, as a function that is tried again after conflicts, and to look after."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from plainsong.aio.transaction import AsyncTransactionContext
from plainsong.aio.transactions import AsyncTransactions
from plainsong.protocol.errors import TransactionConflict
from plainsong.transactions.messages import DEFAULT_BUFFER_BYTES, DEFAULT_BUFFER_MESSAGES
from plainsong.transactions.retries import DEFAULT_RETRIES, Retries, pausing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from plainsong.aio.client import AsyncClient
    from plainsong.aio.shell import AsyncShell
    from plainsong.core.operations import Operations
    from plainsong.transactions.participants import AnyParticipant
    from plainsong.transactions.values import TransactionKind

T = TypeVar("T")


class AsyncTransacting:
    """What ``AsyncClient`` does in transactions."""

    _shell: AsyncShell
    _operations: Operations

    @property
    def transactions(self) -> AsyncTransactions:
        """The daemon's transaction service: to begin and end transactions by hand, and to look after all of them."""
        return AsyncTransactions(self._operations, self._shell)

    def transaction(
        self,
        participants: Iterable[AnyParticipant] = (),
        *,
        timeout_s: int | None = None,
        type: TransactionKind = "short",  # noqa: A002 - the service's word
        client_id: str | None = None,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        buffer_messages: int = DEFAULT_BUFFER_MESSAGES,
    ) -> AsyncTransactionContext:
        """A transaction, to be used in an ``async with`` block: committed at its end, undone when an exception leaves it.

        Args:
          participants: what takes part beside the messages (``AsyncTransactionAware``), in the order in which they
            are asked; messages always come last.
          timeout_s: a whole number of seconds after which it is invalid; None: the daemon's default, 30.
          type: ``"short"``, or ``"long"`` for what takes hours: it is not checked for conflicts as cheaply, and one
            that fails leaves a trace in the list of invalid transactions.
          client_id: who it is, for those who look at what is under way; None: this machine's name and the process.
          buffer_bytes, buffer_messages: so much is kept here until the commit; what is more is stored with the daemon.
        Raises:
          InvalidParameter: at once. The block raises as ``AsyncTransactionContext.start`` and ``finish`` do.
        """
        return AsyncTransactionContext(
            cast("AsyncClient", self),
            participants,
            timeout_s=timeout_s,
            type=type,
            client_id=client_id,
            buffer_bytes=buffer_bytes,
            buffer_messages=buffer_messages,
        )

    async def run_in_transaction(
        self,
        function: Callable[[AsyncTransactionContext], Awaitable[T]],
        *,
        retries: int = DEFAULT_RETRIES,
        participants: Iterable[AnyParticipant] = (),
        timeout_s: int | None = None,
        type: TransactionKind = "short",  # noqa: A002 - the service's word
        client_id: str | None = None,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        buffer_messages: int = DEFAULT_BUFFER_MESSAGES,
    ) -> T:
        """What ``function(transaction)`` returns, once its transaction is committed.

        After a conflict with another transaction it is undone and the function called again, in a new one, after a
        pause that doubles and is shortened at random. It reads the same messages again: positions have not moved.
        Nothing but a conflict is tried again.

        Args:
          retries: so many attempts after the first.
        Raises:
          TransactionConflict: every attempt met one. What the function raises, and what a transaction's block does.
        """
        attempts = Retries(retries, self._operations.random)
        taking_part = list(participants)
        while True:
            context = self.transaction(
                taking_part,
                timeout_s=timeout_s,
                type=type,
                client_id=client_id,
                buffer_bytes=buffer_bytes,
                buffer_messages=buffer_messages,
            )
            try:
                async with context as transaction:
                    result = await function(transaction)
            except TransactionConflict as conflict:
                pause_s = attempts.pause_s(conflict)
            else:
                return result
            await self._shell.run(pausing(pause_s))
