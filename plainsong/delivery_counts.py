"""Counts what publishers and streams have delivered, lost and dropped, and reports losses that the caller did not see."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from plainsong.errors import NotSent
from plainsong.messages import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from plainsong.messages import DroppedMessage
    from plainsong.protocol.errors import PlainsongError

log = logging.getLogger("plainsong.publisher")

#: Failed futures kept to see whether the caller retrieves their error; further ones count as not retrieved.
MAX_KEPT = 10_000


def report_drops(on_drop: Callable[[DroppedMessage], object] | None, dropped: Iterable[DroppedMessage]) -> None:
    """Calls ``on_drop`` for each message. Logs its exceptions."""
    if on_drop is None:
        return
    for message in dropped:
        try:
            on_drop(message)
        except Exception:
            log.exception("on_drop failed")


class Retrieved(Protocol):
    """A future that records whether the caller has retrieved its outcome."""

    retrieved: bool


A = TypeVar("A", bound=Retrieved)


class Tally(Generic[A]):
    """Counts delivered, failed and dropped messages. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, for signal handlers and finalizers
        self._delivered = 0
        self._failed = 0
        self._dropped = 0
        self._unretrieved: list[tuple[A, PlainsongError]] = []
        self._beyond = [0, 0]

    def counts(self, pending: int, pending_bytes: int) -> Counts:
        """Return all counts, including the buffer's."""
        return Counts(pending, pending_bytes, self._delivered, self._failed, self._dropped)

    def delivered(self, messages: int) -> None:
        """Counts durable messages."""
        with self._lock:
            self._delivered += messages

    def dropped(self, messages: int) -> None:
        """Counts messages given up in best effort, or for lack of room."""
        with self._lock:
            self._dropped += messages

    def failed(self, futures: list[A], error: PlainsongError) -> None:
        """Counts messages that a reliable publisher could not deliver."""
        unknown = error.outcome == "unknown"
        with self._lock:
            self._failed += len(futures)
            room = MAX_KEPT - len(self._unretrieved)
            self._unretrieved += [(future, error) for future in futures[:room]]
            self._beyond[unknown] += max(0, len(futures) - room)

    def raise_if_unretrieved(self, waiting: int, under_way: int = 0, causes: Iterable[PlainsongError] = ()) -> None:
        """Raises NotSent if messages wait, are under way, or failed since the last call without their error being retrieved.

        Args:
          causes: why messages wait.
        """
        with self._lock:
            errors = [error for future, error in self._unretrieved if not future.retrieved]
            unsent, unknown = self._beyond
            self._unretrieved, self._beyond = [], [0, 0]
        in_doubt = sum(error.outcome == "unknown" for error in errors)
        unsent += waiting + len(errors) - in_doubt
        unknown += under_way + in_doubt
        if unsent or unknown:
            raise NotSent(unsent, unknown, [*errors, *causes])
