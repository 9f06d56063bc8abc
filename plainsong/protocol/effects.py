"""What a core takes and gives: requests, each with the type of its answer; rows to write, one commit at a time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

A = TypeVar("A")


class Ask(Generic[A]):
    """A request whose answer is an ``A``. ``size`` is what it holds in memory, in bytes, as far as it counts."""

    __slots__ = ()
    size = 0


# --- effects ---------------------------------------------------------------------------------------
#
# What the core asks of the world: rows to write, one commit at a time.
#
# The core never writes. It returns the operations of a *commit*; the actor makes them durable in one
# ``Store.write``, and only then gives the answers that depend on them. Operations carry many rows at once, since a
# row of its own object per message would cost more than the row.


class Table(IntEnum):
    """The three tables of the seeds. The number is the first byte of a key on LevelDB."""

    METADATA = 1
    MESSAGE = 2
    PAYLOAD = 3


@dataclass(slots=True)
class Put:
    """Rows to store: ``prefix + suffixes[i]`` → ``values[i]``, in ascending key order.

    Rows of the message table are written once and never again under the same key; a store that other
    owners could write to puts them if absent. Rows of the metadata table may be replaced.
    """

    table: Table
    prefix: bytes
    suffixes: Sequence[bytes]
    values: Sequence[bytes]


@dataclass(slots=True)
class Delete:
    """Rows to remove; those that are not there are no error."""

    table: Table
    keys: Sequence[bytes]


@dataclass(slots=True)
class RollBack:
    """Turn the sign of a write pointer in those message rows of ``[start, stop)`` that carry it.

    Rows of others and rows already rolled back stay as they are, so it may be done again. The rows need not
    change in one moment: until all have, nobody takes the transaction for decided.
    """

    start: bytes
    stop: bytes
    pointer: int
    """As it was published: above 0."""


#: One operation of a commit. Any prefix of a commit's operations leaves a legal state.
Operation = Put | Delete | RollBack


@dataclass(slots=True)
class Expect:
    """What a row must hold for the commit to happen; ``value`` None: the row must be absent."""

    table: Table
    key: bytes
    value: bytes | None


def put_one(table: Table, key: bytes, value: bytes) -> Put:
    """A single row to store."""
    return Put(table, key, (b"",), (value,))
