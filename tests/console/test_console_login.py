"""A daemon with authentication: pasted tokens stay in the tab; forbidden actions are disabled and say why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from os import environ
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from selenium.webdriver import Chrome

from tests.console.screen import ARRIVES, LATE, Screen, showing
from tests.daemon.harness import PLAINSONG, Daemon

GRANTS = """
format = 1
[[grant]]
to = ["ops", "passing"]
verbs = ["all"]
on = ["*:*", "system:*", "service"]
[[grant]]
to = ["looker"]
verbs = ["inspect"]
on = ["shop:*", "service"]
"""


@dataclass
class Guarded:
    """A daemon that requires authentication, with its tokens by name."""

    daemon: Daemon
    file: Path
    tokens: dict[str, str]

    def revoke(self, name: str) -> None:
        command = [str(PLAINSONG), "token", "revoke", "--name", name, "--yes", "--file", str(self.file)]
        subprocess.run(command, check=True, capture_output=True)


def token(file: Path, name: str) -> str:
    command = [str(PLAINSONG), "token", "create", "--name", name, "--expires", "1d", "--file", str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def call(daemon: Daemon, token: str, method: str, path: str, body: bytes) -> None:
    url = "http://{}:{}{}".format(*daemon.address, path)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    urlopen(Request(url, body, headers, method=method)).close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    file, grants = folder / "tokens.json", folder / "grants.toml"
    grants.write_text(GRANTS)
    tokens = {name: token(file, name) for name in ("ops", "passing", "looker")}
    sets = (f"security.tokens_file={file}", f"security.grants_file={grants}", "security.authentication=required")
    with Daemon(folder / "data", *sets) as daemon:
        call(daemon, tokens["ops"], "PUT", "/v1/namespaces/shop/topics/orders", b"{}")
        call(daemon, tokens["ops"], "POST", "/v1/namespaces/shop/topics/orders/publish", b'{"messages": ["secret"]}')
        yield Guarded(daemon, file, tokens)


@pytest.fixture
def page(browser: Chrome, guarded: Guarded) -> Iterator[Screen]:
    with showing(browser, "http://{}:{}".format(*guarded.daemon.address)) as screen:
        yield screen


def log_in(page: Screen, token: str) -> None:
    page.type("login-token", token)
    page.click("login-submit")


def test_a_token_opens_the_requested_page(page: Screen, guarded: Guarded):
    page.open("/console/topics/shop/orders?view=hex", "login-token")
    assert page.accessibility() == []
    page.gone("message-row")
    log_in(page, guarded.tokens["ops"])
    page.one("message-row")
    assert page.path == "/console/topics/shop/orders?view=hex"
    page.says("who", "ops")
    page.says("connection", "live")
    # Another page in the same tab.
    page.open("/console/cluster", "instance-row")


def test_copied_commands_take_the_token_from_the_environment(page: Screen, guarded: Guarded, tmp_path: Path):
    page.open("/console/topics/shop/orders", "login-token")
    log_in(page, guarded.tokens["ops"])
    page.click("message-row")
    curl = page.one("copy-curl").get_attribute("title")
    python = page.one("copy-python").get_attribute("title")
    assert "psg_" not in f"{curl}{python}"
    environment = {**environ, "PLAINSONG_TOKEN": guarded.tokens["ops"]}
    program = tmp_path / "program.py"
    program.write_text(str(python))
    for command, says in ((["bash", "-c", f"{curl} -s"], b"secret"), ([sys.executable, program], b"b'secret'\n")):
        assert subprocess.run(command, capture_output=True, check=True, env=environment).stdout == says


def test_a_token_stays_in_its_tab_and_out_of_every_url(page: Screen, guarded: Guarded):
    page.open("/console", "login-token")
    log_in(page, guarded.tokens["ops"])
    page.one("topic-row")
    assert page.run("return sessionStorage.getItem('plainsong-token')") == guarded.tokens["ops"]
    assert page.run("return Object.values(localStorage)") == []
    assert page.run("return document.cookie") == ""
    asked = page.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert not [each for each in asked if "psg_" in each]
    page.click("logout")
    page.one("login-token")
    assert page.run("return sessionStorage.getItem('plainsong-token')") is None


def test_a_wrong_token_is_refused_and_forgotten(page: Screen, guarded: Guarded):
    page.open("/console", "login-token")
    token = guarded.tokens["ops"]
    log_in(page, token[:-1] + ("1" if token.endswith("0") else "0"))
    page.one("login-error")
    assert page.run("return sessionStorage.getItem('plainsong-token')") is None
    log_in(page, guarded.tokens["ops"])
    page.one("topic-row")


def test_a_late_refusal_of_a_request_sent_before_the_login_does_not_log_the_user_out(page: Screen, guarded: Guarded):
    with page.scripted(LATE + "window.late = '/v1/whoami';"):
        page.open("/console", "login-token")
    page.until("whoami is refused", lambda: page.run("return window.arrive !== null"))
    log_in(page, guarded.tokens["ops"])
    page.one("topic-row")
    page.run(ARRIVES)
    assert not page.all("login-token")
    assert page.all("topic-row")


def test_a_late_refusal_of_an_earlier_token_does_not_discard_the_newer_one(page: Screen, guarded: Guarded):
    with page.scripted(LATE):
        page.open("/console", "login-token")
    with page.late("/v1/whoami", lambda: log_in(page, "psg_wrong")):
        log_in(page, guarded.tokens["ops"])
        page.one("topic-row")
    assert page.run("return sessionStorage.getItem('plainsong-token')") == guarded.tokens["ops"]
    page.click("refresh")
    page.says("who", "ops")
    assert not page.all("login-token")


def test_a_revoked_token_leads_to_the_login_and_then_back_to_the_page(page: Screen, guarded: Guarded):
    page.open("/console/topics/shop/orders", "login-token")
    log_in(page, guarded.tokens["passing"])
    page.one("message-row")
    guarded.revoke("passing")
    page.says("login-error", "revoked")
    page.says("connection", "paused")  # not "away": the daemon answers
    page.until("the old name is not shown", lambda: page.one("who").text == "")
    log_in(page, guarded.tokens["ops"])
    page.one("message-row")
    assert page.path == "/console/topics/shop/orders"


def test_forbidden_actions_are_disabled_and_name_the_verb_they_need(page: Screen, guarded: Guarded):
    page.open("/console/topics/shop/orders", "login-token")
    log_in(page, guarded.tokens["looker"])
    page.one("message-row")
    page.says("who", "looker")
    page.until("the button is disabled", lambda: not page.one("topic-delete").is_enabled())
    assert page.one("topic-delete").get_attribute("title") == "needs the verb admin on shop:orders"
    assert not page.one("preview").is_enabled()
    assert "secret" not in page.text()
    page.click("message-row")
    page.until("the page names the missing verb", lambda: "needs the verb poll" in page.text())
    page.open("/console/audit")
    page.says("error", "system:audit")


def test_the_audit_page_shows_who_changed_what(page: Screen, guarded: Guarded):
    call(guarded.daemon, guarded.tokens["ops"], "PUT", "/v1/namespaces/shop/topics/prices", b"{}")
    page.open("/console/audit", "login-token")
    log_in(page, guarded.tokens["ops"])
    page.until(
        "the creation is listed",
        lambda: [
            row
            for row in page.all("audit-row")
            if all(word in row.text for word in ("ops", "topic.create", "shop:prices", "applied"))
        ],
    )
    page.click("audit-row")
    page.until("the record is shown", lambda: '"requestId"' in page.text())
    assert page.accessibility() == []
