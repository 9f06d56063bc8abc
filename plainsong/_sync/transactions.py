# Written by scripts/unasync.py from plainsong/_async/transactions.py: change that, and run it (make sync).
"""The daemon's transaction service by hand: begin, decide, look into, and take off the list of invalid ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong import transactions as service
from plainsong._sync.transaction import begun

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from plainsong._sync.retry import Channel
    from plainsong.transactions import Pruning, Transaction, TransactionKind, TransactionState, TransactionStatus


class Transactions:
    """``Client.transactions``. Where a transaction is meant, its ``Transaction`` or its id will do.

    Nothing here tells participants, or takes part in blocks: that is for ``Client.transaction``. Every method raises
    TransactionsUnavailable where the daemon has no service, and what goes wrong on the way.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def begin(
        self,
        *,
        timeout_s: int | None = None,
        type: TransactionKind = "short",  # noqa: A002 - the service's word
        client_id: str | None = None,
    ) -> Transaction:
        """A new transaction. Raises InvalidParameter, Overloaded: nothing happened."""
        return begun(self._channel, type, timeout_s, client_id)

    def prepare(self, transaction: Transaction | int, changes: Iterable[bytes]) -> None:
        """Ask whether it may commit, having changed these keys. Replaces what was given before.

        Raises:
          TransactionConflict: another one that was committed meanwhile changed the same. TransactionTooLarge,
            TransactionNotInProgress, TransactionNotFound.
        """
        self._channel.call(service.prepare(service.id_of(transaction), changes))

    def commit(self, transaction: Transaction | int) -> TransactionState:
        """Commit; the same made twice, for as long as the service keeps outcomes.

        Raises:
          TransactionConflict, TransactionNotInProgress, TransactionNotFound: it is not committed.
          ConnectionLost, DeadlineExceeded: unknown; ask again, or ``get``.
        """
        return self._channel.call(service.commit(service.id_of(transaction)))

    def abort(self, transaction: Transaction | int) -> TransactionState:
        """Roll back all its messages, and end it; ``invalid`` where not all were reached, and for a long one.

        Raises:
          TransactionNotInProgress: it is committed. TransactionNotFound.
        """
        return self._channel.call(service.abort(service.id_of(transaction)))

    def invalidate(self, transaction: Transaction | int) -> TransactionState:
        """End it at once; its messages are hidden from committed readers, and rolled back when the daemon cleans."""
        return self._channel.call(service.invalidate(service.id_of(transaction)))

    def checkpoint(self, transaction: Transaction) -> Transaction:
        """The same transaction with another write pointer. Raises TransactionNotInProgress, TransactionNotFound."""
        return self._channel.call(service.checkpoint(transaction))

    def get(self, transaction: Transaction | int) -> TransactionStatus:
        """What is known of it; of one that is not known (any more) the state is ``unknown``."""
        return self._channel.call(service.get(service.id_of(transaction)))

    def list(self, *, state: TransactionState | None = None, limit: int | None = None) -> Sequence[TransactionStatus]:
        """Those in progress and the invalid ones, oldest first; or those in one state.

        Args:
          limit: at most so many; None: 100. 1 000 at most.
        Raises:
          InvalidParameter.
        """
        return self._channel.call(service.list_all(state, limit))

    def truncate(self, ids: Collection[int] | None = None, *, before_ms: int | None = None) -> int:
        """Take transactions off the list of invalid ones, once all that is left of them is rolled back.

        The daemon does this by itself when nothing is left of them anywhere; ``pruning`` says why it does not.

        Returns:
          how many were on the list.

        Args:
          ids, before_ms: these, or all that were begun before (by the daemon's clock); one of the two.
        """
        return self._channel.call(service.truncate(ids, before_ms))

    def pruning(self) -> Pruning:
        """The figures for pruning by hand."""
        return self._channel.call(service.pruning())
