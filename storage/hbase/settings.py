"""The options of the HBase store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

#: Bytes of a cell's bound that its own head, and a key in it, may take.
_CELL_MARGIN = 1 << 10


@dataclass(frozen=True, slots=True)
class HBaseOptions:
    """Settings of ``storage.hbase``, of the same names."""

    table_prefix: str = "plainsong_"
    """The prefix of the names of the three tables."""
    timeout_s: float = 30.0
    """How long a call may take, all attempts together; without an answer by then its outcome is unknown.

    While all connections are in use it waits for one before, at most for as long again; then nothing has happened.
    """
    max_connections: int = 16
    """To all gateways together; at least two, since a scan keeps one while calls about its rows are made."""
    max_cell_bytes: int = 9 << 20
    """The largest cell; HBase's own bound is 10 MiB (hbase.client.keyvalue.maxsize)."""
    create_tables: bool = True
    """Whether to create missing tables; where that is not allowed, ``etc/hbase/tables.rb`` creates them."""
    tls: Callable[[], ssl.SSLContext] | None = None
    """Gives the context of each new connection, so that renewed certificates are followed; None: no TLS."""
    gone_kept_s: float = 86_400.0
    """How long cells that say that a row is gone are kept; not a setting."""

    @property
    def max_row_bytes(self) -> int:
        """The largest row: a cell has a head in front of it."""
        return self.max_cell_bytes - _CELL_MARGIN
