"""Who decides transactions for this daemon, as its front end asks: the words all three answers have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from protocol.errors import TransactionsUnavailable

if TYPE_CHECKING:
    from protocol.transactions.authority import Standing
    from protocol.transactions.view import View


class Transactions(Protocol):
    """The daemon's one authority about transactions; asked on the event loop, never waits."""

    def standing(self, pointer: int) -> Standing:
        """What became of a pointer, a checkpoint's or a transaction's first."""
        ...

    def view(self) -> View:
        """What a committed reader sees now. Raises TransactionsUnavailable."""
        ...


class SwitchedOff:
    """``transactions.service = "off"``: pointers are their clients' own business, and nothing is known to be decided."""

    def standing(self, pointer: int) -> Standing:
        """Always unknown."""
        del pointer
        return "unknown"

    def view(self) -> View:
        """Raises TransactionsUnavailable: whoever reads here brings a snapshot."""
        raise TransactionsUnavailable(
            "this daemon has no transaction service",
            hint='set transactions.service to "embedded", or poll with a transaction of your own service',
        )
