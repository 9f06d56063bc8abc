"""The tables as a script makes them, for deployments where the daemon may not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from plainsong.protocol.effects import Table
from storage.base import StoreUnusable
from storage.hbase.store import HBaseStore
from storage.hbase.tables import Tables
from tests.hbase.conftest import OPTIONS
from tests.hbase.test_hbase_owners import NAME, rows, values

SCRIPTED = replace(OPTIONS, table_prefix="scripted_", create_tables=False)


def run_script(hbase, regions):
    return hbase.run_script("tables.rb", PLAINSONG_TABLE_PREFIX=SCRIPTED.table_prefix, PLAINSONG_REGIONS=regions)


async def test_the_script_makes_the_tables_that_a_store_wants_in_regions_and_may_be_run_again(hbase, store):
    with pytest.raises(StoreUnusable, match="HBase has no table scripted_metadata"):
        await HBaseStore.open([hbase.address], SCRIPTED)
    for said in ("scripted_messages made, 4 regions", "scripted_messages is there"):
        ran = await trio.to_thread.run_sync(run_script, hbase, "4")
        assert ran.returncode == 0, ran.stderr
        assert said in ran.stdout
    made, ours = Tables(SCRIPTED.table_prefix), Tables(OPTIONS.table_prefix)
    for table, regions in ((Table.METADATA, 1), (Table.MESSAGE, 4), (Table.PAYLOAD, 4)):
        found = await store._pool.call("getTableRegions", made[table])
        starts = [bytes([256 * number // regions]) for number in range(1, regions)]
        assert sorted(region.startKey for region in found) == [b"", *starts]
        described, wanted = [await store._pool.call("getColumnDescriptors", each[table]) for each in (made, ours)]
        assert vars(described[b"d:"]) == vars(wanted[b"d:"])
    async with await HBaseStore.open([hbase.address], SCRIPTED) as scripted:
        await scripted.write([rows(Table.MESSAGE, b"m", 1)], claim=await scripted.claim(NAME))
        assert await values(scripted) == [b"m"]
    assert await values(store) == []


def test_the_script_refuses_a_number_of_regions_that_the_hash_does_not_have(hbase):
    ran = run_script(hbase, "257")
    assert ran.returncode != 0
    assert "hint: 1 to 256" in ran.stderr
