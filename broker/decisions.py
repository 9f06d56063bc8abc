"""What the metrics say of transactions: decisions as they fall, and what is open, hidden and held when scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import TransactionsUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.metrics import Metrics
    from broker.service import Service
    from protocol.topic.state import TopicState
    from protocol.transactions.manager.answers import ServiceFigures, State


class Decisions:
    """Implements ``actors.transactions.TransactionObserver``."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def decided(self, state: State, count: int) -> None:
        """So many transactions became committed, aborted or invalid, durably."""
        self._metrics.transactions_decided(state, count)

    def conflicted(self) -> None:
        """A change set met a committed one."""
        self._metrics.transaction_conflicted()

    def timed_out(self, count: int) -> None:
        """So many of the invalid ones are so because their time was over."""
        self._metrics.transactions_timed_out(count)

    def fell(self, error: BaseException) -> None:
        """The service fell and is loaded again."""
        del error
        self._metrics.transactions_fell()

    def loaded(self, load_s: float) -> None:
        """It was loaded from disk."""
        del load_s


def add_transaction_gauges(metrics: Metrics, service: Service) -> None:
    """Register what is read off the service, the topics and the waiting polls at a scrape."""

    def figure(read: Callable[[ServiceFigures], float | None]) -> Callable[[], float | None]:
        def reading() -> float | None:
            if service.embedded is None:
                return None
            try:
                return read(service.embedded.figures())
            except TransactionsUnavailable:
                return None

        return reading

    def oldest_age_s(figures: ServiceFigures) -> float:
        since_ms = figures.oldest_open_ms
        return 0.0 if since_ms is None else max(0, service.clock.now_ms() - since_ms) / 1000

    for name, text, read in (
        ("plainsong_transactions_open", "Transactions in progress.", figure(lambda figures: figures.open)),
        (
            "plainsong_transaction_oldest_age_seconds",
            "Age of the longest open transaction.",
            figure(oldest_age_s),
        ),
        ("plainsong_transactions_invalid", "Pointers on the invalid list.", figure(lambda figures: figures.invalid)),
        (
            "plainsong_undecided_pointers",
            "Write pointers that topics have messages of and have not seen decided.",
            lambda: len(service.pointers),
        ),
        (
            "plainsong_hidden_messages",
            "Messages that undecided transactions keep from committed readers, over all open topics.",
            lambda: _hidden(service),
        ),
        (
            "plainsong_held_polls",
            "Committed polls that wait for a transaction to be decided.",
            lambda: service.pointers.waiters,
        ),
        (
            "plainsong_tephra_state_age_seconds",
            "Age of the last state learnt from the Tephra that decides; without any, seconds since it was first asked.",
            lambda: None if service.decider.foreign is None else service.decider.foreign.silent_s,
        ),
    ):
        metrics.reads(name, text, read)


def _hidden(service: Service) -> int:
    cores = [entry.actor.core for entry in service.directory if entry.actor.core is not None]
    return sum(_hidden_in(service, core.state) for core in cores)


def _hidden_in(service: Service, state: TopicState) -> int:
    """What the first undecided transaction of a topic hides: nothing that others do is behind it alone."""
    for pending in state.pending.values():
        if pending.runs and not _is_over(service, pending.pointer):
            return pending.hidden(state.appended)
    return 0


def _is_over(service: Service, pointer: int) -> bool:
    try:
        return service.transactions.standing(pointer) in ("committed", "aborted", "invalid")
    except TransactionsUnavailable:
        return False
