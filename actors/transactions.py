"""The transaction service: begins, decides and remembers transactions, one commit of its own rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from protocol.errors import TransactionsUnavailable
from protocol.transactions.manager.settings import TransactionSettings
from protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from actors.clock import Clock
    from actors.pointer_index import PointerIndex
    from protocol.names import TopicName
    from protocol.topic.asks import Ask
    from protocol.transactions.authority import Standing
    from protocol.transactions.manager.answers import (
        Begun,
        CompletePass,
        Decision,
        PruningFigures,
        ServiceFigures,
        State,
        TransactionStatus,
    )
    from protocol.transactions.transaction import Transaction
    from protocol.transactions.view import View
    from storage.base import Store

    #: ``Directory.ask``.
    AskTopic = Callable[[TopicName, Ask[Any]], Awaitable[Any]]


class TransactionObserver(Protocol):
    """Told by the service, on the event loop; must return at once and not raise."""

    def decided(self, state: State, count: int) -> None:
        """So many transactions became committed, aborted or invalid, durably."""

    def fell(self, error: BaseException) -> None:
        """The service fell and is loaded again."""

    def loaded(self, load_s: float) -> None:
        """It was loaded from disk in ``load_s`` seconds."""


class TransactionService:
    """Implements ``Authority``; every call but ``close`` raises TransactionsUnavailable while it is down."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        pointers: PointerIndex,
        ask: AskTopic,
        settings: TransactionSettings | None = None,
        observer: TransactionObserver | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._pointers = pointers
        self._ask = ask
        self.settings = settings or TransactionSettings()
        self._observer = observer

    # --- life -------------------------------------------------------------------------------------

    async def run(self, on_loaded: Callable[[], None] = lambda: None) -> None:
        """Serve until closed; loads itself from disk, again after each failure. ``on_loaded``: after each load."""
        raise NotImplementedError

    def close(self) -> None:
        """Take no more; what was asked is served, then ``run`` returns."""

    # --- at once ----------------------------------------------------------------------------------

    def standing(self, pointer: int) -> Standing:
        """What became of a pointer. Raises TransactionsUnavailable while that cannot be known."""
        raise self._down()

    def view(self) -> View:
        """What readers of committed messages may see now. Raises TransactionsUnavailable."""
        raise self._down()

    def figures(self) -> ServiceFigures:
        """Numbers for metrics. Raises TransactionsUnavailable."""
        raise self._down()

    def invalids(self) -> tuple[int, ...]:
        """Pointers on the invalid list, ascending. Raises TransactionsUnavailable."""
        raise self._down()

    # --- asked, and durable when answered ---------------------------------------------------------

    async def begin(
        self,
        type: TransactionType = TransactionType.SHORT,  # noqa: A002  # the contract's word
        timeout_s: int | None = None,
        client_id: str = "unknown",
    ) -> Begun:
        """Begin a transaction.

        Raises:
          InvalidParameter: a time-out that is not above 0, over the maximum, or given with a long one; a bad client id.
          Overloaded: too many are open or invalid.
        """
        raise self._down()

    async def prepare(self, transaction_id: int, changes: Sequence[bytes]) -> None:
        """Say what it changed, in place of what it said before, and learn whether that conflicts.

        Raises:
          ChangeConflict: with a transaction committed since it began.
          TransactionTooLarge: too many keys, or too many bytes of them.
          TransactionNotFound, TransactionNotInProgress.
        """
        raise self._down()

    async def commit(self, transaction_id: int) -> Decision:
        """Make it visible, all of it in the same moment; again, as long as it is remembered, it says so again.

        Raises:
          ChangeConflict: it stays in progress, and is to be prepared again or aborted.
          TransactionNotFound: never heard of, or forgotten.
          TransactionNotInProgress: aborted, invalid, or its time is over.
        """
        raise self._down()

    async def abort(self, transaction_id: int) -> Decision:
        """Roll back its rows in every topic, then forget its pointers.

        The state says what it came to: ``aborted``, or ``invalid`` for a long one, and for one with a topic that
        could not be reached in time. A late abort of an invalid one is the same. Whoever asks may leave.

        Raises:
          TransactionNotFound: never heard of, or forgotten; Thrift answers that as if it had worked.
          TransactionNotInProgress: committed.
        """
        raise self._down()

    async def invalidate(self, transaction_id: int) -> Decision:
        """Hide it for ever without touching its rows. Raises TransactionNotFound, TransactionNotInProgress."""
        raise self._down()

    async def checkpoint(self, transaction_id: int, transaction: Transaction | None = None) -> Begun:
        """A new write pointer; the snapshot stays the one it began with.

        Args:
          transaction: as the client has it; without, the snapshot is worked out from what is remembered.
        Raises:
          InvalidParameter: without ``transaction``, too much has been forgotten since it began.
          TransactionNotFound, TransactionNotInProgress, Overloaded.
        """
        raise self._down()

    async def truncate(self, pointers: Sequence[int]) -> int:
        """Take pointers from the invalid list, after rolling back what rows they have; how many went.

        Those with a topic that could not be reached in time stay.
        """
        raise self._down()

    async def truncate_before(self, before_ms: int) -> int:
        """The same for all that were issued before a time. Raises InvalidParameter when one in progress was too."""
        raise self._down()

    async def reset(self) -> None:
        """Roll back everything open and invalid, and forget it, change sets and outcomes too; ids go on rising."""
        raise self._down()

    async def complete(self, passed: CompletePass) -> int:
        """The janitor has passed every topic without a failure: keep that, and prune what may go; how many went."""
        raise self._down()

    # --- asked, changes nothing -------------------------------------------------------------------

    def begin_pass(self) -> CompletePass:
        """What the janitor's next pass is about. Raises TransactionsUnavailable."""
        raise self._down()

    async def look(self, transaction_id: int) -> TransactionStatus:
        """What is known of one, by its id or a checkpoint's pointer; state ``unknown`` when nothing is."""
        raise self._down()

    async def listed(self, state: State | None = None, limit: int = 1_000) -> list[TransactionStatus]:
        """Transactions, oldest first: of one state, or (None) those in progress and invalid."""
        raise self._down()

    def pruning(self) -> PruningFigures:
        """What an operator needs for pruning by hand. Raises TransactionsUnavailable."""
        raise self._down()

    def snapshot(self) -> bytes:
        """All of the durable state in Tephra's snapshot format V4. Raises TransactionsUnavailable."""
        raise self._down()

    @staticmethod
    def _down() -> TransactionsUnavailable:
        return TransactionsUnavailable("the transaction service is not loaded", hint="plain publishes and polls work")
