"""Requests to a core, each with the type of its answer, and the rows that a core wants written.

A core never writes. It returns the operations of one *commit*; the actor makes them durable in one ``Store.write``,
and only then gives the answers that depend on them. One operation carries many rows: an object for each message's
row would cost more than the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

A = TypeVar("A")


class Ask(Generic[A]):
    """A request whose answer is an ``A``. ``size``: its bytes, as counted against the limit of a mailbox."""

    __slots__ = ()
    size = 0


class Table(IntEnum):
    """The three tables of a store. The number is the first byte of a key on LevelDB."""

    METADATA = 1
    MESSAGE = 2
    PAYLOAD = 3


@dataclass(slots=True)
class Put:
    """Rows to store: ``prefix + suffixes[i]`` → ``values[i]``, in ascending key order.

    A key of the message table is written once only; a store that several owners can write to puts it if absent.
    Rows of the metadata table may be replaced.
    """

    table: Table
    prefix: bytes
    suffixes: Sequence[bytes]
    values: Sequence[bytes]
    size: int | None = field(default=None, compare=False)
    """The bytes of all values together, if its maker has counted them."""
    may_expire: bool = field(default=True, compare=False)
    """True if messages may have their own times to live; False if none has."""

    @property
    def value_bytes(self) -> int:
        """The bytes of all values together."""
        return sum(map(len, self.values)) if self.size is None else self.size


@dataclass(slots=True)
class Delete:
    """Rows to remove; a missing row is not an error."""

    table: Table
    keys: Sequence[bytes]


@dataclass(slots=True)
class RollBack:
    """Negate a write pointer in the message rows of ``[start, stop)`` that carry it.

    Rows under other pointers and rows already rolled back stay as they are, so it may be repeated. The store need not
    change all rows at once: no reader considers the transaction decided before all of them are changed.
    """

    start: bytes
    stop: bytes
    pointer: int
    """The write pointer as in the published rows: above 0."""


#: One operation of a commit. Any prefix of a commit's operations leaves a legal state.
Operation = Put | Delete | RollBack


@dataclass(slots=True)
class Expect:
    """A condition of a commit: the row has this value; ``value`` None: the row is absent."""

    table: Table
    key: bytes
    value: bytes | None


def put_one(table: Table, key: bytes, value: bytes) -> Put:
    """Return the Put of a single row."""
    return Put(table, key, (b"",), (value,))
