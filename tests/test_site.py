"""The API reference has everything that users import, and the documents become a site without broken links."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import site
from tests.documents import DOCUMENTS, ROOT

ZENSICAL = Path(sys.executable).with_name("zensical")


def test_the_api_reference_has_everything_that_users_import():
    import plainsong
    import plainsong.errors
    import plainsong.sql
    import plainsong.testing

    text = "\n".join(text for name, text in DOCUMENTS.items() if name.startswith("docs/reference/"))
    headings = set(re.findall(r"^### (\w+)$", text, re.MULTILINE)) | set(re.findall(r"^ *\* `(\w+)` \(", text, re.M))
    # Names without a heading: values, and classes described only as "the same, with await".
    others = {"BYTES", "TEXT", "JSON", "PlainsongError", "command", "outbox_engine", "OutboxTables", "Relayed"}
    names = {*plainsong.__all__, *plainsong.sql.__all__, *plainsong.testing.__all__, *plainsong.errors.__all__}
    missing = {name for name in names if not name.startswith("Async")} - headings - others
    assert missing <= {"BY_STATUS", "BY_CODE", "Outcome"}


def test_the_sites_navigation_has_every_document_once():
    def paths(entries):
        for entry in entries:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else paths(value)

    listed = list(paths(tomllib.loads(site.CONFIG.read_text(encoding="utf-8"))["project"]["nav"]))
    assert sorted(listed) == sorted(DOCUMENTS), (
        "a new document has a line in etc/zensical.toml, and a place in docs/index.md"
    )


@pytest.mark.skipif(not ZENSICAL.exists(), reason="NOT TESTED: zensical is not installed here")
def test_the_site_is_built_without_a_warning(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/site.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    for name in DOCUMENTS:
        page = tmp_path / "site" / re.sub(r"(README|index)\.md$", "index.md", name)
        text = page.with_suffix(".html").read_text(encoding="utf-8")
        assert "<h1" in text, name
        assert "<p>```" not in text, f"{name}: a block that was not understood"
        assert "<p>| " not in text, f"{name}: a table that was not understood"


def test_addresses_on_the_web_have_one_home():
    for kind in ("client", "server", "spark"):
        project = tomllib.loads((ROOT / f"etc/dist/{kind}/pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert project["urls"] == site.URLS
        text = (ROOT / f"etc/dist/{kind}/README.md").read_text(encoding="utf-8")
        assert set(re.findall(r"https?://(?!127\.)[^)\s\"]+", text)) == {site.HOME, site.URLS["Documentation"]}
    host = site.HOME.removeprefix("https://")
    assert f"@{host}>" in DOCUMENTS["SECURITY.md"]
