"""A function in a transaction, again when it lost against another one: how often, and after which pauses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.core.attempts import Backoff
from plainsong.core.effects import Pause
from plainsong.protocol.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong.core.effects import Steps
    from plainsong.protocol.errors import TransactionConflict

#: Attempts after the first.
DEFAULT_RETRIES = 20


class Retries:
    """The attempts of one function. Raises InvalidParameter."""

    def __init__(self, retries: int, random: Callable[[], float]) -> None:
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise InvalidParameter(f"retries is {retries!r}", hint="use 0 or more")
        self._left = retries
        self._attempts = 1
        self._backoff = Backoff(random)

    def pause_s(self, conflict: TransactionConflict) -> float:
        """How long to wait after a conflict: from 50 ms, doubling, shortened at random.

        Raises:
          TransactionConflict: this was the last attempt.
        """
        if not self._left:
            conflict.add_note(
                "this was the only attempt" if self._attempts == 1 else f"after {self._attempts} attempts"
            )
            raise conflict
        self._left -= 1
        self._attempts += 1
        return self._backoff.next_s(conflict)


def pausing(seconds: float) -> Steps[None]:
    """A pause."""
    yield Pause(seconds)
