"""The rows that a topic writes about itself, from which the next load starts: pointers, producers, high-water mark.

They are written in this order, after the message rows of the step. If a power cut loses the later ones, the next load
reconstructs them from the message rows after the old mark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.protocol.effects import Delete, Put, Table, put_one
from plainsong.protocol.errors import Overloaded
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import POINTER, PRODUCER, PRODUCERS, pointer_key, pointer_suffix, system_key
from plainsong.protocol.topic.pending import Pending, transactional_pointers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plainsong.protocol.topic.producer_state import DeduplicationRecord, Producer
    from plainsong.protocol.topic.state import Now, TopicState
    from plainsong.protocol.topic.step import Step


def write_mark(state: TopicState, step: Step) -> None:
    """Write pointer rows, producer rows and the high-water mark."""
    write_pointers(state, step)
    write_changed_producers(state, step)
    step.write(state.mark())


def last_position(state: TopicState) -> bytes | None:
    """Return the last position assigned to a row of the topic; None before the first."""
    last = state.sequence
    return None if last.last_sequence_id < 0 else pack_position(last.last_ts_ms, last.last_sequence_id)


# --- when a snapshot of the producers is due -------------------------------------------------------


def schedule_snapshot(state: TopicState, now: Now) -> None:
    """Set the time at which changed producers are written, even if nothing else is written by then."""
    state.producers.due_s = now.mono_s + state.limits.snapshot_interval_ms / 1000


# --- write pointers --------------------------------------------------------------------------------


#: Rows about decided pointers are removed by the next commit; beyond this number they get a separate commit.
MAX_FORGOTTEN = 1024


def touch_pointer(state: TopicState, step: Step, pointer: int) -> Pending:
    """Return the topic's entry for ``pointer``, created if necessary. The step writes its row, so it may be changed.

    Raises:
      Overloaded: the topic has the maximum number of undecided pointers.
    """
    pending = state.pending.get(pointer)
    if pending is None:
        if len(state.pending) >= state.limits.max_pending:
            raise Overloaded(
                f"{len(state.pending)} write pointers are undecided in topic {state.name}",
                hint="commit or abort transactions, or raise transactions.max_per_topic",
            )
        pending = state.pending[pointer] = Pending(pointer, state.time_ms, state.time_ms)
        state.forgotten.discard(pointer)
    if not pending.damaged:
        state.changed.add(pointer)
    step.pointers.add(pointer)
    return pending


def forget_pointer(state: TopicState, pending: Pending) -> None:
    """Forget a pointer; a later commit removes its row."""
    del state.pending[pending.pointer]
    if pending.staged_by is not None and state.staged.get(pending.staged_by) == pending.pointer:
        del state.staged[pending.staged_by]
    state.stored_bytes -= pending.stored_bytes
    state.changed.discard(pending.pointer)
    if not pending.damaged:
        state.forgotten.add(pending.pointer)


def write_pointers(state: TopicState, step: Step) -> None:
    """Write the rows of changed pointers, each once, and remove those of forgotten ones."""
    if state.changed:
        rows = {pointer_suffix(pointer): state.pending[pointer].encode() for pointer in state.changed}
        prefix = system_key(POINTER, state.name, state.living_or_last().generation)
        suffixes = sorted(rows)
        step.write(Put(Table.METADATA, prefix, suffixes, list(map(rows.__getitem__, suffixes))))
        step.pointers |= transactional_pointers(state.changed)
        state.changed.clear()
    for removal in pointer_removals(state, step):
        step.write(removal)


def pointer_removals(state: TopicState, step: Step) -> list[Delete]:
    """Return the operations that remove the rows of forgotten pointers, which must be part of this step."""
    if not state.forgotten:
        return []
    generation = state.living_or_last().generation
    keys = [pointer_key(state.name, generation, pointer) for pointer in sorted(state.forgotten)]
    step.dropped += transactional_pointers(state.forgotten)
    state.forgotten.clear()
    return [Delete(Table.METADATA, keys)]


def forget_all_pointers(state: TopicState, step: Step) -> list[Delete]:
    """Forget the pointers of a permanently deleted generation; return the operations that remove their rows."""
    for pending in list(state.pending.values()):
        forget_pointer(state, pending)
    return pointer_removals(state, step)


def carry_pointers(state: TopicState, step: Step, generation: int, created_ms: int) -> list[Delete]:
    """Replace the pointers of a deleted generation with entries in the next one that refuse writes under them.

    Otherwise a transaction could lose its first messages with the old generation, publish the rest in the next one,
    and commit half of its messages. Returns the operations that remove the rows of the old generation; the new rows
    are written by this step, and must precede the metadata row.
    """
    undecided = [each for each in state.pending.values() if each.pointer > 0 and not each.decided]
    removals = forget_all_pointers(state, step)
    rows = []
    for each in undecided:
        since_ms = min(each.since_ms, created_ms - 1)  # marks it as carried, for ``admit_pointer``
        carried = state.pending[each.pointer] = Pending(each.pointer, since_ms, each.used_ms, rolled_back=True)
        rows.append((pointer_suffix(each.pointer), carried.encode()))
        step.pointers.add(each.pointer)
    if rows:
        rows.sort()
        prefix = system_key(POINTER, state.name, generation)
        step.write(Put(Table.METADATA, prefix, [row[0] for row in rows], [row[1] for row in rows]))
    return removals


# --- producers -------------------------------------------------------------------------------------


def write_producer(state: TopicState, step: Step, producer: Producer) -> None:
    """Write one producer's row in this step."""
    key = system_key(PRODUCER, state.name, state.living_or_last().generation, producer.name.encode())
    step.write(put_one(Table.METADATA, key, producer.encode()))


def write_changed_producers(state: TopicState, step: Step) -> None:
    """Write the rows of all changed producers; the mark must follow, so that replay begins after both."""
    producers = state.producers
    if producers.changed:
        rows = sorted((name.encode(), producers.known[name].encode()) for name in producers.changed)
        prefix = system_key(PRODUCER, state.name, state.living_or_last().generation)
        step.write(Put(Table.METADATA, prefix, [row[0] for row in rows], [row[1] for row in rows]))
    if producers.record_changed and producers.record is not None:
        write_producers_record(state, step, producers.record)
    producers.snapshot_written(last_position(state), state.time_ms)


def write_producers_record(state: TopicState, step: Step, record: DeduplicationRecord) -> None:
    """Write the row that records whether producers are remembered."""
    producers = state.producers
    producers.record, producers.record_changed = record, False
    key = system_key(PRODUCERS, state.name, state.living_or_last().generation)
    step.write(put_one(Table.METADATA, key, record.encode()))


def delete_producers(state: TopicState, step: Step, names: Iterable[str]) -> None:
    prefix = system_key(PRODUCER, state.name, state.living_or_last().generation)
    keys = sorted(prefix + name.encode() for name in names)
    if keys:
        step.write(Delete(Table.METADATA, keys))
