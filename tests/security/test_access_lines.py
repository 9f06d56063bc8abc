"""``log.access`` writes one line for every request, including those refused before they reach a route."""

from __future__ import annotations

import logging

import pytest

from tests.security.named import named

T = "/v1/namespaces/ns/topics"
#: Name, method and path of a request, its status, and the route in its line if that is not ``unknown``.
REQUESTS = [
    (None, "POST", f"{T}/a/publish", 401, "publish"),
    ("reader", "POST", f"{T}/a/publish", 403, "publish"),
    (None, "GET", f"{T}/a", 401, "get_topic"),
    ("reader", "DELETE", f"{T}/a", 403, "delete_topic"),
    (None, "GET", "/v1/cluster", 401, "get_cluster"),
    ("reader", "GET", "/v1/cluster", 403, "get_cluster"),
    ("operator", "GET", f"{T}/a", 404, "get_topic"),
]


@pytest.mark.parametrize("listener", ["hot", "application"])
async def test_every_refused_request_is_logged(tmp_path, caplog, listener):
    caplog.set_level(logging.INFO, logger="plainsong.access")
    async with named(tmp_path, listener=listener, log__access=True) as running:
        for name, method, path, status, route in REQUESTS:
            caplog.clear()
            answer = await running.ask(name, method, path, headers={"X-Request-Id": "r-1"})
            assert answer.status_code == status, (name, path)
            lines = [each for each in caplog.records if each.name == "plainsong.access"]
            assert [(each.status, each.target) for each in lines] == [(status, path)], (name, path)
            assert lines[0].route in (route, "unknown"), "a request without a name is refused before its route is known"


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
async def test_a_request_from_another_origin_is_logged(tmp_path, caplog, headers):
    caplog.set_level(logging.INFO, logger="plainsong.access")
    async with named(tmp_path, listener="hot", log__access=True) as running:
        answer = await running.ask("operator", "PUT", f"{T}/a", headers=headers, json={})
        assert answer.status_code == 403
        (line,) = [each for each in caplog.records if each.name == "plainsong.access"]
        assert (line.status, line.route) == (403, "unknown")
        assert "evil.example" in line.target
