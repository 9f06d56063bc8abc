"""The settings of a store in HBase: where it is, and how much is asked of it."""

from __future__ import annotations

from dataclasses import dataclass

from broker.config.meaning import KIB, MIB, addresses, count, seconds, size, switch, text

#: A namespace of HBase's own, and what its table names may begin with.
_TABLE_PREFIX = r"(?:[A-Za-z0-9_]\w*:)?(?:[A-Za-z0-9_][\w.-]*)?"


@dataclass(frozen=True, slots=True)
class HBaseConfig:
    """Tables in HBase, where storage.kind is hbase."""

    thrift: str = addresses(
        "127.0.0.1:9090",
        "HBase's Thrift gateways (Thrift 1, started with -f), parted by commas; when one is gone the next is asked.",
    )
    table_prefix: str = text(
        "plainsong_",
        "What the names of the three tables start with, by which deployments share one HBase; "
        "with a namespace of HBase in front where there is one, as in prod:plainsong_.",
        pattern=_TABLE_PREFIX,
        expected="letters, digits, _, - and ., behind a namespace and a colon or nothing",
    )
    timeout_s: float = seconds(
        30.0,
        "How long a call to HBase may take with all its attempts; after it the answer is 503 and nobody knows.",
        small="a region that moves, or a pause of a region server, fails requests",
        large="requests wait for as long when HBase is gone",
        low=0.1,
        high=3_600.0,
    )
    max_connections: int = count(
        16,
        "Connections to the gateways, all together; each has one call under way, further ones wait.",
        small="calls wait for each other",
        large="a gateway has a thread for each, and turns away what is beyond its own bound",
        low=2,
        high=10_000,
    )
    max_cell_bytes: int = size(
        9 * MIB,
        "The largest cell; it must stay below hbase.client.keyvalue.maxsize (10 MiB where nothing is said) and below "
        "the gateways' max_frame_size_in_mb.",
        small="commits take more cells, and large messages are refused",
        large="HBase refuses the cell, and publishes fail",
        low=256 * KIB,
        high=256 * MIB,
    )
    create_tables: bool = switch(
        True,
        "Whether tables that are missing are made, with one region each; "
        "etc/hbase/tables.rb makes them with many, which a deployment wants.",
    )
