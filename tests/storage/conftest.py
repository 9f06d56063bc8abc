"""The contract's assertions explain themselves like those of any test file."""

import pytest

pytest.register_assert_rewrite("tests.storage.contract", "tests.storage.rolling_contract")
