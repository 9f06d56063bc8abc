"""The settings of the store on HBase: the section ``storage.hbase``."""

from __future__ import annotations

from dataclasses import dataclass

from storage.settings import KIB, MIB, addresses, count, file_name, seconds, size, switch, text

#: Bytes of a cell's bound reserved for its head and a key.
_CELL_MARGIN = 1 << 10
#: A prefix: optionally a namespace of HBase, and the beginning of a table's name.
_TABLE_PREFIX = r"(?:[A-Za-z0-9_]\w*:)?(?:[A-Za-z0-9_][\w.-]*)?"


@dataclass(frozen=True, slots=True)
class HBaseConfig:
    """Tables in HBase, if storage.kind is hbase."""

    thrift: str = addresses(
        "127.0.0.1:9090",
        "HBase's Thrift gateways (Thrift 1, started with -f), comma-separated. If one is down, the next is used.",
    )
    table_prefix: str = text(
        "plainsong_",
        "Prefix of the names of the three tables, so that deployments can share one HBase; it may begin with a "
        "namespace of HBase, as in prod:plainsong_.",
        pattern=_TABLE_PREFIX,
        expected="letters, digits, _, - and ., after a namespace and a colon or after nothing",
    )
    timeout_s: float = seconds(
        30.0,
        "Time limit of a call to HBase with all its attempts; after it the answer is 503 with an unknown outcome. If "
        "all connections are in use, a call first waits as long for a free one; if it gets none, nothing has "
        "happened.",
        small="a region that moves, or a pause of a region server, fails requests",
        large="requests wait this long while HBase is down",
        low=0.1,
        high=3_600.0,
    )
    max_connections: int = count(
        16,
        "Maximum connections to all gateways together; each carries one call at a time, and further calls wait.",
        small="calls wait for connections, and some time out",
        large="a gateway needs a thread for each connection, and refuses connections beyond its own limit",
        low=2,
        high=10_000,
    )
    max_cell_bytes: int = size(
        9 * MIB,
        "Maximum size of a cell; it must stay below hbase.client.keyvalue.maxsize (10 MiB by default) and below the "
        "gateways' max_frame_size_in_mb.",
        small="commits need more cells, and large messages are refused",
        large="HBase refuses the cell, and publishes fail",
        low=256 * KIB,
        high=256 * MIB,
    )
    create_tables: bool = switch(
        True,
        "Create missing tables with one region each. A deployment needs many regions, with which etc/hbase/tables.rb "
        "creates them.",
    )
    tls: bool = switch(False, "Use TLS to the gateways, or to the proxies that terminate it for them.")
    tls_ca: str = file_name("PEM file with the certificate authorities of the gateways.")
    tls_certificate: str = file_name("PEM file with the certificate to present to the gateways; empty: none.")
    tls_key: str = file_name("PEM file with the key of that certificate.")

    @property
    def max_row_bytes(self) -> int:
        """The largest row: a cell's bound minus its head."""
        return self.max_cell_bytes - _CELL_MARGIN
