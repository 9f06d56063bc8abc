"""What a step writes about the topic itself: rows about write pointers and producers, and the high-water mark.

Message rows, then pointer rows, then producer rows, then the mark: if a power cut leaves the rows without what is said about them,
the next load finds them behind the mark and says it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.effects import Delete, Put, Table
from protocol.errors import Overloaded
from protocol.keys import POINTER, pointer_key, pointer_suffix, system_key
from protocol.topic.pending import Pending
from protocol.topic.producers.rows import write_changed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.topic.state import TopicState
    from protocol.topic.step import Step

#: Rows about decided pointers that may wait for a commit to remove them; beyond, they get one of their own.
MAX_FORGOTTEN = 1024


def touch(state: TopicState, step: Step, pointer: int) -> Pending:
    """What the topic knows about ``pointer``, from now on something, to be changed: its row is written with the step.

    Raises:
      Overloaded: the topic has as many undecided pointers as it may.
    """
    pending = state.pending.get(pointer)
    if pending is None:
        if len(state.pending) >= state.limits.max_pending:
            raise Overloaded(
                f"{len(state.pending)} write pointers are undecided in topic {state.name}",
                hint="have transactions committed or aborted, or raise transactions.max_per_topic",
            )
        pending = state.pending[pointer] = Pending(pointer, state.time_ms, state.time_ms)
        state.forgotten.discard(pointer)
    if not pending.damaged:
        state.changed.add(pointer)
    step.pointers.add(pointer)
    return pending


def forget(state: TopicState, pending: Pending) -> None:
    """The pointer is no concern of the topic any more; its row goes with a later commit."""
    del state.pending[pending.pointer]
    if pending.staged_by is not None and state.staged.get(pending.staged_by) == pending.pointer:
        del state.staged[pending.staged_by]
    state.stored_bytes -= pending.stored_bytes
    state.changed.discard(pending.pointer)
    if not pending.damaged:
        state.forgotten.add(pending.pointer)


def write_pointers_among(pointers: Iterable[int]) -> set[int]:
    """Those that are transactions': nobody but the topic is to hear of what is staged."""
    return {pointer for pointer in pointers if pointer > 0}


def write_pointers(state: TopicState, step: Step) -> None:
    """Write the rows of pointers that have changed, each once, and remove those of the forgotten."""
    step.flush()
    if state.changed:
        rows = sorted((pointer_suffix(pointer), state.pending[pointer].encode()) for pointer in state.changed)
        prefix = system_key(POINTER, state.name, state.living_or_last().generation)
        step.write(Put(Table.METADATA, prefix, [row[0] for row in rows], [row[1] for row in rows]))
        step.pointers |= write_pointers_among(state.changed)
        state.changed.clear()
    for removal in removals(state, step):
        step.write(removal)


def removals(state: TopicState, step: Step) -> list[Delete]:
    """What removes the rows of forgotten pointers, to be written with this step."""
    if not state.forgotten:
        return []
    generation = state.living_or_last().generation
    keys = [pointer_key(state.name, generation, pointer) for pointer in sorted(state.forgotten)]
    step.dropped += write_pointers_among(state.forgotten)
    state.forgotten.clear()
    return [Delete(Table.METADATA, keys)]


def forget_all(state: TopicState, step: Step) -> list[Delete]:
    """The generation is gone for good, and with it what was known about its pointers: what removes their rows."""
    for pending in list(state.pending.values()):
        forget(state, pending)
    return removals(state, step)


def write_mark(state: TopicState, step: Step) -> None:
    """Write what has to stand before the high-water mark, then the mark."""
    write_pointers(state, step)
    write_changed(state, step)
    step.write(state.mark())
