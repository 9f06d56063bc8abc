"""Anything that looks like a credential is masked, and never used as a name."""

from __future__ import annotations

import secrets

import pytest

from broker.security.tokens import new_token
from plainsong.protocol.masking import holds_credential, masked
from tests.security.named import named

TOKEN = new_token(secrets.choice)
JWT = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhbm4iLCJleHAiOjF9.c2lnbmF0dXJlLW9mLXRoaXM"
T = "/v1/namespaces/ns/topics"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Bearer {TOKEN}", "Bearer psg_***"),
        (f"{JWT} and {TOKEN}", "eyJ*** and psg_***"),
        ("postgresql://ann:pass@db.test/shop", "postgresql://***@db.test/shop"),
        ('"http://ann:p%40ss@h/" at a@b.test', '"http://***@h/" at a@b.test'),
        ("https://h/path@x mail a@b.test", "https://h/path@x mail a@b.test"),
    ],
)
def test_credentials_are_masked_and_nothing_else_is(text, shown):
    assert masked(text) == shown


@pytest.mark.parametrize(
    "name", ["psg_", "a-long-name-with-psg_in-the-middle-of-it-and-more", "eyJ", "psg_orders", "eyJ.x.y"]
)
def test_names_that_only_begin_alike_are_names_like_any_other(name):
    assert not holds_credential(name)


async def test_a_token_cannot_be_a_name_since_names_are_shown(tmp_path):
    async with named(tmp_path) as daemon:
        await daemon.ask("operator", "PUT", f"{T}/a", json={})

        async def refused(method, path, **more):
            answer = await daemon.ask("operator", method, path, **more)
            assert answer.status_code == 400, (path, answer.text)
            assert TOKEN not in answer.text

        await refused("PUT", f"{T}/{TOKEN}", json={})
        await refused("PUT", f"{T}/before-{TOKEN}", json={})
        await refused("PUT", f"/v1/namespaces/{TOKEN}/properties", json={})
        await refused("PUT", f"{T}/a/readers/{TOKEN}", json={"position": "0" * 40})
        await refused("POST", f"{T}/a/poll", json={}, headers={"Plainsong-Reader": TOKEN})
        await refused("PUT", f"{T}/a/producers/{TOKEN}")
        await refused("PUT", f"{T}/a/producers/{JWT}")
        await refused("POST", f"{T}/a/publish", json={"messages": ["m"], "producer": TOKEN, "sequenceIds": [0]})
        for token in (TOKEN, JWT):
            await refused("POST", "/v1/transactions", json={"clientId": token})


@pytest.mark.parametrize("listener", ["hot", "application"])
async def test_a_token_is_not_accepted_as_a_request_id(tmp_path, listener):
    async with named(tmp_path, listener=listener) as daemon:
        await daemon.ask("operator", "PUT", f"{T}/a", json={})
        for path in ("publish", "offsets"):
            headers = {"X-Request-Id": TOKEN}
            answer = await daemon.ask("operator", "POST", f"{T}/a/{path}", json={"messages": ["m"]}, headers=headers)
            assert TOKEN not in str(answer.headers)
            assert answer.headers["x-request-id"]


@pytest.mark.parametrize("listener", ["hot", "application"])
@pytest.mark.parametrize("token", [TOKEN, JWT.replace(".", "")[:40]], ids=["token", "name"])
async def test_a_refusal_names_no_token_in_its_headers_either(tmp_path, listener, token):
    async with named(tmp_path, listener=listener) as daemon:
        for path in ("publish", "properties"):
            answer = await daemon.ask("stranger", "PUT" if path == "properties" else "POST", f"{T}/{token}/{path}")
            assert answer.status_code == 403
            shown = masked(token)
            assert f":{shown}" in answer.headers["www-authenticate"]
            assert shown == token or TOKEN not in str(answer.headers) + answer.text
