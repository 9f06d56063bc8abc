"""Who decides transactions, as far as a topic needs to know: the daemon's own service, a Tephra, or nobody."""

from __future__ import annotations

from typing import Literal, Protocol

#: What an authority says of a pointer. ``aborted`` and ``committed`` hold from the moment the decision is under
#: way; ``unknown``: never issued by it, or forgotten.
Standing = Literal["in_progress", "committed", "aborted", "invalid", "unknown"]


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
