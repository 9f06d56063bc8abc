"""A real OpenID provider: its tokens name their holders, its keys are rotated, and it fails."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from tests.daemon.harness import Daemon
from tests.keycloak_server import AUDIENCE, CLIENT, Keycloak, why_not
from tests.patience import PATIENCE_S

GRANTS = """format = 1
[[grant]]
to = ["oidc-group:payments"]
verbs = ["admin", "publish", "poll"]
on = ["shop:orders"]
"""
ORDERS = "/v1/namespaces/shop/topics/orders"


def ask(daemon: Daemon, token: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*daemon.address, timeout=PATIENCE_S)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if content else None


def test_tokens_of_keycloak_name_their_holders_through_rotation_and_while_it_is_unavailable(tmp_path):
    lacking = why_not()
    if lacking is not None:
        pytest.skip(lacking)
    (tmp_path / "grants.toml").write_text(GRANTS)
    (tmp_path / "grants.toml").chmod(0o600)
    with Keycloak(tmp_path) as keycloak:
        settings = {
            "security.authentication": "required",
            "security.grants_file": tmp_path / "grants.toml",
            "security.oidc.issuer": keycloak.issuer,
            "security.oidc.audience": AUDIENCE,
            "security.oidc.jwks": keycloak.jwks,
            "security.oidc.name_claim": "client_id",
        }
        with Daemon(tmp_path / "data", *(f"{name}={value}" for name, value in settings.items())) as daemon:
            old = keycloak.token()
            status, who = ask(daemon, old, "GET", "/v1/whoami")
            assert (status, who["name"], who["via"]) == (200, f"oidc:{CLIENT}", "oidc")
            assert ask(daemon, old, "PUT", ORDERS)[0] == 200
            assert ask(daemon, old, "POST", f"{ORDERS}/publish", {"messages": ["m"]})[0] == 200
            assert ask(daemon, old, "POST", "/v1/namespaces/shop/topics/bills/publish", {"messages": ["m"]})[0] == 403
            head, claims, signature = old.split(".")
            for forged in (
                f"{head}.{claims}.{signature[:-4]}AAAA",
                f"{head}.{claims[:-4]}AAAA.{signature}",
                f"{head}.{claims}.",
            ):
                assert ask(daemon, forged, "GET", "/v1/whoami")[0] == 401
            keycloak.rotate_keys()
            new = keycloak.token()
            assert new.partition(".")[0] != head, "it is signed with the new key"
            assert ask(daemon, new, "GET", "/v1/whoami")[0] == 200
            assert ask(daemon, old, "GET", "/v1/whoami")[0] == 200
            keycloak.kill()
            for token in (old, new):
                assert ask(daemon, token, "POST", f"{ORDERS}/publish", {"messages": ["m"]})[0] == 200
            text = "".join(daemon.lines)
            assert old not in text
            assert new not in text
