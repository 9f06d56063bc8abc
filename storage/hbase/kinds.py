"""Of which kinds a topic has system rows: said in its head's row, so that who opens it need not look for the others.

    cell k           kinds are said in this row: from the first claim on
    cell k kind:u8   there may be rows of this kind; never taken back

A commit that puts the first row of a kind puts the cell along with it, before the head is moved. So whoever finds a
head finds the kinds of everything that counts by it: a claim, which reads the row and then replaces the head that it
has read, knows which kinds the topic does not have. Cells that are put late only say too much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.keys import HIGH_WATER, POINTER, PRODUCER, PRODUCERS, READER, SYSTEM
from storage.hbase.packed import FAMILY

if TYPE_CHECKING:
    from collections.abc import Mapping

KINDS = FAMILY + b":k"
SAID = b"\x01"
#: Those that are asked for when a topic is opened.
ALL = frozenset((HIGH_WATER, READER, POINTER, PRODUCER, PRODUCERS))


def kind_of(key: bytes) -> bytes | None:
    """The kind of a row of the metadata table; None: it is no system row."""
    return key[1:2] if key.startswith(SYSTEM) else None


def are_said(columns: Mapping[bytes, bytes]) -> bool:
    """Whether a head's row says which kinds there are."""
    return KINDS in columns


def kinds_in(columns: Mapping[bytes, bytes]) -> set[bytes]:
    """Those of which there may be rows."""
    return {column[len(KINDS) :] for column in columns if column.startswith(KINDS) and column != KINDS}
