"""HBase fulfils the contract of every store."""

from __future__ import annotations

from storage.base import Store, StoreError
from tests.storage.contract import StoreContract
from tests.storage.rolling_contract import RollingContract


class TestHBaseStore(StoreContract):
    def break_next_write(self, store: Store) -> None:
        owners = store._owners
        commit, check = owners.commit, owners.check

        async def fail(claim: object) -> None:
            owners.commit, owners.check = commit, check
            raise StoreError("no gateway answers")

        owners.commit = owners.check = fail


class TestRollingOnHBase(RollingContract):
    break_next_write = TestHBaseStore.break_next_write
