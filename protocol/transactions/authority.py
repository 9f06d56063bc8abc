"""Who decides transactions, as far as a topic needs to know: the daemon's own service, a Tephra, or nobody."""

from __future__ import annotations

from typing import Literal, Protocol

#: What an authority says of a pointer. ``committed`` and ``aborted`` are durable, so that its rows may be forgotten.
#: ``deciding``: its commit is under way; nothing may be added or rolled back any more, nothing is forgotten yet. One
#: that is being aborted is ``invalid`` until it is ``aborted``. ``unknown``: not issued by it.
Standing = Literal["in_progress", "deciding", "committed", "aborted", "invalid", "unknown"]


class Authority(Protocol):
    """What is known about write pointers; asked on the event loop, never waits."""

    def standing(self, pointer: int) -> Standing:
        """What became of a pointer, a checkpoint's or a transaction's first."""
        ...


class Nobody:
    """No transaction service: every pointer is its clients' own business."""

    def standing(self, pointer: int) -> Standing:
        """Always unknown."""
        del pointer
        return "unknown"
