"""A daemon with authentication, as its users see it: real processes, real files, with and without front ends."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time

import pytest
from joserfc import jwt
from joserfc.jwk import RSAKey

from tests.daemon.harness import Daemon, eventually, run_plainsong
from tests.patience import PATIENCE_S

GRANTS = """format = 1
[[grant]]
to = ["operator"]
verbs = ["all"]
on = ["*:*", "system:*", "service"]
[[grant]]
to = ["shop"]
verbs = ["publish", "poll"]
on = ["shop:orders"]
"""
ORDERS = "/v1/namespaces/shop/topics/orders"


def run(folder, *words, code=0):
    done = run_plainsong(*words, cwd=folder)
    assert done.returncode == code, done.stderr
    return done.stdout.strip()


class Caller:
    """A persistent connection that sends a name's token."""

    def __init__(self, daemon, token):
        self.connection = http.client.HTTPConnection(*daemon.address, timeout=2 * PATIENCE_S)
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        daemon.callers.append(self)

    def ask(self, method, path, body=None):
        headers = {**self.headers, "Content-Type": "application/json"}
        self.connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = self.connection.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content.startswith((b"{", b"[")) else content


@pytest.fixture(params=[1, 2], ids=["one process", "front ends"])
def daemon(request, tmp_path):
    (tmp_path / "grants.toml").write_text(GRANTS)
    (tmp_path / "grants.toml").chmod(0o600)
    made = ("token", "create", "--file", "tokens.json", "--expires", "1d", "--name")
    tokens = {name: run(tmp_path, *made, name) for name in ("operator", "shop")}
    settings = {
        "security.authentication": "required",
        "security.tokens_file": tmp_path / "tokens.json",
        "security.grants_file": tmp_path / "grants.toml",
        "http.processes": request.param,
        "metrics.open": "true",
    }
    sets = [f"{name}={value}" for name, value in settings.items()]
    with Daemon(tmp_path / "data", *sets) as running:
        running.tokens = tokens
        running.folder = tmp_path
        running.callers = []
        yield running
        for each in running.callers:
            each.connection.close()


def test_a_revoked_token_is_refused_within_two_seconds_on_open_connections_and_in_parked_polls(daemon):
    operator, shop, waiting = (Caller(daemon, daemon.tokens[name]) for name in ("operator", "shop", "shop"))
    assert operator.ask("PUT", ORDERS)[0] == 200
    assert shop.ask("POST", f"{ORDERS}/publish", {"messages": ["m"]})[0] == 200
    assert shop.ask("DELETE", ORDERS)[0] == 403
    polled = []

    def poll():
        polled.append(waiting.ask("POST", f"{ORDERS}/poll", {"waitMs": 60_000, "startFrom": 4_000_000_000_000}))

    parked = threading.Thread(target=poll)
    parked.start()
    run(daemon.folder, "token", "revoke", "--file", "tokens.json", "--name", "shop", "--yes")
    eventually("it is refused", lambda: shop.ask("POST", f"{ORDERS}/publish", {"messages": ["m"]})[0] != 200)
    parked.join()
    status, problem = polled[0]
    assert (status, problem["code"]) == (401, "unauthenticated")
    assert operator.ask("GET", ORDERS)[0] == 200


def test_sighup_puts_changed_files_in_force(daemon):
    operator = Caller(daemon, daemon.tokens["operator"])
    assert operator.ask("PUT", ORDERS)[0] == 200
    (daemon.folder / "grants.toml").write_text(GRANTS.replace('"publish", "poll"', '"poll"'))
    daemon.signal(signal.SIGHUP)
    shop = Caller(daemon, daemon.tokens["shop"])
    eventually("it is refused", lambda: shop.ask("POST", f"{ORDERS}/publish", {"messages": ["m"]})[0] != 200)
    assert shop.ask("POST", f"{ORDERS}/poll", {})[0] == 200


def test_no_token_is_in_the_log_or_on_the_disk(daemon):
    shop = Caller(daemon, daemon.tokens["shop"])
    for path in (ORDERS, f"{ORDERS}?token={daemon.tokens['shop']}", f"/{daemon.tokens['shop']}"):
        shop.ask("GET", path)
    daemon.stop()
    for token in daemon.tokens.values():
        assert token not in "".join(daemon.lines) + daemon.errors
        for file in daemon.folder.rglob("*"):
            assert not file.is_file() or token.encode() not in file.read_bytes(), file


EVERY_NAME = '[[grant]]\nto = ["*"]\nverbs = ["inspect"]\non = ["service"]\n'


def test_a_request_without_a_name_has_no_grants_of_every_name(daemon):
    (daemon.folder / "grants.toml").write_text(GRANTS + EVERY_NAME)
    daemon.signal(signal.SIGHUP)
    shop, nobody = Caller(daemon, daemon.tokens["shop"]), Caller(daemon, None)
    eventually("it is granted", lambda: shop.ask("GET", "/version")[0] == 200)
    assert nobody.ask("GET", "/readyz") == (200, {"ready": True})
    assert "transactions" in shop.ask("GET", "/readyz")[1]


def test_open_metrics_need_no_name_and_those_of_topics_do(daemon):
    anybody, shop = Caller(daemon, None), Caller(daemon, daemon.tokens["shop"])
    assert [each.ask("GET", "/metrics")[0] for each in (anybody, shop)] == [200, 200]
    assert [each.ask("GET", "/metrics/topics")[0] for each in (anybody, shop)] == [401, 403]


def test_credentials_and_missing_verbs_are_counted(daemon):
    shop, nobody = Caller(daemon, daemon.tokens["shop"]), Caller(daemon, None)
    assert shop.ask("DELETE", ORDERS)[0] == 403
    assert nobody.ask("DELETE", ORDERS)[0] == 401

    def are_counted():
        text = nobody.ask("GET", "/metrics")[1].decode()
        return all(f"\n{series} " in text for series in expected)

    expected = (
        'plainsong_authentications_total{result="missing",via="none"}',
        'plainsong_authentications_total{result="ok",via="token"}',
        'plainsong_forbidden_total{verb="admin"}',
    )
    eventually("they are counted", are_counted)


def test_a_request_from_a_page_of_another_site_is_in_the_audit(daemon):
    operator, page = Caller(daemon, daemon.tokens["operator"]), Caller(daemon, None)
    page.headers = {"Origin": "https://evil.example"}
    assert page.ask("POST", f"{ORDERS}/publish", {"messages": ["m"]})[0] == 403

    def audited():
        status, polled = operator.ask("POST", "/v1/namespaces/system/topics/audit/poll", {})
        return [json.loads(each["payload"]) for each in polled] if status == 200 else []

    found = eventually("the refusal is in the audit", audited)
    assert [(each["action"], each["target"], each["status"]) for each in found] == [("security.refused", "origin", 403)]


@pytest.fixture
def provided(daemon):
    """Return the daemon, restarted with a provider's keys, and a function that creates the provider's tokens."""
    key = RSAKey.generate_key(2048, {"kid": "k"})
    (daemon.folder / "keys.json").write_text(json.dumps({"keys": [key.as_dict(private=False)]}))
    (daemon.folder / "keys.json").chmod(0o600)
    (daemon.folder / "grants.toml").write_text(GRANTS.replace('"shop"', '"shop", "oidc:ann"'))
    settings = {"issuer": "i", "audience": "a", "jwks": daemon.folder / "keys.json", "skew_s": 0}
    daemon.stop()
    for name, value in settings.items():
        daemon.command += ["--set", f"security.oidc.{name}={value}"]
    daemon.start()

    def token(ends_s):
        return jwt.encode({"alg": "RS256", "kid": "k"}, {"iss": "i", "aud": "a", "sub": "ann", "exp": ends_s}, key)

    daemon.token_of_ann = token
    return daemon


def test_an_expired_token_of_a_provider_is_refused_on_open_connections_and_in_parked_polls(provided):
    operator = Caller(provided, provided.tokens["operator"])
    assert operator.ask("PUT", ORDERS)[0] == 200
    ends_s = int(time.time()) + 8  # enough for one publish
    ann, waiting = (Caller(provided, provided.token_of_ann(ends_s)) for _ in range(2))
    published = ann.ask("POST", f"{ORDERS}/publish", {"messages": ["m"]})
    assert published[0] == 200, published
    polled = waiting.ask("POST", f"{ORDERS}/poll", {"waitMs": 60_000, "startFrom": 4_000_000_000_000})
    assert (polled[0], polled[1]["detail"]) == (401, "the token has expired")
    assert time.time() < ends_s + 40  # long before the wait would end
    assert ann.ask("POST", f"{ORDERS}/publish", {"messages": ["m"]})[0] == 401


@pytest.mark.parametrize(
    ("mode", "why"), [(0o666, "can be written by its group or by others"), (0o644, "can be read by all users")]
)
def test_a_daemon_does_not_start_with_a_file_that_others_can_write_or_with_tokens_that_they_can_read(
    tmp_path, mode, why
):
    (tmp_path / "tokens.json").write_text('{"format": 1, "tokens": []}')
    (tmp_path / "tokens.json").chmod(mode)
    words = ["serve", "--data-dir", "data", "--bind", "127.0.0.1:0", "--set", "security.authentication=required"]
    done = run_plainsong(*words, "--set", "security.tokens_file=tokens.json", cwd=tmp_path, timeout_s=PATIENCE_S)
    assert done.returncode == 2
    assert why in done.stderr
    assert not (tmp_path / "data").exists()
