"""Every test named in docs/stores.md exists."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_that_the_page_about_stores_names_exists():
    page = (HERE.parents[1] / "docs" / "stores.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\btest_[a-z_0-9]+\b(?!\.py)", page))
    there = {
        name
        for folder in (HERE, HERE.parent / "hbase", HERE.parent / "schedules")
        for path in folder.glob("*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
    }
    assert named
    assert named <= there
