"""What a publisher remembers of messages that are settled: counts, and failures that nobody has asked about."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from plainsong.errors import NotSent
from plainsong.ids import nth_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from plainsong.ids import MessageId
    from plainsong.messages import Receipt
    from plainsong.protocol.errors import PlainsongError

log = logging.getLogger("plainsong.publisher")

#: Failed futures that are kept to see whether somebody asks; what is beyond counts as not asked about.
MAX_KEPT = 10_000


def tell_of_drops(on_drop: Callable[[DroppedMessage], object] | None, dropped: Iterable[DroppedMessage]) -> None:
    """Call the user's function for each; what it raises goes to the log."""
    if on_drop is None:
        return
    for message in dropped:
        try:
            on_drop(message)
        except Exception:
            log.exception("on_drop failed")


class Asked(Protocol):
    """A future that knows whether anybody has looked."""

    asked: bool


S = TypeVar("S", bound=Asked)


class DroppedMessage(NamedTuple):
    """What ``on_drop`` is told: which message was given up, and why (with its ``outcome``)."""

    topic: str
    payload: bytes
    error: PlainsongError


class Counts(NamedTuple):
    """Messages of a publisher since it was made."""

    pending: int
    """Waiting or under way."""
    pending_bytes: int
    """What they occupy."""
    delivered: int
    """Durable."""
    failed: int
    """Not delivered in reliable mode; their futures raise."""
    dropped: int
    """Given up in best effort, or for want of room."""


class Tally(Generic[S]):
    """Counts; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delivered = 0
        self._failed = 0
        self._dropped = 0
        self._unheard: list[tuple[S, bool]] = []
        self._beyond = [0, 0]

    def counts(self, pending: int, pending_bytes: int) -> Counts:
        """All of them."""
        return Counts(pending, pending_bytes, self._delivered, self._failed, self._dropped)

    def delivered(self, messages: int) -> None:
        """So many are durable."""
        with self._lock:
            self._delivered += messages

    def dropped(self, messages: int) -> None:
        """So many were given up as agreed."""
        with self._lock:
            self._dropped += messages

    def failed(self, sents: list[S], error: PlainsongError) -> None:
        """These were not delivered as promised."""
        unknown = error.outcome == "unknown"
        with self._lock:
            self._failed += len(sents)
            room = MAX_KEPT - len(self._unheard)
            self._unheard += [(sent, unknown) for sent in sents[:room]]
            self._beyond[unknown] += max(0, len(sents) - room)

    def raise_if_unheard(self, waiting: int, under_way: int = 0) -> None:
        """Raises NotSent when messages wait, are under way, or failed since the last time and nobody asked."""
        with self._lock:
            unheard = [unknown for sent, unknown in self._unheard if not sent.asked]
            unsent, unknown = self._beyond
            self._unheard, self._beyond = [], [0, 0]
        unsent += waiting + unheard.count(False)
        unknown += under_way + unheard.count(True)
        if unsent or unknown:
            raise NotSent(unsent, unknown)


def id_in(receipt: Receipt, index: int) -> MessageId | None:
    """The id of message ``index`` of a publish."""
    if receipt.first_id is None or receipt.last_id is None:
        return None
    return nth_id(receipt.first_id, receipt.last_id, index, receipt.count)
