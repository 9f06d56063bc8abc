"""What an HBase store is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HBaseOptions:
    """Settings of ``storage.hbase``, of the same names."""

    table_prefix: str = "plainsong_"
    """What the names of the three tables start with."""
    timeout_s: float = 30.0
    """How long a call may take, with all its attempts; what has no answer by then is unknown."""
    max_connections: int = 16
    """To gateways, all together."""
    max_cell_bytes: int = 9 << 20
    """The largest cell that HBase takes; its own bound is 10 MiB (hbase.client.keyvalue.maxsize)."""
    create_tables: bool = True
    """Whether missing tables are made; where that is not allowed, ``etc/hbase/tables.rb`` makes them."""
