"""Rewrites the contracts' assertions, as pytest does for test files."""

import pytest

pytest.register_assert_rewrite("tests.storage.contract", "tests.storage.rolling_contract")
