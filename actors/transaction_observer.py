"""What the transaction service tells whoever counts: plain calls that cost nothing when nobody does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from protocol.transactions.manager.answers import State


class TransactionObserver(Protocol):
    """Told by the service, on the event loop; must return at once and not raise."""

    def decided(self, state: State, count: int) -> None:
        """So many transactions became committed, aborted or invalid, durably."""

    def conflicted(self) -> None:
        """A change set met a committed one."""

    def timed_out(self, count: int) -> None:
        """So many of the invalid ones are so because their time was over."""

    def fell(self, error: BaseException) -> None:
        """The service fell and is loaded again."""

    def loaded(self, load_s: float) -> None:
        """It was loaded from disk in ``load_s`` seconds."""


class Unwatched:
    """Nobody counts."""

    def decided(self, state: State, count: int) -> None:
        """Nothing."""

    def conflicted(self) -> None:
        """Nothing."""

    def timed_out(self, count: int) -> None:
        """Nothing."""

    def fell(self, error: BaseException) -> None:
        """Nothing."""

    def loaded(self, load_s: float) -> None:
        """Nothing."""
