"""SIGHUP: all components that read files check them at once."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, NoReturn

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class Reloads:
    """The callbacks of SIGHUP."""

    def __init__(self) -> None:
        self._looks: list[Callable[[], object]] = []

    def add(self, look: Callable[[], object]) -> None:
        """Call ``look`` at each SIGHUP, on the event loop; it must not raise."""
        self._looks.append(look)

    def remove(self, look: Callable[[], object]) -> None:
        """Stop calling ``look``."""
        self._looks.remove(look)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Wait for signals, until cancelled; started once SIGHUP no longer ends the process."""
        with trio.open_signal_receiver(signal.SIGHUP) as signals:
            task_status.started()
            async for _ in signals:
                log.info("checking files again", extra={"signal": "SIGHUP"})
                for look in list(self._looks):
                    look()
        raise AssertionError("signals do not end")
