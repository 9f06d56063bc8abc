"""The daemon's transaction service: begin, decide, inspect and prune transactions by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from plainsong import transactions as service
from plainsong._async.transaction import begun

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from plainsong._async.retry import AsyncChannel
    from plainsong.protocol.answers.topics import EndReport
    from plainsong.transactions import Pruning, Transaction, TransactionKind, TransactionState, TransactionStatus


class AsyncTransactions:
    """``AsyncClient.transactions``. Methods take a ``Transaction`` or its id.

    Unlike ``AsyncClient.transaction``, they have no participants, and no block that ends the transaction. Every method
    raises TransactionsUnavailable if the daemon has no service, and errors of the connection.
    """

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel

    async def begin(
        self,
        *,
        timeout_s: int | None = None,
        type: TransactionKind = "short",  # noqa: A002 - the service's word
        client_id: str | None = None,
    ) -> Transaction:
        """Begins a transaction. Raises InvalidParameter, Overloaded: nothing happened."""
        return await begun(self._channel, type, timeout_s, client_id)

    async def prepare(self, transaction: Transaction | int, changes: Iterable[bytes]) -> None:
        """Checks its changed keys for conflicts. Replaces the keys given before.

        Raises:
          TransactionConflict: another transaction committed a change of the same key in between. TransactionTooLarge,
            TransactionNotInProgress, TransactionNotFound.
        """
        await self._channel.call(service.prepare(service.id_of(transaction), changes))

    async def commit(self, transaction: Transaction | int) -> TransactionState:
        """Commits. Idempotent while the service keeps the outcome.

        Raises:
          TransactionConflict, TransactionNotInProgress, TransactionNotFound: it is not committed.
          ConnectionLost, DeadlineExceeded: the outcome is unknown; call ``commit`` again, or ``get``.
        """
        return await self._channel.call(service.commit(service.id_of(transaction)))

    async def abort(self, transaction: Transaction | int) -> TransactionState:
        """Rolls back all its messages and ends it; ``invalid`` if some could not be rolled back, or it is long.

        Raises:
          TransactionNotInProgress: it is committed. TransactionNotFound.
        """
        return await self._channel.call(service.abort(service.id_of(transaction)))

    async def invalidate(self, transaction: Transaction | int) -> TransactionState:
        """Ends it at once; hides its messages from committed readers, and the daemon's cleaning rolls them back."""
        return await self._channel.call(service.invalidate(service.id_of(transaction)))

    async def end(self, transaction: Transaction | int, how: Literal["abort", "invalidate"] = "abort") -> EndReport:
        """Ends it like ``abort`` or ``invalidate``, for operators: returns also the effects on readers.

        Returns:
          ``state``, as those methods return it, and ``effect``: the ``topics`` with the number of messages that readers
          lose, and what it ``releases``. To count them, every topic of the transaction is asked.
        Raises:
          TransactionNotInProgress: it is committed, or rolled back and not to be invalidated. TransactionNotFound.
        """
        call = service.abort if how == "abort" else service.invalidate
        return await self._channel.call(service.ended(call(service.id_of(transaction))))

    async def checkpoint(self, transaction: Transaction) -> Transaction:
        """Returns the transaction with a new write pointer. Raises TransactionNotInProgress, TransactionNotFound."""
        return await self._channel.call(service.checkpoint(transaction))

    async def get(self, transaction: Transaction | int) -> TransactionStatus:
        """Returns its status; the state is ``unknown`` if the service does not know the id, or no longer knows it."""
        return await self._channel.call(service.get(service.id_of(transaction)))

    async def list(
        self,
        *,
        state: TransactionState | None = None,
        limit: int | None = None,
        after: Transaction | int | None = None,
    ) -> Sequence[TransactionStatus]:
        """Returns transactions in progress and invalid ones, oldest first; or those in one state.

        Args:
          limit: 1 000 at most; None: 100.
          after: the id of the last transaction of the previous page; None: the first page. A page with fewer than
            ``limit`` transactions is the last one.
        Raises:
          InvalidParameter.
        """
        return await self._channel.call(service.list_all(state, limit, None if after is None else service.id_of(after)))

    async def truncate(self, ids: Collection[int] | None = None, *, before_ms: int | None = None) -> int:
        """Removes transactions from the list of invalid ones. Only safe when all their messages are rolled back.

        The daemon does this by itself once they have no messages left; ``pruning`` says why it has not done so.

        Returns:
          the number of transactions that were removed from the list.

        Args:
          ids: these transactions.
          before_ms: all that were begun before this time of the daemon's clock. Exactly one of the two is given.
        """
        return await self._channel.call(service.truncate(ids, before_ms))

    async def pruning(self) -> Pruning:
        """Returns the figures that are needed for pruning by hand."""
        return await self._channel.call(service.pruning())
