"""Turns that are due: actors whose mail has come without waking their tasks.

Requests that were started without a task (``broker.http.reactor``) are put into mailboxes one after the other; then every
actor that got some takes its turn on the spot, for all of them. The same happens at the end of each commit, before its
answers are given, so that the disk waits for nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class TakesTurns(Protocol):
    """An actor."""

    def turn_now(self) -> None:
        """Take a turn for the mail that waits, or leave it to the task; neither waits nor raises."""


class Turns:
    """The actors whose turn is due. Everything runs on the event loop."""

    def __init__(self) -> None:
        self._due: dict[TakesTurns, None] = {}
        self._running = False
        self._take_in: Callable[[], None] | None = None

    @property
    def are_run(self) -> bool:
        """Whether a server runs them; otherwise tasks have to be woken."""
        return self._take_in is not None

    def attach(self, take_in: Callable[[], None] | None) -> None:
        """A server runs the turns from now on, or, with None, does no more.

        Args:
          take_in: takes in the requests that have arrived by now; they may make more turns due.
        """
        self._take_in = take_in

    def soon(self, actor: TakesTurns) -> None:
        """The actor has mail, and its task was not woken: call ``run`` in the same turn of the event loop."""
        self._due[actor] = None

    def run(self) -> None:
        """Take in what has arrived, then let every actor take its turn that is due. Does nothing when it runs already."""
        if self._running:
            return
        self._running = True
        try:
            if self._take_in is not None:
                self._take_in()
            self.run_due()
        finally:
            self._running = False

    def run_due(self) -> None:
        """Let every actor take its turn that is due."""
        while self._due:
            actor, _ = self._due.popitem()
            actor.turn_now()
