"""The input of the commit: commits, and changes to the set of volumes as operations in them.

Plain values. ``storage.leveldb.commit`` carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Delete, Put, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plainsong.protocol.effects import Expect, Operation
    from storage.base import StoreConflict, StoreError
    from storage.leveldb.view import PinnedView
    from storage.leveldb.volume import Volume
    from storage.leveldb.volume_set import View


@dataclass(slots=True)
class MarkDead:
    """All rows of these ranges are dead, and no row will be written there again."""

    table: Table
    ranges: Sequence[tuple[bytes, bytes]]


@dataclass(slots=True)
class ForgetDead:
    """No volume has rows in these dead ranges any longer."""

    ranges: Sequence[tuple[Table, bytes, bytes]]


@dataclass(slots=True)
class Seal:
    """Begin the next volume, if this one is still the newest."""

    volume: Volume
    error: StoreError | None = None
    """Set by the commit if there is no next volume; nothing was sealed."""


@dataclass(slots=True)
class Replace:
    """Replace adjacent sealed volumes with ``target``, or remove them if it is None. The list on disk already says so."""

    sources: Sequence[Volume]
    target: Volume | None
    number: int | None = None
    """Set by the commit: the number of the first set without the sources; None if one of them was not in the set."""


@dataclass(slots=True)
class Pin:
    """Open a view of everything up to this commit."""

    max_s: float
    view: PinnedView | None = None
    """Set by the commit."""


@dataclass(slots=True)
class Unpin:
    """Close a view that has ended."""

    view: View


SetChange = MarkDead | ForgetDead | Seal | Replace | Pin | Unpin
#: The operations of the store's own commits.
Stored = Put | Delete | SetChange


@dataclass(slots=True)
class SealedChange:
    """Rows of sealed volumes that a commit removes or rolls back; for the keeper."""

    removed: dict[Volume, list[tuple[Table, bytes]]] = field(default_factory=dict)
    rolled_back: list[tuple[Volume, Sequence[bytes], int]] = field(default_factory=list)
    """Volume, keys of messages, write pointer."""
    made: bool | None = None
    """Set by the keeper: True once the change is durable, False if it failed; None until then."""


@dataclass(eq=False, slots=True)
class PendingWrite:
    """A commit that is queued or being written."""

    operations: Sequence[Operation | Stored]
    expect: Sequence[Expect] = ()
    size: int = 0
    """Approximate bytes; set by ``GroupCommit.begin``."""
    on_completed: Callable[[PendingWrite], object] | None = None
    """Called on the event loop once the commit is durable or has failed; ``error`` is set then."""
    while_syncing: Callable[[], object] | None = None
    """Called on the event loop while the disk syncs, once at most. It must not raise."""
    error: StoreError | StoreConflict | None = None
    rest: Sequence[Operation | Stored] = ()
    """Operations that a long rollback left; the submitter begins them as another commit."""
    change: SealedChange | None = None
    """Changes of sealed volumes that the keeper makes before the commit completes."""
    is_with_keeper: bool = False
    """True once the keeper has the commit; the keeper reports it then."""
    on_changed: Callable[[PendingWrite], object] | None = None
    """Called in the keeper's thread once it has made ``change`` or failed; ``error`` is set then."""
    is_rest: bool = False
    """True if these operations are the rest of an earlier commit."""
    completed: Callable[[StoreError | StoreConflict | None], object] | None = None
    """The submitter's own callback."""
