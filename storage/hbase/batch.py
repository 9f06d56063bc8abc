"""What takes place in one moment: the puts of a commit, as they have to be in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.effects import Delete, Put, Table

if TYPE_CHECKING:
    from protocol.effects import Operation


class Batch:
    """Puts of a commit between two removals or rollbacks."""

    def __init__(self) -> None:
        self.rows: list[Put] = []
        """Of messages and payloads."""
        self.metadata: dict[bytes, bytes | None] = {}
        """Rows of the metadata table, as the last operation on each has them; None: gone."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was taken."""
        return not (self.rows or self.metadata)

    def take(self, operation: Operation) -> bool:
        """Take an operation in; False: it is none of a batch, and has to come after it."""
        if isinstance(operation, Put) and operation.table is not Table.METADATA:
            self.rows.append(operation)
        elif isinstance(operation, Put):
            keys = (operation.prefix + suffix for suffix in operation.suffixes)
            self.metadata.update(zip(keys, operation.values, strict=True))
        elif isinstance(operation, Delete) and operation.table is Table.METADATA:
            self.metadata.update(dict.fromkeys(operation.keys))
        else:
            return False
        return True
