"""What of a commit takes place in one moment, and what follows it.

Batch      all puts, and removals of metadata, as they have to be in the end
removals   of messages and payloads, behind it: nobody can see those rows any more
rollback   behind those; what comes after it in the commit is the next part
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.effects import Delete, Put, RollBack, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from protocol.effects import Operation


class Batch:
    """Puts of a commit between two rollbacks."""

    def __init__(self) -> None:
        self.rows: list[Put] = []
        """Of messages and payloads."""
        self.metadata: dict[bytes, bytes | None] = {}
        """Rows of the metadata table, as the last operation on each has them; None: gone."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was taken."""
        return not (self.rows or self.metadata)


class Part:
    """A batch, and what is done when it has taken place."""

    def __init__(self) -> None:
        self.batch = Batch()
        self.removals: list[Delete] = []
        self.rollback: RollBack | None = None
        self._gone: set[tuple[Table, bytes]] = set()

    def take(self, operation: Operation) -> bool:
        """Take an operation in; False: it has to come after all that this part has."""
        if self.rollback is not None:
            return False
        if isinstance(operation, RollBack):
            self.rollback = operation
        elif operation.table is Table.METADATA:
            self._take_metadata(operation)
        elif isinstance(operation, Delete):
            self.removals.append(operation)
            self._gone.update((operation.table, key) for key in operation.keys)
        elif self._gone and any(
            (operation.table, operation.prefix + each) in self._gone for each in operation.suffixes
        ):
            return False
        else:
            self.batch.rows.append(operation)
        return True

    def _take_metadata(self, operation: Put | Delete) -> None:
        if isinstance(operation, Delete):
            self.batch.metadata.update(dict.fromkeys(operation.keys))
            return
        keys = (operation.prefix + suffix for suffix in operation.suffixes)
        self.batch.metadata.update(zip(keys, operation.values, strict=True))


def parts(commit: Sequence[Operation]) -> Iterator[Part]:
    """A commit as parts that are done one after the other; most often there is one."""
    part = Part()
    for operation in commit:
        if not part.take(operation):
            yield part
            part = Part()
            part.take(operation)
    yield part
