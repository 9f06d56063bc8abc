"""One HBase for the whole ring; each test has its own tables."""

from __future__ import annotations

import pytest

from tests.hbase_server import HBase, why_not


@pytest.fixture(scope="session")
def hbase(tmp_path_factory):
    lacking = why_not()
    if lacking is not None:
        pytest.skip(lacking)
    with HBase(tmp_path_factory.mktemp("hbase")) as server:
        yield server
