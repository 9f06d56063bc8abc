"""One step of a topic: the rows it writes, those about the topic itself last, and whom to answer once they are durable.

One step of a topic: what it wants written, and whom to answer once that is durable.

    operations   first, in this order, as one commit
    answers      then, and only then
    looks        then too, against the watermark that the commit moved

If the commit fails, none of it is said: the actor falls, and everybody learns that the outcome is unknown.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Delete, Put, Table, put_one
from plainsong.protocol.errors import Overloaded
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import POINTER, PRODUCER, PRODUCERS, pointer_key, pointer_suffix, system_key
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.topic.row_batch import RowBatch

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from plainsong.protocol.effects import Operation
    from plainsong.protocol.errors import PlainsongError
    from plainsong.protocol.topic.asks import Look
    from plainsong.protocol.topic.producers import DeduplicationRecord, Producer
    from plainsong.protocol.topic.state import TopicState


class Step:
    """The outcome of one step, in the order in which it has to happen."""

    __slots__ = (
        "_payloads",
        "_prefix",
        "_roll",
        "answers",
        "dropped",
        "looks",
        "messages",
        "operations",
        "pointers",
        "producers",
        "renewed",
        "rolled_back",
        "rolls",
        "since",
        "told",
    )

    def __init__(self, since: bytes) -> None:
        #: The bound from which on the messages of this commit are all there is.
        self.since = since
        self.operations: list[Operation] = []
        self.answers: list[tuple[Hashable, object | PlainsongError]] = []
        self.looks: list[tuple[Hashable, Look]] = []
        #: Messages of the commit in wire form, for the scan cache, with their generation's key prefix.
        self.rolls: list[tuple[bytes, RowBatch]] = []
        #: The topic was created, deleted or brought back: nothing cached before is true any more.
        self.renewed = False
        #: Write pointers that this commit writes rows under, or about.
        self.pointers: set[int] = set()
        #: What it rolls back: pointer, first and last position (10 bytes each).
        self.rolled_back: list[tuple[int, bytes, bytes]] = []
        #: Messages that it publishes.
        self.messages = 0
        #: Write pointers about which the topic has no row any more.
        self.dropped: list[int] = []
        #: Producers whose messages are among them.
        self.producers: list[Producer] = []
        #: What became of requests of producers and of producers themselves, counted by words of ours: ``duplicate``,
        #: ``partial``, ``unremembered``, ``expired``, ``evicted``, ``removed``.
        self.told: Counter[str] = Counter()
        self._payloads: list[Put] = []
        self._roll: RowBatch | None = None
        self._prefix = b""

    def roll(self, prefix: bytes) -> RowBatch:
        """Where message rows of this commit gather; all of one generation."""
        if self._roll is None or self._prefix != prefix:
            self.flush()
            self._roll, self._prefix = RowBatch(), prefix
        return self._roll

    def keep(self, payloads: Put) -> None:
        """Rows of the payload table, which stand before the message rows that speak of them."""
        self._payloads.append(payloads)

    def flush(self) -> None:
        """Put the gathered rows in their place among the operations."""
        self.operations += self._payloads
        self._payloads.clear()
        if self._roll is not None and len(self._roll):
            self.operations.append(Put(Table.MESSAGE, self._prefix, self._roll.suffixes, self._roll.values))
            self.rolls.append((self._prefix, self._roll))
        self._roll = None

    def write(self, operation: Operation) -> None:
        """Add an operation after everything gathered so far."""
        self.flush()
        self.operations.append(operation)


# --- bookkeeping -----------------------------------------------------------------------------------
#
# What a step writes about the topic itself: rows about write pointers and producers, and the high-water mark.
#
# Message rows, then pointer rows, then producer rows, then the mark: if a power cut leaves the rows without what is
# said about them, the next load finds them behind the mark and says it again.


#: Rows about decided pointers that may wait for a commit to remove them; beyond, they get one of their own.
MAX_FORGOTTEN = 1024


def touch_pointer(state: TopicState, step: Step, pointer: int) -> Pending:
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


def forget_pointer(state: TopicState, pending: Pending) -> None:
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
    for removal in pointer_removals(state, step):
        step.write(removal)


def pointer_removals(state: TopicState, step: Step) -> list[Delete]:
    """What removes the rows of forgotten pointers, to be written with this step."""
    if not state.forgotten:
        return []
    generation = state.living_or_last().generation
    keys = [pointer_key(state.name, generation, pointer) for pointer in sorted(state.forgotten)]
    step.dropped += write_pointers_among(state.forgotten)
    state.forgotten.clear()
    return [Delete(Table.METADATA, keys)]


def forget_all_pointers(state: TopicState, step: Step) -> list[Delete]:
    """The generation is gone for good, and with it what was known about its pointers: what removes their rows."""
    for pending in list(state.pending.values()):
        forget_pointer(state, pending)
    return pointer_removals(state, step)


def write_mark(state: TopicState, step: Step) -> None:
    """Write what has to stand before the high-water mark, then the mark."""
    write_pointers(state, step)
    write_changed_producers(state, step)
    step.write(state.mark())


# --- rows ------------------------------------------------------------------------------------------
#
# Writing what is known of producers: their rows before the high-water mark, so that replay begins behind both.


def last_position(state: TopicState) -> bytes | None:
    """The last position given out in the topic; None before the first."""
    last = state.sequence
    return None if last.last_sequence_id < 0 else pack_position(last.last_ts_ms, last.last_sequence_id)


def write_producer(state: TopicState, step: Step, producer: Producer) -> None:
    """Write one producer's row now."""
    key = system_key(PRODUCER, state.name, state.living_or_last().generation, producer.name.encode())
    step.write(put_one(Table.METADATA, key, producer.encode()))


def write_changed_producers(state: TopicState, step: Step) -> None:
    """Write the rows of all producers that have changed; the mark follows."""
    book = state.producers
    if book.changed:
        rows = sorted((name.encode(), book.known[name].encode()) for name in book.changed)
        prefix = system_key(PRODUCER, state.name, state.living_or_last().generation)
        step.write(Put(Table.METADATA, prefix, [row[0] for row in rows], [row[1] for row in rows]))
    if book.record_changed and book.record is not None:
        write_producers_record(state, step, book.record)
    book.noted(last_position(state), state.time_ms)


def write_producers_record(state: TopicState, step: Step, record: DeduplicationRecord) -> None:
    """Write, now, whether producers are remembered."""
    book = state.producers
    book.record, book.record_changed = record, False
    key = system_key(PRODUCERS, state.name, state.living_or_last().generation)
    step.write(put_one(Table.METADATA, key, record.encode()))


def delete_producers(state: TopicState, step: Step, names: Iterable[str]) -> None:
    """Remove producers' rows."""
    prefix = system_key(PRODUCER, state.name, state.living_or_last().generation)
    keys = sorted(prefix + name.encode() for name in names)
    if keys:
        step.write(Delete(Table.METADATA, keys))
