"""One HBase for all tests of this ring, and stores on empty tables."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio

from plainsong.protocol.effects import Table
from storage.hbase.gateway import thrift
from storage.hbase.pool import Pool
from storage.hbase.scan import ScannedRow, ScanRange, first_rows
from storage.hbase.settings import HBaseConfig
from storage.hbase.store import HBaseStore
from storage.hbase.tables import Tables
from tests.hbase_server import HBase, why_not

# Must run before the contracts' first import, so that their assertions are rewritten, as in ``tests/storage``.
pytest.register_assert_rewrite("tests.storage.contract", "tests.storage.rolling_contract")

OPTIONS = HBaseConfig(table_prefix="contract_", timeout_s=20.0)


@pytest.fixture(scope="session")
def hbase(tmp_path_factory):
    lacking = why_not()
    if lacking is not None:
        pytest.skip(lacking)
    with HBase(tmp_path_factory.mktemp("hbase")) as server:
        yield server


@pytest.fixture(scope="session")
def tables(hbase):
    """The options for the tables of ``store``, at a gateway that has accepted the largest frame."""

    async def open_and_close() -> None:
        async with await HBaseStore.open([hbase.address], OPTIONS):
            pass

    trio.run(open_and_close)


async def open_stores(hbase, count: int, stack: AsyncExitStack) -> list[HBaseStore]:
    """Open stores on the same tables without checking the largest frame: 18 MiB each in client and gateway."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("storage.hbase.tables._send_a_large_frame", _send_none)
        return [await stack.enter_async_context(await HBaseStore.open([hbase.address], OPTIONS)) for _ in range(count)]


@pytest.fixture
async def store(hbase, tables):
    async with AsyncExitStack() as stack:
        (opened,) = await open_stores(hbase, 1, stack)
        await empty(opened)
        yield opened


@pytest.fixture
async def others(hbase, store):
    """Four more instances on the tables of ``store``."""
    async with AsyncExitStack() as stack:
        yield await open_stores(hbase, 4, stack)


async def _send_none(gateway: object, max_cell_bytes: int) -> None:
    pass


async def empty(store: HBaseStore) -> None:
    """Remove every row."""
    tables = Tables(OPTIONS.table_prefix)
    for table in Table:
        wanted = ScanRange(tables[table], b"", b"")
        while found := await first_rows(store._pool, wanted, 1000, timeout_s=20):
            await remove(store._pool, found, tables[table])


async def remove(pool: Pool, found: list[ScannedRow], table: bytes) -> None:
    """Delete all cells of these rows in one call."""
    batches = [
        thrift.BatchMutation(
            row=row.key, mutations=[thrift.Mutation(isDelete=True, column=each) for each in row.columns]
        )
        for row in found
    ]
    await pool.call("mutateRows", table, batches, {})
