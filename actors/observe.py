"""Events for metrics, the clock, and the free disk space."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import trio

from storage.clock import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.asks import State
    from storage.base import Store


log = logging.getLogger(__name__)


class Observer(Protocol):
    """Receives events of topics, on the event loop; methods must not wait or raise."""

    def committed(self, requests: int, messages: int, write_s: float) -> None:
        """Count a durable commit of ``requests`` publishes and ``messages`` messages, which took ``write_s`` s."""

    def producer_events(self, counts: Mapping[str, int]) -> None:
        """Count outcomes of producers' requests, and removals of producers, as in ``Step.producer_outcomes``."""

    def fell(self, name: TopicName, error: BaseException) -> None:
        """Count a fall of a topic's actor, which will be loaded again."""

    def deposed(self, name: TopicName) -> None:
        """Count a claim by another instance of a topic that was open here."""

    def handed_over(self, topics: int, seconds: float) -> None:
        """Count a handover of ``topics`` topics, complete ``seconds`` after their owners changed."""

    def loaded(self, name: TopicName, load_s: float) -> None:
        """Count a load of a topic from disk that took ``load_s`` seconds."""

    def cleaned(self, expired: int, purged: int) -> None:
        """Count rows removed by the janitor: expired ones, and those of purged generations."""


class NoObserver:
    """Ignores all events."""

    def committed(self, requests: int, messages: int, write_s: float) -> None:
        """Ignored."""

    def producer_events(self, counts: Mapping[str, int]) -> None:
        """Ignored."""

    def fell(self, name: TopicName, error: BaseException) -> None:
        """Ignored."""

    def deposed(self, name: TopicName) -> None:
        """Ignored."""

    def handed_over(self, topics: int, seconds: float) -> None:
        """Ignored."""

    def loaded(self, name: TopicName, load_s: float) -> None:
        """Ignored."""

    def cleaned(self, expired: int, purged: int) -> None:
        """Ignored."""


class TransactionObserver(Protocol):
    """Receives events of the transaction service, on the event loop; methods must not wait or raise."""

    def decided(self, state: State, count: int) -> None:
        """Count transactions that are durably committed, aborted or invalid."""

    def conflicted(self) -> None:
        """Count a change set that conflicts with a committed one."""

    def timed_out(self, count: int) -> None:
        """Count transactions that timed out, and so became invalid."""

    def fell(self, error: BaseException) -> None:
        """Count a fall of the service's actor, which will be loaded again."""

    def loaded(self, load_s: float) -> None:
        """Count a load of the service from disk that took ``load_s`` seconds."""


class NoTransactionObserver:
    """Ignores all events."""

    def decided(self, state: State, count: int) -> None:
        """Ignored."""

    def conflicted(self) -> None:
        """Ignored."""

    def timed_out(self, count: int) -> None:
        """Ignored."""

    def fell(self, error: BaseException) -> None:
        """Ignored."""

    def loaded(self, load_s: float) -> None:
        """Ignored."""


# --- clock: the only code of the daemon that reads the time ----------------------------------------


class Clock(Protocol):
    """The time in milliseconds since 1970; may jump either way."""

    regressions: int
    """Number of times the clock was seen to go back."""

    def now_ms(self) -> int:
        """Return the current time."""
        ...


class SystemClock:
    """The operating system's clock."""

    def __init__(self) -> None:
        self.regressions = 0
        self._last_ms = 0

    def now_ms(self) -> int:
        """Return the current time; counts a regression."""
        present_ms = now_ms()
        if present_ms < self._last_ms:
            self.regressions += 1
        self._last_ms = present_ms
        return present_ms


#: Seconds between checks of the clock.
CLOCK_CHECK_INTERVAL_S = 1.0
#: A clock that gains more than this between two checks has jumped: a slow loop and a clock that is slewed gain less.
CLOCK_JUMP_MS = 500


async def watch_jumps(clock: Clock, on_jump: Callable[[], None]) -> None:
    """Call ``on_jump`` whenever the clock has jumped ahead, since messages may have expired early."""
    while True:
        before_ms, before_s = clock.now_ms(), trio.current_time()
        await trio.sleep(CLOCK_CHECK_INTERVAL_S)
        if clock.now_ms() - before_ms > (trio.current_time() - before_s) * 1000 + CLOCK_JUMP_MS:
            on_jump()


# --- disk space: LevelDB needs some to delete, so publishes are refused before the disk is full -----


#: Seconds between checks of the disk. Writes of a gigabyte a second would need ``min_free_bytes`` of a gibibyte.
DISK_CHECK_INTERVAL_S = 1.0


class SpaceGuard:
    """Tracks whether the disk is nearly full; one task checks it."""

    def __init__(self, store: Store, min_free_bytes: int) -> None:
        self._store = store
        self._min_free_bytes = min_free_bytes
        self.low = False
        self.free_bytes: int | None = None
        self.look()

    def look(self) -> bool:
        """Check the disk now; return True if it is nearly full. Logs a change."""
        self.free_bytes = self._store.statistics().free_bytes
        low = self.free_bytes is not None and self.free_bytes < self._min_free_bytes
        if low != self.low:
            text = "disk nearly full: publishes are refused" if low else "disk has room again: publishes are accepted"
            log.warning(text, extra={"free_bytes": self.free_bytes, "min_free_bytes": self._min_free_bytes})
        self.low = low
        return low

    async def run(self) -> None:
        """Check the disk periodically."""
        while True:
            await trio.sleep(DISK_CHECK_INTERVAL_S)
            self.look()
