"""What an HBase store is told."""

from __future__ import annotations

from dataclasses import dataclass

#: What a cell's own head, and a key in it, may take of its bound.
_CELL_MARGIN = 1 << 10


@dataclass(frozen=True, slots=True)
class HBaseOptions:
    """Settings of ``storage.hbase``, of the same names."""

    table_prefix: str = "plainsong_"
    """What the names of the three tables start with."""
    timeout_s: float = 30.0
    """How long a call may take, with all its attempts; what has no answer by then is unknown."""
    max_connections: int = 16
    """To gateways, all together; two at least, since a scan keeps one while calls about its rows are made."""
    max_cell_bytes: int = 9 << 20
    """The largest cell that HBase takes; its own bound is 10 MiB (hbase.client.keyvalue.maxsize)."""
    create_tables: bool = True
    """Whether missing tables are made; where that is not allowed, ``etc/hbase/tables.rb`` makes them."""
    gone_kept_s: float = 86_400.0
    """How long cells that say that a row is gone are kept; no setting."""

    @property
    def max_row_bytes(self) -> int:
        """The largest row: a cell has a head of its own in front of it."""
        return self.max_cell_bytes - _CELL_MARGIN
