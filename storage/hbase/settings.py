"""The options of the HBase store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

#: Bytes of a cell's bound reserved for its head and a key.
_CELL_MARGIN = 1 << 10


@dataclass(frozen=True, slots=True)
class HBaseOptions:
    """Settings of ``storage.hbase``, with the same names."""

    table_prefix: str = "plainsong_"
    """The prefix of the names of the three tables."""
    timeout_s: float = 30.0
    """Total time for all attempts of a call. Without an answer by then, its outcome is unknown.

    Before that, a call may wait this long for a free connection; if that fails, nothing has happened.
    """
    max_connections: int = 16
    """Across all gateways; at least two, since a scan keeps one during calls about its rows."""
    max_cell_bytes: int = 9 << 20
    """The largest cell; HBase's own bound is 10 MiB (hbase.client.keyvalue.maxsize)."""
    create_tables: bool = True
    """True to create missing tables; if that is not permitted, ``etc/hbase/tables.rb`` creates them."""
    tls: Callable[[], ssl.SSLContext] | None = None
    """Returns the context of each new connection, so that renewed certificates take effect; None: no TLS."""
    gone_kept_s: float = 86_400.0
    """Minimum age of cells that mark removed rows before they are removed. Not a user setting."""

    @property
    def max_row_bytes(self) -> int:
        """The largest row: a cell's bound minus its head."""
        return self.max_cell_bytes - _CELL_MARGIN
