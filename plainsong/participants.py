"""What takes part in a transaction beside the messages: a database's rows, a file, anything that can be undone.

One transaction goes like this, through all participants in the order in which they were added, messages last:

    start_tx       once, when the transaction has begun (or when a participant is added to one under way)
    tx_changes     what this participant changed, for the detection of conflicts
    commit_tx      make it durable, so that nothing but the decision is missing: it can still be undone
                   … the service decides …
    post_tx_commit the transaction is committed: let everybody see it
    rollback_tx    the transaction is not committed, whatever came before: undo everything

A checkpoint calls ``commit_tx``, then ``update_tx`` with the same transaction under a new write pointer; so
``commit_tx`` may come several times. ``rollback_tx`` may come at any time after ``start_tx``, also to those that
have not been asked to do anything yet; it is never called after the decision to commit. Where a later participant
cannot start, those before it are not rolled back, having done nothing; one that holds something by then (a connection,
a lock) may have a seventh method, ``abandon_tx()``, to let go of it. When nobody can find out
whether the transaction was committed, neither ``post_tx_commit`` nor ``rollback_tx`` is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Collection

    from plainsong.transactions import Transaction


@runtime_checkable
class TransactionAware(Protocol):
    """A participant, called in the thread of the transaction; none of its methods is called twice at once."""

    @property
    def name(self) -> str:
        """What errors call it. Whatever this raises disturbs nothing."""
        ...

    def start_tx(self, transaction: Transaction) -> None:
        """A transaction has begun; forget what was of an earlier one. Raising aborts it, without ``rollback_tx``."""
        ...

    def update_tx(self, transaction: Transaction) -> None:
        """After a checkpoint: the same transaction, with the write pointer of what comes now. Keep everything."""
        ...

    def tx_changes(self) -> Collection[bytes]:
        """Keys of what was changed: of two transactions that change the same, the later one to commit fails.

        Empty where nothing can conflict, as with messages.
        """
        ...

    def commit_tx(self) -> bool:
        """Make durable what was done, so that it can still be undone; True. Anything else, or raising, aborts."""
        ...

    def post_tx_commit(self) -> None:
        """The transaction is committed, and stays so if this raises."""
        ...

    def rollback_tx(self) -> bool:
        """Undo; True when nothing is left. Anything else, or raising, makes the transaction an invalid one."""
        ...


@runtime_checkable
class AsyncTransactionAware(Protocol):
    """A participant of an ``AsyncClient``'s transaction: the same, awaited in the task of the transaction."""

    @property
    def name(self) -> str:
        """What errors call it. Whatever this raises disturbs nothing."""
        ...

    async def start_tx(self, transaction: Transaction) -> None:
        """See ``TransactionAware.start_tx``."""
        ...

    async def update_tx(self, transaction: Transaction) -> None:
        """See ``TransactionAware.update_tx``."""
        ...

    async def tx_changes(self) -> Collection[bytes]:
        """See ``TransactionAware.tx_changes``."""
        ...

    async def commit_tx(self) -> bool:
        """See ``TransactionAware.commit_tx``."""
        ...

    async def post_tx_commit(self) -> None:
        """See ``TransactionAware.post_tx_commit``."""
        ...

    async def rollback_tx(self) -> bool:
        """See ``TransactionAware.rollback_tx``."""
        ...


#: What an ``AsyncTransactionContext`` takes; the methods of the first kind are called on the event loop.
AnyParticipant: TypeAlias = TransactionAware | AsyncTransactionAware

#: What a participant must have.
METHODS = ("start_tx", "update_tx", "tx_changes", "commit_tx", "post_tx_commit", "rollback_tx")
