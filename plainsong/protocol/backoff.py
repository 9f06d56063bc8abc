"""Backoff: the pauses between attempts at one thing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Backoff:
    """The pauses of a table, one after each failed attempt; its last one repeats.

    With ``random``, which returns a number from 0 to 1, each pause is shortened by up to half, so that many clients do
    not return at the same moment.
    """

    __slots__ = ("_pauses_s", "_random", "failures")

    def __init__(self, pauses_s: Sequence[float], random: Callable[[], float] | None = None) -> None:
        self._pauses_s = pauses_s
        self._random = random
        #: Attempts that have failed since the last ``reset``.
        self.failures = 0

    def failed(self) -> float:
        """Counts a failed attempt; returns the pause before the next one, in seconds."""
        pause_s = self._pauses_s[min(self.failures, len(self._pauses_s) - 1)]
        self.failures += 1
        return pause_s if self._random is None else pause_s * (1 - self._random() / 2)

    def reset(self) -> None:
        """An attempt has succeeded: the next failure counts as the first again."""
        self.failures = 0
