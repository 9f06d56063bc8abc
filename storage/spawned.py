"""Spawns tasks for calls that begin without waiting, and implements ``Store.begin`` for stores that need a task."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from plainsong.protocol.effects import Expect, Operation
    from storage.base import Claim


def in_task(call: Callable[[], Awaitable[None]], completed: Callable[[Exception | None], object]) -> None:
    """Run ``call`` in a system task, then call ``completed`` with its error or None. It cannot be cancelled."""
    trio.lowlevel.spawn_system_task(_run, call, completed)


async def _run(call: Callable[[], Awaitable[None]], completed: Callable[[Exception | None], object]) -> None:
    failed: Exception | None = None
    with trio.CancelScope(shield=True):
        try:
            await call()
        except Exception as error:  # noqa: BLE001  # passed to the caller
            failed = error
    completed(failed)


class SpawnsWrites:
    """``Store.begin`` for a store whose ``write`` needs a task: spawns one for each commit."""

    @property
    def writes_inline(self) -> bool:
        """See ``Store.writes_inline``."""
        return False

    @property
    def is_idle(self) -> bool:
        """See ``Store.is_idle``."""
        return False

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        """See ``Store.write``."""
        raise NotImplementedError

    def begin(
        self,
        commit: Sequence[Operation],
        completed: Callable[[Exception | None], object],
        *,
        claim: Claim,
        while_syncing: Callable[[], object] | None = None,
    ) -> None:
        """See ``Store.begin``. An error of a closed store is reported as the commit's."""
        del while_syncing
        in_task(partial(self.write, commit, claim=claim), completed)

    def gather_writes(self) -> None:
        """See ``Store.gather_writes``. There are none to gather."""

    def write_gathered(self) -> None:
        """See ``Store.write_gathered``."""
