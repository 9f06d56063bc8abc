"""The tables created by the script, for deployments where the daemon may not create them."""

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
from tests.hbase_server import ROOT

SCRIPTED = replace(OPTIONS, table_prefix="scripted_", create_tables=False)
#: Runs the script for each number of regions in one JRuby, whose start takes longer than the script.
RUNS = """
%w[257 4 4].each do |regions|
  ENV['PLAINSONG_REGIONS'] = regions
  begin
    load ENV['TABLES']
    puts 'ended with 0'
  rescue SystemExit => e
    puts "ended with #{e.status}"
  end
end
"""


def run_script(hbase, script):
    script.write_text(RUNS)
    tables = str(ROOT / "etc/hbase/tables.rb")
    return hbase.run_script(script, PLAINSONG_TABLE_PREFIX=SCRIPTED.table_prefix, TABLES=tables)


async def test_the_script_refuses_more_regions_than_hashes_makes_the_tables_that_a_store_wants_and_may_be_run_again(
    hbase, store, tmp_path
):
    with pytest.raises(StoreUnusable, match="HBase has no table scripted_metadata"):
        await HBaseStore.open([hbase.address], SCRIPTED)
    ran = await trio.to_thread.run_sync(run_script, hbase, tmp_path / "runs.rb")
    assert ran.returncode == 0, ran.stderr
    # If JRuby is downloaded first, Maven's output comes before everything, without a final newline.
    refused, first, again, _ = ran.stdout.split("ended with ")
    assert ("scripted_" in refused, first[0], again[0]) == (False, "1", "0"), ran.stdout
    assert "hint: 1 to 256" in ran.stderr
    assert "scripted_messages made, 4 regions" in first
    assert "scripted_messages is there" in again
    assert ran.stdout.endswith("ended with 0\n")
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
