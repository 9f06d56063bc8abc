"""Readers' positions, stored by the daemon."""

from __future__ import annotations

import pytest
from broker_in_process import START_MS, TOPICS, in_process

READERS = f"{TOPICS}/t/readers"
ONE, TWO = "01" * 20, "02" * 20


async def test_a_position_is_kept_shown_listed_by_name_and_forgotten(daemon):
    await daemon.create()
    assert (await daemon.call("GET", READERS)).json() == []
    put = (await daemon.call("PUT", f"{READERS}/r-1", content=b'{"position": "%b"}' % ONE.encode())).json()
    retention_ms = daemon.service.config.readers.retention_s * 1000
    assert put == {
        "name": "r-1",
        "position": ONE,
        "generation": 1,
        "changedMs": START_MS,
        "expiresMs": START_MS + retention_ms,
    }
    await daemon.call("PUT", f"{READERS}/a", json={"position": TWO})
    assert (await daemon.call("GET", f"{READERS}/r-1")).json() == put
    assert [reader["name"] for reader in (await daemon.call("GET", READERS)).json()] == ["a", "r-1"]
    await daemon.call("DELETE", f"{READERS}/r-1")
    await daemon.call("GET", f"{READERS}/r-1", status=404, code="not_found")
    await daemon.call("DELETE", f"{READERS}/r-1", status=404, code="not_found")


async def test_a_position_is_compared_and_set(daemon):
    await daemon.create()
    reader = f"{READERS}/r"
    await daemon.call("PUT", reader, status=409, code="position_changed", json={"position": ONE, "expected": TWO})
    await daemon.call("PUT", reader, json={"position": ONE, "expected": None})
    await daemon.call("PUT", reader, status=409, code="position_changed", json={"position": TWO, "expected": None})
    await daemon.call("PUT", reader, json={"position": TWO, "expected": ONE, "generation": 1})
    await daemon.call("PUT", reader, json={"position": ONE})
    await daemon.call("PUT", reader, status=409, code="generation_changed", json={"position": TWO, "generation": 2})
    assert (await daemon.call("GET", reader)).json()["position"] == ONE


async def test_a_reader_of_an_older_generation_is_gone(daemon):
    await daemon.create()
    await daemon.call("PUT", f"{READERS}/r", json={"position": ONE})
    await daemon.call("DELETE", f"{TOPICS}/t")
    await daemon.call("GET", f"{READERS}/r", status=404, code="topic_not_found")
    await daemon.create()
    await daemon.call("GET", f"{READERS}/r", status=404, code="not_found")


async def test_an_unused_reader_expires(daemon):
    await daemon.create()
    kept = (await daemon.call("PUT", f"{READERS}/r", json={"position": ONE})).json()
    daemon.clock.ms = kept["expiresMs"]
    await daemon.call("GET", f"{READERS}/r")
    daemon.clock.ms += 1
    await daemon.call("GET", f"{READERS}/r", status=404, code="not_found")


async def test_readers_of_one_topic_are_bounded():
    async with in_process(readers__max_per_topic=2) as daemon:
        await daemon.create()
        for name in ("a", "b"):
            await daemon.call("PUT", f"{READERS}/{name}", json={"position": ONE})
        answer = await daemon.call("PUT", f"{READERS}/c", status=429, code="quota_exceeded", json={"position": ONE})
        assert answer.headers["retry-after"]
        await daemon.call("PUT", f"{READERS}/a", json={"position": TWO})


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "malformed_body"),
        ({"position": None}, "malformed_body"),
        ({"position": 5}, "malformed_body"),
        ({"position": "00"}, "invalid_message_id"),
        ({"position": ONE, "expected": "x"}, "invalid_message_id"),
        ({"position": ONE, "generation": 0}, "invalid_parameter"),
        ({"position": ONE, "generation": "1"}, "malformed_body"),
        ({"position": ONE, "expects": ONE}, "unknown_field"),
        ([], "malformed_body"),
    ],
)
async def test_wrong_bodies_are_refused(daemon, body, code):
    await daemon.create()
    await daemon.call("PUT", f"{READERS}/r", status=400, code=code, json=body)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_names_of_readers_are_those_of_topics(daemon, method):
    await daemon.create()
    await daemon.call(method, f"{READERS}/a.b", status=400, code="invalid_name", content=b"{}")
    await daemon.call(method, f"{READERS}/{'r' * 256}", status=400, code="invalid_name", content=b"{}")
    await daemon.call(method, f"{TOPICS}/none/readers/r", status=404, code="topic_not_found", json={"position": ONE})
