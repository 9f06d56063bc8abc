"""Participants of a transaction in addition to its messages: database rows, a file, anything that can be undone.

A transaction calls its participants in the order in which they were added, the messages last:

    start_tx       once, when the transaction begins (or when the participant joins it)
    tx_changes     the keys that this participant changed, for conflict detection
    commit_tx      make the changes durable; they can still be undone
                   … the service decides …
    post_tx_commit the transaction is committed: make the changes visible
    rollback_tx    the transaction is not committed: undo everything

A checkpoint calls ``commit_tx``, then ``update_tx`` with the same transaction under a new write pointer; so ``commit_tx``
may be called several times. ``rollback_tx`` may be called at any time after ``start_tx``, even on a participant that has
done nothing yet, but never after the decision to commit. If a later participant fails to start, the earlier ones are
not rolled back, since they have done nothing; a participant that holds a connection or lock by then may have a seventh
method, ``abandon_tx()``, to release it. If the outcome of the commit cannot be found out, the transaction calls neither
``post_tx_commit`` nor ``rollback_tx``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Collection

    from plainsong.transactions import Transaction


@runtime_checkable
class TransactionAware(Protocol):
    """A participant. The transaction calls its methods in its own thread, one at a time."""

    @property
    def name(self) -> str:
        """Its name in errors. If this raises, errors use the type's name."""
        ...

    def start_tx(self, transaction: Transaction) -> None:
        """A transaction begins: drop the state of an earlier one. Raising aborts it, without ``rollback_tx``."""
        ...

    def update_tx(self, transaction: Transaction) -> None:
        """After a checkpoint: the same transaction under a new write pointer. Keep everything."""
        ...

    def tx_changes(self) -> Collection[bytes]:
        """The keys of all changes. If two transactions change the same key, the later one to commit fails.

        Empty if nothing can conflict, as with messages.
        """
        ...

    def commit_tx(self) -> bool:
        """Make the changes durable but still undoable. Any result but True, or an exception, aborts."""
        ...

    def post_tx_commit(self) -> None:
        """The transaction is committed, even if this raises."""
        ...

    def rollback_tx(self) -> bool:
        """Undo everything. Any result but True, or an exception, makes the transaction invalid."""
        ...


@runtime_checkable
class AsyncTransactionAware(Protocol):
    """A participant of an ``AsyncClient``'s transaction, which awaits its methods in its own task."""

    @property
    def name(self) -> str:
        """Its name in errors. If this raises, errors use the type's name."""
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


#: The participants of an ``AsyncTransactionContext``. It calls a synchronous one on the event loop.
AnyParticipant: TypeAlias = TransactionAware | AsyncTransactionAware

#: The methods that a participant must have.
METHODS = ("start_tx", "update_tx", "tx_changes", "commit_tx", "post_tx_commit", "rollback_tx")
