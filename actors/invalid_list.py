"""The pass over the invalid list: rolls back, in every topic, the rows of pointers that are on it.

    begin     reads the list, and the bound to which it can be pruned after the pass
    topics    each topic with rows of such a pointer rolls them back, durably, before the next topic is asked
    complete  only if all topics succeeded: the keeper of the list is notified, and may prune it

If a pointer left the list while a row still carries it, the row would become visible. So a single unreachable topic
makes the pass incomplete: the keeper is not notified, and the next round starts over.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import trio

from plainsong.protocol.errors import PlainsongError, TransactionsUnavailable
from plainsong.protocol.topic.asks import RollBackPointer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actors.decisions import AskTopic
    from actors.directory import Directory
    from actors.pointers import PointerLocations
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.asks import CompletePass, PruningFigures

log = logging.getLogger(__name__)
#: Concurrent requests to a topic, which share its commits.
MAX_AT_ONCE = 256
#: Pointers looked up before yielding to other tasks.
_AT_A_TIME = 1000
#: Topics named in the log if a pass is incomplete.
MAX_NAMED = 5


class InvalidList(Protocol):
    """The keeper of the invalid list: the daemon's own service, or its view of a Tephra service."""

    def begin_pass(self) -> CompletePass:
        """Return the list and the prune bound for a pass that begins now. Raises TransactionsUnavailable."""
        ...

    async def pointer_locations(self) -> PointerLocations:
        """Return the topics, of all instances, where undecided pointers have rows. Raises TransactionsUnavailable."""
        ...

    async def complete(self, passed: CompletePass) -> int:
        """Record a complete pass, and prune the list; return the number pruned. Raises TransactionsUnavailable."""
        ...

    def pruning(self) -> PruningFigures:
        """Return figures for operators. Raises TransactionsUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class PassReport:
    """The result of one pass."""

    invalid: int
    """Pointers on the list when the pass began."""
    rolled_back: int
    """Pointers newly rolled back, counted once for each topic."""
    missed: tuple[TopicName, ...]
    """Topics that could not roll back everything."""
    pruned: int = 0

    @property
    def complete(self) -> bool:
        """True if every topic rolled back its pointers."""
        return not self.missed


class InvalidPass:
    """Runs passes; remembers which topics have rolled back a pointer, so that they are not asked again."""

    def __init__(
        self,
        directory: Directory,
        invalids: InvalidList | Callable[[], InvalidList | None],
        ask: AskTopic | None = None,
    ) -> None:
        """
        Args:
          invalids: the keeper of the list, or a function that returns it, or None while another instance keeps it.
          ask: asks a topic at its owner; None: this instance owns all topics.
        """
        self._directory = directory
        self._keeper = invalids if callable(invalids) else lambda: invalids
        self._ask = directory.ask if ask is None else ask
        #: Pointers on the list, each with the topics that have rolled it back. They refuse all later writes under it.
        self._done: dict[int, set[TopicName]] = {}

    async def run_once(self) -> PassReport | None:
        """Run one pass; return None if the keeper is unavailable. Failures of topics are reported and logged."""
        begun_s = trio.current_time()
        keeper = self._keeper()
        if keeper is None:
            self._done.clear()
            return None
        try:
            passed = keeper.begin_pass()
            where = await keeper.pointer_locations()
        except TransactionsUnavailable as error:
            log.info("invalid pass not begun", extra={"why": error.detail})
            return None
        missed: set[TopicName] = set()
        rolled_back = 0
        for name, pointers in (await self._work(where, passed.invalids)).items():
            done = await self._roll_back(name, pointers)
            rolled_back += done
            if done < len(pointers):
                missed.add(name)
        report = PassReport(len(passed.invalids), rolled_back, tuple(sorted(missed)))
        if report.complete:
            try:
                report = replace(report, pruned=await keeper.complete(passed))
            except PlainsongError as error:
                log.warning("complete invalid pass not recorded", extra={"why": error.detail})
                return None
        self._log_report(keeper, report, trio.current_time() - begun_s)
        return report

    async def _work(self, index: PointerLocations, invalids: Sequence[int]) -> dict[TopicName, list[int]]:
        """Return the topics that have, or may soon have, rows of invalid pointers, with the pointers to roll back."""
        work: dict[TopicName, list[int]] = {}
        before, self._done = self._done, {}
        for at in range(0, len(invalids), _AT_A_TIME):
            for pointer in invalids[at : at + _AT_A_TIME]:
                topics = index.topics_of((pointer,))
                done = before.get(pointer)
                if done is not None:
                    self._done[pointer] = done
                    topics -= done
                for name in topics:
                    work.setdefault(name, []).append(pointer)
            await trio.lowlevel.checkpoint()  # the list may be long: do not block the event loop
        return work

    async def _roll_back(self, name: TopicName, pointers: list[int]) -> int:
        """Have a topic roll back pointers; return the number that succeeded."""
        failures: list[PlainsongError] = []

        async def ask(pointer: int) -> None:
            try:
                await self._ask(name, RollBackPointer(pointer, by_client=False))
                self._done.setdefault(pointer, set()).add(name)
            except PlainsongError as error:
                failures.append(error)

        for at in range(0, len(pointers), MAX_AT_ONCE):
            async with trio.open_nursery() as nursery:
                for pointer in pointers[at : at + MAX_AT_ONCE]:
                    nursery.start_soon(ask, pointer)
            if failures:
                log.warning(
                    "invalid transactions not rolled back", extra={"topic": str(name), "why": failures[0].detail}
                )
                return at + len(pointers[at : at + MAX_AT_ONCE]) - len(failures)
        return len(pointers)

    def _log_report(self, keeper: InvalidList, report: PassReport, took_s: float) -> None:
        """Log the figures; at INFO only if the pass changed something, to avoid a useless line every minute."""
        if report.missed:
            named = ", ".join(map(str, report.missed[:MAX_NAMED]))
            log.warning(
                "invalid pass incomplete, nothing is pruned",
                extra={"topics": len(report.missed), "first": named, "invalid": report.invalid},
            )
            return
        try:
            figures = keeper.pruning()
        except TransactionsUnavailable:
            return
        oldest = min(((pointer, name) for name, pointer in figures.oldest_by_topic.items()), default=None)
        log.log(
            logging.INFO if report.rolled_back or report.pruned else logging.DEBUG,
            "invalid pass complete",
            extra={
                "invalid": report.invalid,
                "rolled_back": report.rolled_back,
                "pruned": report.pruned,
                "safe_bound": figures.safe_bound,
                "oldest_referenced": oldest and oldest[0],
                "oldest_topic": oldest and str(oldest[1]),
                "kept_because": figures.kept_because,
                "took_s": round(took_s, 3),
            },
        )
