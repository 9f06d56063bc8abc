"""Rolling back what a write pointer has in a topic: the sign of its rows is turned, and they stay where they are.

Stores may take a rollback in several steps. So what the commit has said until then is written before it, and that
it happened behind it: cut off in between, it is found undone, and can be done again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.effects import RollBack
from protocol.errors import TransactionNotInProgress
from protocol.ids import pack_position
from protocol.topic.admission import check_pointer, too_old
from protocol.topic.bookkeeping import touch, write_pointers
from protocol.topic.enlisted import close, standing_to_roll_back

if TYPE_CHECKING:
    from protocol.topic.pointer_asks import RollBackPointer
    from protocol.topic.state import Now, TopicState
    from protocol.topic.step import Step


def roll_back(state: TopicState, step: Step, ask: RollBackPointer, now: Now) -> None:
    """Roll back rows of the pointer: those within the range, or all there are, and then none may follow.

    Raises:
      TopicNotFound, InvalidParameter, TransactionNotInProgress (it was committed), NotEnlisted, Overloaded: nothing
      happened.
    """
    del now
    if ask.by_client:
        state.living()
    elif state.metadata is None:
        return
    check_pointer(ask.pointer)
    if not ask.by_client:
        close(state, (ask.pointer,))
    elif standing_to_roll_back(state, ask.pointer) in ("deciding", "committed"):
        raise TransactionNotInProgress(
            f"write pointer {ask.pointer} is committed, or about to be", hint="what was committed cannot be rolled back"
        )
    if ask.within is None:
        _roll_back_all(state, step, ask)
    else:
        _roll_back_range(state, step, ask.pointer, *ask.within)


def _roll_back_all(state: TopicState, step: Step, ask: RollBackPointer) -> None:
    pending = state.pending.get(ask.pointer)
    if pending is None and (
        not ask.by_client or too_old(state, ask.pointer) or state.authority.standing(ask.pointer) == "aborted"
    ):
        return  # there is nothing, and what could follow is refused anyway
    if pending is not None and pending.rolled_back:
        return
    write_pointers(state, step)
    pending = touch(state, step, ask.pointer)
    for run in pending.runs:
        _turn(state, step, ask.pointer, run.first, run.last)
    pending.no_runs()
    pending.rolled_back = True


def _roll_back_range(state: TopicState, step: Step, pointer: int, first: bytes, last: bytes) -> None:
    pending = state.pending.get(pointer)
    if pending is None:
        # Its rows may have outlived what was known about them.
        _turn(state, step, pointer, first, last)
        return
    write_pointers(state, step)
    parts = pending.cut(first, last)
    if parts:
        touch(state, step, pointer)
    for part in parts:
        _turn(state, step, pointer, *part)


def _turn(state: TopicState, step: Step, pointer: int, first: bytes, last: bytes) -> None:
    """Turn the sign of the pointer in rows ``first`` to ``last``, of those that have been given out by now."""
    if state.sequence.last_sequence_id < 0:
        return
    last = min(last, pack_position(state.sequence.last_ts_ms, state.sequence.last_sequence_id))
    if first <= last:
        step.write(RollBack(state.prefix + first, state.prefix + last + b"\x00", pointer))
        step.rolled_back.append((pointer, first, last))
