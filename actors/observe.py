"""What actors observe and report: events for metrics, the clock, and the free space of the disk.

What actors tell whoever counts: plain calls that cost nothing when nobody does, and must never fail.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.asks import State
    from storage.base import Store


class Observer(Protocol):
    """Told by the actors, on the event loop; must return at once and not raise."""

    def committed(self, requests: int, messages: int, write_s: float) -> None:
        """A commit of so many publishes and messages was made durable in ``write_s`` seconds."""

    def told(self, told: Mapping[str, int]) -> None:
        """What became of producers' requests and of producers, counted by the words of ``Step.producer_outcomes``."""

    def fell(self, name: TopicName, error: BaseException) -> None:
        """An actor fell and will be loaded again."""

    def deposed(self, name: TopicName) -> None:
        """The store said that another instance has claimed a topic that was open here."""

    def handed_over(self, topics: int, seconds: float) -> None:
        """So many topics that are other instances' now have been let go, ``seconds`` after that was known."""

    def loaded(self, name: TopicName, load_s: float) -> None:
        """A topic was loaded from disk in ``load_s`` seconds."""

    def cleaned(self, expired: int, purged: int) -> None:
        """The janitor removed rows: expired ones, and ones of gone generations."""


class NoObserver:
    """Nobody counts."""

    def committed(self, requests: int, messages: int, write_s: float) -> None:
        """Nothing."""

    def told(self, told: Mapping[str, int]) -> None:
        """Nothing."""

    def fell(self, name: TopicName, error: BaseException) -> None:
        """Nothing."""

    def deposed(self, name: TopicName) -> None:
        """Nothing."""

    def handed_over(self, topics: int, seconds: float) -> None:
        """Nothing."""

    def loaded(self, name: TopicName, load_s: float) -> None:
        """Nothing."""

    def cleaned(self, expired: int, purged: int) -> None:
        """Nothing."""


# --- transaction observer --------------------------------------------------------------------------
#
# What the transaction service tells whoever counts: plain calls that cost nothing when nobody does.


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


class NoTransactionObserver:
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


# --- clock -----------------------------------------------------------------------------------------
#
# The machine's clock, watched: the only place of the daemon that asks what time it is.


class Clock(Protocol):
    """Tells the time in milliseconds since 1970; may jump either way."""

    regressions: int
    """How often it was seen to go back."""

    def now_ms(self) -> int:
        """The time now."""
        ...


class SystemClock:
    """The operating system's clock; counts how often it was seen to go back."""

    def __init__(self) -> None:
        self.regressions = 0
        self._last_ms = 0

    def now_ms(self) -> int:
        """The time now."""
        now_ms = time.time_ns() // 1_000_000
        if now_ms < self._last_ms:
            self.regressions += 1
        self._last_ms = now_ms
        return now_ms


# --- space -----------------------------------------------------------------------------------------
#
# Watching the disk: LevelDB needs room to delete, so publishes stop while there still is some.


log = logging.getLogger(__name__)
#: Seconds between looks at the disk; a gigabyte a second would need a gibibyte of ``min_free_bytes``.
DISK_CHECK_INTERVAL_S = 1.0


class SpaceGuard:
    """Whether the disk is nearly full; everybody may ask, one task looks."""

    def __init__(self, store: Store, min_free_bytes: int) -> None:
        self._store = store
        self._min_free_bytes = min_free_bytes
        self.low = False
        self.free_bytes: int | None = None
        self.look()

    def look(self) -> bool:
        """Look now; says so in the log when it changes."""
        self.free_bytes = self._store.statistics().free_bytes
        low = self.free_bytes is not None and self.free_bytes < self._min_free_bytes
        if low != self.low:
            text = "disk nearly full: publishes are refused" if low else "disk has room again: publishes are taken"
            log.warning(text, extra={"free_bytes": self.free_bytes, "min_free_bytes": self._min_free_bytes})
        self.low = low
        return low

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await trio.sleep(DISK_CHECK_INTERVAL_S)
            self.look()
