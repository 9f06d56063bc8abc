"""The console's files: which are served, with which headers, and without references to other origins."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import get_args

import pytest
from broker_in_process import in_process

from broker.api.operations.console import FILES, files
from plainsong.protocol.answers.topics import TopicColumn

PAGES = [
    "/console",
    "/console/topics/ns/t",
    "/console/transactions",
    "/console/producers/ns/t",
    "/console/cluster",
    "/console/audit",
    "/console/lineage",
]
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
#: Our own files; vendored packages are not checked.
SOURCES = {path: path.read_text(encoding="utf-8") for path in FILES.rglob("*.*") if path.parent.name != "vendor"}


@pytest.mark.parametrize("path", [*PAGES, "/console/transactions?open=17&state=invalid"])
async def test_every_page_can_be_loaded_directly(daemon, path):
    answer = await daemon.http.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert '<script type="module" src="/console/main.js">' in answer.text


@pytest.mark.parametrize("name", sorted(files()))
async def test_every_file_has_its_type_and_restrictive_headers(daemon, name):
    answer = await daemon.http.get(f"/console/{name}")
    assert answer.content == (FILES / name).read_bytes()
    assert {key: answer.headers[key] for key in HEADERS} == HEADERS
    if name.endswith((".js", ".mjs")):
        assert answer.headers["content-type"] == "text/javascript; charset=utf-8"


async def test_a_cached_file_is_not_sent_again(daemon):
    etag = (await daemon.http.get("/console/main.js")).headers["etag"]
    again = await daemon.http.get("/console/main.js", headers={"If-None-Match": f'"other", {etag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert {key: again.headers[key] for key in HEADERS} == HEADERS
    assert "content-length" not in again.headers
    other = await daemon.http.get("/console/main.js", headers={"If-None-Match": '"other"'})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path", ["/console/none.js", "/console/topics/ns", "/console/../api.js", "/console/%2e%2e/assemble.py"]
)
async def test_nothing_but_pages_and_files_is_served(daemon, path):
    await daemon.call("GET", path, status=404, code="not_found")


@pytest.mark.parametrize(("query", "method"), [("", "GET"), ("", "HEAD"), ("?q=a%26b&sort=name", "GET")])
async def test_a_slash_after_the_first_page_redirects_to_it(daemon, query, method):
    answer = await daemon.http.request(method, f"/console/{query}")
    assert (answer.status_code, answer.content) == (308, b"")
    assert answer.headers["location"] == f"/console{query}"
    assert {key: answer.headers[key] for key in HEADERS} == HEADERS
    await daemon.call("POST", "/console/", status=405, code="method_not_allowed")


BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_browser_at_the_root_is_redirected_to_the_console_and_any_other_client_finds_nothing_there(
    daemon, method
):
    answer = await daemon.http.request(method, "/", headers=BROWSER)
    assert (answer.status_code, answer.headers["location"], answer.content) == (307, "/console", b"")
    assert {key: answer.headers[key] for key in HEADERS} == HEADERS
    for headers in ({}, {"Accept": "*/*"}):
        answer = await daemon.call("GET", "/", status=404, code="not_found", headers=headers)
        assert "the console is at /console" in answer.json()["hint"]


async def test_when_switched_off_a_browser_at_the_root_finds_nothing():
    async with in_process(console__enabled=False) as daemon:
        await daemon.call("GET", "/", status=404, code="not_found", headers=BROWSER)


async def test_when_switched_off_there_is_no_console():
    async with in_process(console__enabled=False) as daemon:
        for path in (*PAGES, "/console/", "/console/main.js"):
            await daemon.call("GET", path, status=404, code="not_found")


def test_the_columns_of_the_overview_are_those_that_the_daemon_sorts_by():
    page = (FILES / "pages/overview.js").read_text(encoding="utf-8")
    listed = re.search(r"const COLUMNS = \[(.*?)\];", page, re.DOTALL)[1]
    assert re.findall(r'\["(\w+)"', listed) == [*get_args(TopicColumn)]


def test_the_console_is_smaller_than_300_kib():
    assert sum(len(file.content) for file in files().values()) < 300 * 1024


def test_no_file_is_left_out():
    tracked = subprocess.run(
        ["git", "ls-files", "."], cwd=FILES, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    assert set(tracked) <= set(files())


def test_no_file_names_another_host():
    named = {
        (path.name, found)
        for path, text in SOURCES.items()
        for found in re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"'`]*", text)
    }
    assert named == {("icon.svg", "http://www.w3.org/2000/svg")}


def test_no_markup_is_built_from_data():
    for path, text in SOURCES.items():
        if path.suffix == ".js":
            found = re.findall(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySetInnerHTML|\beval\(|new Function",
                text,
            )
            assert not found, path.name


def test_every_import_resolves_to_a_file():
    for path, text in SOURCES.items():
        for found in re.findall(r'^import .*? from "([^"]+)";|^} from "([^"]+)";', text, re.MULTILINE):
            assert (path.parent / "".join(found)).resolve().is_file(), (path.name, found)


def test_every_module_begins_with_a_description():
    for path, text in SOURCES.items():
        if path.suffix == ".js":
            assert re.match(r"// [A-Z][^\n]+", text), path.name


def test_third_party_files_have_their_licence_next_to_them():
    vendored = Path(FILES / "vendor")
    modules = sorted(path.stem for path in vendored.glob("*.mjs"))
    assert modules == ["htm", "preact"]
    for name in modules:
        assert (vendored / f"{name}.LICENSE").stat().st_size > 500
        assert f"`{name}.mjs`" in (vendored / "README.md").read_text(encoding="utf-8")
