"""HBase, held to the page of every store."""

from __future__ import annotations

from storage.base import Store, StoreError
from tests.storage.contract import StoreContract
from tests.storage.rolling_contract import RollingContract


class TestHBaseStore(StoreContract):
    def break_next_write(self, store: Store) -> None:
        commit = store._owners.commit

        async def fail(claim: object) -> None:
            store._owners.commit = commit
            raise StoreError("no gateway answers")

        store._owners.commit = fail


class TestRollingOnHBase(RollingContract):
    break_next_write = TestHBaseStore.break_next_write
