"""A read task: fetches one range of one topic, page by page, and converts each page to an Arrow batch.

A body of frames is heads, payloads and tails that follow each other without a gap:

    head   id:20  [pointer:i64]  size:u32        tail   [size:u32  attributes]

With their bounds, the body itself is an Arrow array of binary values: every column but the attributes is sliced out of
it without a loop over messages. If all messages have the same length, the bounds are computed; otherwise a loop follows
the length fields.
"""

from __future__ import annotations

import logging
import struct
import sys
import time
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema

from plainsong.protocol.frames import FRAMES_END, NO_ATTRIBUTES_PACKED, BrokenFrames, decode_attributes
from pyspark_plainsong.columns import TRANSACTION_COLUMN
from pyspark_plainsong.offsets import after
from pyspark_plainsong.wire import BrokerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql.types import StructType

    from pyspark_plainsong.calls import Calls, FramesPage
    from pyspark_plainsong.partitions import TopicRange
    from pyspark_plainsong.subscription import Losses

log = logging.getLogger("pyspark_plainsong")
#: How long one poll waits if a transaction that was decided when the range was made seems undecided now.
HELD_WAIT_MS = 5_000
_PAUSE_S = 1.0


class Undecided(RuntimeError):
    """A transaction in the range was decided, and is undecided now: the daemon has lost the decision."""


class RangeReader:
    """Reads ranges with the columns of ``schema``.

    Args:
      fetch_size: messages per page; a page becomes one batch.
      patience_s: how long to wait for a transaction service that is not available, or lags.
    """

    def __init__(self, calls: Calls, schema: StructType, losses: Losses, *, fetch_size: int, patience_s: float) -> None:
        self._calls = calls
        self._schema = schema
        self._losses = losses
        self._fetch_size = fetch_size
        self._patience_s = patience_s

    def read(self, part: TopicRange) -> Iterator[pa.RecordBatch]:
        """Yield all messages of the range, in order.

        Raises:
          BrokerError: the daemon did not answer, or refused.
          DataLoss: the topic is gone or was created again, or messages of the range expired before they were read.
          Undecided: the daemon has lost the decision about a transaction in the range.
        """
        batches = FrameBatches(self._schema, self._calls.namespace, part.topic)
        try:
            for body in self._pages(part, batches):
                batch = batches.batch(body)
                if batch.num_rows:
                    yield batch
            self._check(part)
        except BrokerError as error:
            if error.code != "topic_not_found":
                raise
            self._losses.deleted(part.topic)
        finally:
            self._calls.close()  # the next task has a reader of its own

    def _pages(self, part: TopicRange, batches: FrameBatches) -> Iterator[bytes]:
        """Yield the pages of the range. The daemon's limits may cut a page short."""
        at = part.start
        deadline_s = None
        while at < part.end:
            page = self._page(part, at, batches)
            if page.set_aside:
                self._losses.set_aside(part.topic, page.set_aside)
            yield page.body
            moved = page.last_id is not None and page.last_id >= at
            if moved:
                assert page.last_id is not None
                at = after(page.last_id)
                deadline_s = None
            if page.end == "end":
                return
            if page.end == "held" and not moved:
                deadline_s = deadline_s or time.monotonic() + self._patience_s
                if time.monotonic() >= deadline_s:
                    raise Undecided(
                        f"transaction {page.held_by} in topic {part.topic} was decided when this range was planned, "
                        "and no longer is"
                    )

    def _page(self, part: TopicRange, at: bytes, batches: FrameBatches) -> FramesPage:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                return self._calls.poll_frames(
                    part.topic,
                    start=at,
                    end_before=part.end,
                    limit=self._fetch_size,
                    isolation=part.isolation,
                    wait_ms=HELD_WAIT_MS if part.isolation == "committed" else 0,
                    pointers=batches.pointers,
                    attributes=batches.attributes,
                    as_of_ms=part.as_of_ms,
                )
            except BrokerError as error:
                if error.code != "transactions_unavailable" or time.monotonic() >= deadline_s:
                    raise
                log.warning("topic %s waits for the transaction service: %s", part.topic, error)
                time.sleep(_PAUSE_S)

    def _check(self, part: TopicRange) -> None:
        """Check that the range was complete.

        Raises:
          DataLoss: the topic was created again, or messages of the range expired before they were read.
        """
        now = self._calls.standing(part.topic, part.end if part.complete_from is None else part.complete_from)
        if now.generation != part.generation:
            self._losses.recreated(part.topic, part.generation, now.generation)
        elif part.complete_from is not None and now.expired:
            self._losses.expired(part.topic, part.complete_from, now.earliest)


# --- batches ---------------------------------------------------------------------------------------

ROUTING_KEY = "routingKey"
_SIZE = struct.Struct(">I")
_END_BYTES = 24
_US_PER_MS = 1000


class _Cut(NamedTuple):
    """A body cut into messages."""

    messages: int
    heads: pa.Array
    payloads: pa.Array
    tails: pa.Array | None
    """None: no message has attributes."""


class FrameBatches:
    """Converts one topic's frames to record batches with the columns of ``schema``."""

    def __init__(self, schema: StructType, namespace: str, topic: str) -> None:
        self.schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        self._constants = {"namespace": namespace, "topic": topic}
        names = set(self.schema.names)
        #: True if the schema needs frames with pointers.
        self.pointers = TRANSACTION_COLUMN in names
        #: True if the schema needs frames with attributes.
        self.attributes = bool(names & {"routing_key", "headers"})
        self._makers: dict[str, Callable[[_Cut], pa.Array]] = {
            "namespace": lambda cut: self._constant("namespace", cut),
            "topic": lambda cut: self._constant("topic", cut),
            "message_id": lambda cut: pc.binary_slice(cut.heads, 0, 20),
            "publish_timestamp": lambda cut: _timestamps(_numbers(cut.heads, 0, "q")),
            "seq_id": lambda cut: _numbers(cut.heads, 8, "H").cast(pa.int32()),
            "write_timestamp": lambda cut: _timestamps(_null_where_0(_numbers(cut.heads, 10, "q"))),
            "payload_seq_id": _payload_sequence_ids,
            "payload": lambda cut: cut.payloads,
            TRANSACTION_COLUMN: lambda cut: _null_where_0(_numbers(cut.heads, 20, "q")),
        }

    def batch(self, body: bytes) -> pa.RecordBatch:
        """Convert all messages of a complete body, in topic order.

        Raises:
          BrokenFrames: the end is missing, its count is wrong, or bytes follow it.
        """
        cut = self._cut(body)
        attributes = self._attributes(cut) if self.attributes else {}
        columns = [attributes[name] if name in attributes else self._makers[name](cut) for name in self.schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    # --- cutting -------------------------------------------------------------------------------

    def _cut(self, body: bytes) -> _Cut:
        if body[-_END_BYTES:-4] != FRAMES_END:
            raise BrokenFrames(f"cut off: {len(body)} bytes without an end")
        (count,) = _SIZE.unpack_from(body, len(body) - 4)
        head_bytes = 32 if self.pointers else 24
        tail = NO_ATTRIBUTES_PACKED if self.attributes else b""
        bounds = _bounds_alike(body, count, head_bytes, tail)
        if bounds is not None:
            named = False
        else:
            bounds, named = _bounds_walked(body, count, head_bytes, attributes=self.attributes)
        parts = pa.Array.from_buffers(pa.binary(), 3 * count, [None, pa.py_buffer(bounds), pa.py_buffer(body)])
        return _Cut(count, _every_third(parts, 0), _every_third(parts, 1), _every_third(parts, 2) if named else None)

    # --- columns -------------------------------------------------------------------------------

    def _constant(self, name: str, cut: _Cut) -> pa.Array:
        return pa.repeat(pa.scalar(self._constants[name]), cut.messages)

    def _attributes(self, cut: _Cut) -> dict[str, pa.Array]:
        """Return the columns ``routing_key`` and ``headers``. Equal attributes are decoded once per page."""
        kind = (
            self.schema.field("headers").type if "headers" in self.schema.names else pa.map_(pa.string(), pa.string())
        )
        if cut.tails is None:
            return {"routing_key": pa.nulls(cut.messages, pa.string()), "headers": pa.nulls(cut.messages, kind)}
        known: dict[bytes, tuple[str | None, list[tuple[str, str]] | None]] = {}
        keys: list[str | None] = []
        headers: list[list[tuple[str, str]] | None] = []
        for tail in cut.tails.to_pylist():
            found = known.get(tail)
            if found is None:
                found = known[tail] = _key_and_headers(tail[4:])
            keys.append(found[0])
            headers.append(found[1])
        return {"routing_key": pa.array(keys, pa.string()), "headers": pa.array(headers, kind)}


def _bounds_alike(body: bytes, count: int, head_bytes: int, tail: bytes) -> array[int] | None:
    """Return the offsets of all parts if the messages have the same length and no attributes; otherwise None."""
    stop = len(body) - _END_BYTES
    if not count or stop % count:
        return None
    stride = stop // count
    size = stride - head_bytes - len(tail)
    if size < 0:
        return None
    same = [*enumerate(_SIZE.pack(size), head_bytes - 4), *enumerate(tail, head_bytes + size)]
    if any(body[column:stop:stride] != bytes([value]) * count for column, value in same):
        return None
    bounds = array("i", bytes(4 * (3 * count + 1)))
    bounds[0::3] = array("i", range(0, stop + 1, stride))
    bounds[1::3] = array("i", range(head_bytes, stop + 1, stride))
    bounds[2::3] = array("i", range(head_bytes + size, stop + 1, stride))
    return bounds


def _bounds_walked(body: bytes, count: int, head_bytes: int, *, attributes: bool) -> tuple[array[int], bool]:
    """Return the offsets of all parts, and whether any message has attributes. Raises BrokenFrames."""
    stop = len(body) - _END_BYTES
    bounds: list[int] = []
    add = bounds.append
    size_at = _SIZE.unpack_from
    named = False
    at = 0
    try:
        while at < stop:
            add(at)
            at += head_bytes
            add(at)
            at += size_at(body, at - 4)[0]
            add(at)
            if attributes:
                (size,) = size_at(body, at)
                named = named or size > 1
                at += 4 + size
    except struct.error:
        at = -1
    if at != stop or len(bounds) != 3 * count:
        raise BrokenFrames(f"the end at byte {stop} counts {count} messages, but {len(bounds) // 3} precede it")
    add(stop)
    return array("i", bounds), named


def _every_third(parts: pa.Array, first: int) -> pa.Array:
    return parts.take(_thirds(first, len(parts)))


@lru_cache(8)
def _thirds(first: int, stop: int) -> pa.Array:
    """Return the indexes of every third part; cached, since most pages have the same size."""
    return pa.array(range(first, stop, 3), pa.int32())


def _numbers(heads: pa.Array, at: int, kind: str) -> pa.Array:
    """Decode the big-endian number at byte ``at`` of every head; ``kind`` is a type code of ``array``, q or H."""
    found = array(kind)
    data = pc.binary_slice(heads, at, at + found.itemsize)
    buffer = data.buffers()[2]
    found.frombytes(memoryview(buffer)[: len(heads) * found.itemsize] if buffer is not None else b"")
    if sys.byteorder == "little":
        found.byteswap()
    return pa.Array.from_buffers(pa.int64() if kind == "q" else pa.uint16(), len(heads), [None, pa.py_buffer(found)])


def _timestamps(milliseconds: pa.Array) -> pa.Array:
    return pc.multiply(milliseconds, _US_PER_MS).cast(pa.timestamp("us", "UTC"))


def _null_where_0(numbers: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(numbers, 0), pa.scalar(None, numbers.type), numbers)


def _payload_sequence_ids(cut: _Cut) -> pa.Array:
    """Return payload sequence ids; null for 0 in a message that was not stored before its publish."""
    counted = _numbers(cut.heads, 18, "H").cast(pa.int32())
    plain = pc.and_(pc.equal(counted, 0), pc.equal(_numbers(cut.heads, 10, "q"), 0))
    return pc.if_else(plain, pa.scalar(None, pa.int32()), counted)


def _key_and_headers(packed: bytes) -> tuple[str | None, list[tuple[str, str]] | None]:
    """Decode the routing key and the other attributes; None for each that is missing."""
    attributes: dict[str, Any] = decode_attributes(packed)
    key = attributes.pop(ROUTING_KEY, None)
    return key, list(attributes.items()) or None
