"""Payload rows that a cut-off commit left: nobody was told of them, so what is stored again must not stand beside them.

Stores that write a commit row by row may lose the row about a pointer and keep payload rows behind the last one it
speaks of. Who sent those sends them again, under later positions, and a publish of both would show them twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.effects import Delete, Table
from protocol.keys import payload_prefix, stop_after

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.topic.state import TopicState
    from protocol.topic.step import Step


def torn_ranges(state: TopicState) -> Iterator[tuple[bytes, bytes]]:
    """``[start, stop)`` of payload keys of which no row was ever spoken of, and which more may yet follow."""
    for pending in state.pending.values():
        over = pending.rolled_back or pending.orphaned or pending.published is not None
        if pending.last_stored is not None and not over:
            prefix = payload_prefix(state.name, state.living_or_last().generation, pending.pointer)
            yield prefix + pending.last_stored + b"\x00", stop_after(prefix)


def remove_torn_payloads(state: TopicState, step: Step) -> None:
    """Take away those that were found, before anything is stored behind them."""
    step.write(Delete(Table.PAYLOAD, state.torn_payloads))
    state.torn_payloads = []
