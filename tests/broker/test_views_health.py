"""Ping, liveness, readiness, version and metrics."""

from __future__ import annotations

from broker_in_process import START_MS, TOPICS, in_process


async def test_ping_is_ok_in_plain_text(daemon):
    answer = await daemon.call("GET", "/ping")
    assert (answer.text, answer.headers["content-type"]) == ("OK", "text/plain; charset=utf-8")


async def test_a_running_daemon_is_alive_and_ready(daemon):
    assert (await daemon.call("GET", "/livez")).json() == {"alive": True}
    assert (await daemon.call("GET", "/readyz?verbose")).json() == {
        "ready": True,
        "reasons": [],
        "transactions": {"service": "embedded", "available": True, "why": None},
    }


async def test_low_space_is_a_reason_and_clears_by_itself(daemon):
    daemon.service.space.low = True
    answer = await daemon.call("GET", "/readyz", status=503, code="low_space")
    assert answer.headers["retry-after"]
    assert [reason["code"] for reason in answer.json()["reasons"]] == ["low_space"]
    daemon.service.space.low = False
    await daemon.call("GET", "/readyz")


async def test_all_reasons_are_named(daemon):
    daemon.service.stopping.set()
    daemon.service.space.low = True
    answer = (await daemon.call("GET", "/readyz", status=503, code="shutting_down")).json()
    assert [reason["code"] for reason in answer["reasons"]] == ["shutting_down", "low_space"]
    assert answer["ready"] is False
    await daemon.call("GET", "/livez")


async def test_a_topic_that_cannot_be_loaded_is_named_until_it_loads(daemon):
    daemon.store.fail_next("claim")
    daemon.store.fail_next("claim", after=1)
    await daemon.call("GET", f"{TOPICS}/t", status=503, code="storage_failed")
    answer = await daemon.call("GET", "/readyz", status=503, code="recovering")
    assert "ns:t" in answer.json()["detail"]
    while (await daemon.http.get("/readyz")).status_code == 503:
        pass
    await daemon.call("GET", f"{TOPICS}/t", status=404, code="topic_not_found")


async def test_the_version_route_names_the_running_version(daemon):
    found = (await daemon.call("GET", "/version")).json()
    assert found == {"version": "1.2.3", "api": "v1", "avro": [1, 2], "store": "memory"}


async def test_metrics_count_routes_by_name_and_never_by_path(daemon):
    await daemon.create("secret_topic")
    await daemon.publish("x", topic="secret_topic", ms=START_MS)
    for path in ("/nothing/here", "/nor/here", f"{TOPICS}/secret_topic/nor/here"):
        await daemon.call("GET", path, status=404, code="not_found")
    await daemon.call("DELETE", "/ping", status=405, code="method_not_allowed")
    await daemon.call("GET", f"{TOPICS}/none", status=404)
    answer = await daemon.call("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for line in (
        'plainsong_requests_total{route="create_topic",status="200"} 1.0',
        'plainsong_requests_total{route="publish",status="200"} 1.0',
        'plainsong_requests_total{route="get_topic",status="404"} 1.0',
        'plainsong_requests_total{route="unknown",status="404"} 3.0',
        'plainsong_requests_total{route="unknown",status="405"} 1.0',
    ):
        assert line in answer.text
    assert "secret_topic" not in answer.text
    assert "/here" not in answer.text


async def test_a_bug_is_counted_and_answered_without_its_details(daemon, monkeypatch, caplog):
    monkeypatch.setattr(daemon.service.store, "statistics", None)
    monkeypatch.setattr(daemon.service.directory, "put", None)
    answer = await daemon.call("GET", f"{TOPICS}/t", status=500, code="internal")
    assert "NoneType" not in answer.text
    assert "NoneType" in caplog.text
    assert answer.json()["outcome"] == "unknown"
    monkeypatch.undo()
    assert 'route="get_topic",status="500"' in (await daemon.call("GET", "/metrics")).text


async def test_health_needs_no_store():
    async with in_process() as daemon:
        daemon.store.stall("get")
        daemon.store.stall("scan")
        daemon.store.stall("claim")
        for path in ("/ping", "/livez", "/readyz", "/version", "/metrics", "/openapi.json"):
            await daemon.call("GET", path)
        for op in ("get", "scan", "claim"):
            daemon.store.release(op)


async def test_a_daemon_without_transactions_is_ready_and_says_so():
    async with in_process(transactions__service="off") as daemon:
        said = (await daemon.call("GET", "/readyz")).json()
        assert said["ready"]
        assert said["transactions"] == {
            "service": "off",
            "available": False,
            "why": "this daemon has no transaction service",
        }
