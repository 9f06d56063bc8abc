"""One HBase for all tests of this ring, and stores on empty tables."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from plainsong.protocol.effects import Table
from storage.hbase.scan import ScanRange, first_rows
from storage.hbase.settings import HBaseOptions
from storage.hbase.store import HBaseStore
from storage.hbase.tables import Tables
from tests.hbase_server import HBase, why_not

# Before the first of them is imported: their assertions explain themselves, as in ``tests/storage``.
pytest.register_assert_rewrite("tests.storage.contract", "tests.storage.rolling_contract")

OPTIONS = HBaseOptions(table_prefix="contract_", timeout_s=20.0)


@pytest.fixture(scope="session")
def hbase(tmp_path_factory):
    lacking = why_not()
    if lacking is not None:
        pytest.skip(lacking)
    with HBase(tmp_path_factory.mktemp("hbase")) as server:
        yield server


@pytest.fixture
async def store(hbase):
    async with await HBaseStore.open([hbase.address], OPTIONS) as opened:
        await empty(opened)
        yield opened


@pytest.fixture
async def others(hbase, store, monkeypatch):
    """Four more instances on the tables of ``store``, which has just found that the gateway takes its largest frames."""
    async with AsyncExitStack() as stack:
        with monkeypatch.context() as patched:
            # 18 MiB each, in the client and in the gateway, for each of hundreds of stores.
            patched.setattr("storage.hbase.tables._send_a_large_frame", _send_none)
            opened = [
                await stack.enter_async_context(await HBaseStore.open([hbase.address], OPTIONS)) for _ in range(4)
            ]
        yield opened


async def _send_none(gateway: object, max_cell_bytes: int) -> None:
    pass


async def empty(store: HBaseStore) -> None:
    """Remove every row."""
    tables = Tables(OPTIONS.table_prefix)
    for table in Table:
        wanted = ScanRange(tables[table], b"", b"")
        while found := await first_rows(store._pool, wanted, 1000, timeout_s=20):
            for row in found:
                await store._pool.call("deleteAllRow", tables[table], row.key, {})
