"""The durable state of the transaction service, read between two steps of its actor, without waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.transaction_actor import service_not_loaded
from plainsong.protocol.tephra.state import manager_state
from plainsong.protocol.transactions.asks import CompletePass
from plainsong.protocol.transactions.manager import pruning_figures

if TYPE_CHECKING:
    from actors.observe import Clock
    from actors.pointers import PointerLocations
    from actors.transaction_actor import TransactionActor
    from plainsong.protocol.tephra.state import ManagerState
    from plainsong.protocol.transactions.asks import PruningFigures, ServiceFigures
    from plainsong.protocol.transactions.manager import ManagerCore
    from plainsong.protocol.transactions.transaction import Standing
    from plainsong.protocol.transactions.view import View


class LedgerReads:
    """Reads the ledger of ``actor``.

    Args:
      locations: where undecided pointers have rows.
    """

    def __init__(self, actor: TransactionActor, clock: Clock, locations: PointerLocations) -> None:
        self._actor = actor
        self._clock = clock
        self._locations = locations

    def standing(self, pointer: int) -> Standing:
        """Return the standing of a pointer. Raises TransactionsUnavailable while the service is not loaded."""
        return self._core().standing(pointer)

    def view(self) -> View:
        """Return what readers of committed messages may see now. Raises TransactionsUnavailable."""
        return self._core().view()

    def figures(self) -> ServiceFigures:
        """Return figures for metrics. Raises TransactionsUnavailable."""
        return self._core().figures()

    def invalids(self) -> tuple[int, ...]:
        """Return the pointers on the invalid list, ascending. Raises TransactionsUnavailable."""
        return self._core().visible.invalids()

    def begin_pass(self) -> CompletePass:
        """Return the list and the prune bound for the janitor's next pass. Raises TransactionsUnavailable."""
        visible = self._core().visible
        return CompletePass(self._clock.now_ms(), visible.invalids(), visible.upper_bound())

    def pruning(self) -> PruningFigures:
        """Return figures for pruning by hand. Raises TransactionsUnavailable."""
        return pruning_figures(self._core(), self._locations.oldest_by_topic())

    def state(self) -> ManagerState:
        """Return the complete state in Tephra's terms, without undurable decisions. Raises TransactionsUnavailable."""
        core = self._core()
        return manager_state(core.ledger, core.visible, self._clock.now_ms())

    def owner_of(self, pointer: int) -> str | None:
        """Return the name that began a pointer's transaction; None if it had none, ``""`` if it is forgotten here.

        Raises TransactionsUnavailable.
        """
        record = self._core().ledger.by_pointer.get(pointer)
        if record is None:
            record = self._core().ledger.outcomes.get(pointer)
        return "" if record is None else record.owner

    def id_of(self, pointer: int) -> int:
        """Return the id of a pointer's transaction; the pointer itself if it is unknown, or while the service loads."""
        core = self._actor.core
        record = None if core is None else core.ledger.by_pointer.get(pointer)
        return pointer if record is None else record.transaction_id

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        """Return all pointers of a pointer's transaction, or only itself. Raises TransactionsUnavailable."""
        return self._core().pointers_of(pointer)

    def _core(self) -> ManagerCore:
        if self._actor.core is None:
            raise service_not_loaded()
        return self._actor.core
