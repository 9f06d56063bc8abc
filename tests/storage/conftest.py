"""Has pytest rewrite the contracts' assertions as in test files."""

import pytest

pytest.register_assert_rewrite("tests.storage.contract", "tests.storage.rolling_contract")
