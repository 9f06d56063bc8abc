"""The transaction service with methods that send a request and wait; in the daemon, routes and Thrift send asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.transactions import TransactionService
from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.protocol.transactions.asks import Begun, Decision
    from plainsong.protocol.transactions.transaction import Transaction


class AskedService(TransactionService):
    """The service with a method for each request."""

    async def begin(
        self,
        type: TransactionType = TransactionType.SHORT,  # noqa: A002  # Tephra's word
        timeout_s: int | None = None,
        client_id: str = "unknown",
        owner: str | None = None,
    ) -> Begun:
        """Begin a transaction."""
        return await self.ask(asks.Begin(type, timeout_s, client_id, owner))

    async def prepare(self, transaction_id: int, changes: Sequence[bytes]) -> None:
        """Set or replace a transaction's change set, and check it for conflicts."""
        await self.ask(asks.Prepare(transaction_id, changes, sum(map(len, changes))))

    async def commit(self, transaction_id: int) -> Decision:
        """Make a transaction visible atomically; a repeated commit gets the same answer while it is remembered."""
        answer = await self.ask(asks.Commit(transaction_id))
        assert not isinstance(answer, asks.CloseFirst)  # the actor handles it
        return answer

    async def checkpoint(self, transaction_id: int, transaction: Transaction | None = None) -> Begun:
        """Return a new write pointer for a transaction; the transaction keeps its first snapshot."""
        return await self.ask(asks.Checkpoint(transaction_id, transaction))
