"""Makes pytest rewrite the assertions of the store contracts, as it does in test files."""

import pytest

pytest.register_assert_rewrite("tests.storage.contract", "tests.storage.rolling_contract")
