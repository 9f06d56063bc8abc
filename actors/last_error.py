"""Why the last request to an object store failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging import Logger


class LastError:
    """The error of the last request, for operators. Of a series of failures, the first is logged."""

    def __init__(self, log: Logger, fails: str, works_again: str = "") -> None:
        """Args:
        fails, works_again: the events to log; empty: none.
        """
        self._log = log
        self._fails = fails
        self._works_again = works_again
        self.why = ""
        """Empty if the last request succeeded."""

    def failed(self, why: str) -> None:
        """Note that a request has failed."""
        if not self.why:
            self._log.warning(self._fails, extra={"why": why})
        self.why = why

    def clear(self) -> None:
        """Note that a request was answered."""
        if self.why and self._works_again:
            self._log.info(self._works_again)
        self.why = ""
