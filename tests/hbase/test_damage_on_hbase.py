"""Rows of HBase that cannot be parsed: found, reported, saved unchanged to a file, and removed from their topic.

HBase has checksums, so such a cell was written wrongly, by another program or by mistake.
"""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
from dataclasses import replace

import pytest
import trio

from plainsong.protocol.keys import generation_prefix, stop_after
from plainsong.protocol.names import TopicName
from plainsong.protocol.requests import PollRequest
from storage.base import Unreadable
from storage.damage import read_around
from storage.hbase.gateway import thrift
from storage.hbase.layout import CELL, hashed
from storage.hbase.scan import ScanRange, first_rows
from storage.hbase.store import HBaseStore
from tests.daemon.harness import PLAINSONG, Daemon, clean_environ, eventually
from tests.daemon.talk import ask, create, poll, poll_call, publish, read_all, topic_path
from tests.hbase.conftest import OPTIONS
from tests.hbase.test_hbase_owners import MESSAGE, NAME, rows, values

PREFIXES = itertools.count()
#: Changes to a cell: truncated, of an unknown format, or with wrong lengths.
DAMAGE = {
    "short": lambda cell: cell[:-3],
    "unknown": lambda cell: b"\x07" + cell[1:],
    "lengths": lambda cell: cell[:17] + b"\x00\x01" + cell[19:],
}


async def damage(store: HBaseStore, name: TopicName, number: int, change) -> tuple[bytes, bytes]:
    """Replace the cell in the topic's message row with this number; return its key and the new cell."""
    table = store._reader._tables[MESSAGE]
    start = hashed(generation_prefix(name, 1))
    found = await first_rows(store._pool, ScanRange(table, start, stop_after(start)), 100, timeout_s=20)
    row = found[number]
    cell = change(row.columns[CELL])
    await store._pool.call("mutateRow", table, row.key, [thrift.Mutation(column=CELL, value=cell)], {})
    return row.key, cell


@pytest.mark.parametrize("kind", DAMAGE)
async def test_an_unparseable_cell_is_one_gap_that_can_be_read_as_bytes_and_dropped(store, kind):
    claim = await store.claim(NAME)
    for number, positions in enumerate(((1, 2), (3, 4), (5, 6))):
        await store.write([rows(MESSAGE, b"%d" % number, *positions)], claim=claim)
    key, cell = await damage(store, NAME, 1, DAMAGE[kind])
    prefix = generation_prefix(NAME, 1)
    stop = stop_after(prefix)
    with pytest.raises(Unreadable, match=key.hex()):
        await values(store)
    found = []
    (gap,) = await read_around(store, MESSAGE, prefix, stop, stop, found.extend)
    assert [value for _, value in found] == [b"0", b"0", b"2", b"2"]
    first, second, third, fourth = [each for each, _ in found]
    assert first < second < gap.start < gap.stop <= third < fourth
    raw = []
    await store.scan_raw(MESSAGE, gap.start, gap.stop, raw.extend)
    assert [(each.key, each.cells[CELL]) for each in raw] == [(key, cell)]
    assert await store.drop(MESSAGE, [(gap.start, third)]) == 1
    assert await values(store) == [b"0", b"0", b"2", b"2"]
    await store.write([rows(MESSAGE, b"3", 7)], claim=claim)
    assert await values(store) == [b"0", b"0", b"2", b"2", b"3"]


async def test_a_put_that_does_not_count_is_not_damage_whatever_its_cell_has_after_its_stamp(store, others):
    """If the owner was replaced before the commit, the rest of its cell is not parsed."""
    claim = await store.claim(NAME)
    await store.write([rows(MESSAGE, b"0", 1)], claim=claim)
    await damage(store, NAME, 0, lambda cell: cell[:9] + (99).to_bytes(8, "big") + cell[17:-1])
    await others[0].claim(NAME)
    assert await values(others[0]) == []
    raw = []
    prefix = generation_prefix(NAME, 1)
    await others[0].scan_raw(MESSAGE, prefix, stop_after(prefix), raw.extend)
    assert raw == []


# --- a daemon --------------------------------------------------------------------------------------


def scrubbed(daemon: Daemon) -> list[dict]:
    """Run a scrub round, and return its findings."""

    def report():
        return ask(daemon.address, "GET", "/v1/scrub").json()

    before = report()["lastCompleteMs"] or 0
    assert ask(daemon.address, "POST", "/v1/scrub").status in (200, 202)
    eventually("the round ends", lambda: report()["state"] == "waiting" and (report()["lastCompleteMs"] or 0) > before)
    return list(report()["findings"])


def test_a_damaged_row_of_hbase_is_found_reported_set_aside_and_skipped_and_the_topic_continues(hbase, tmp_path):
    prefix = f"damage{next(PREFIXES)}_"
    host, port = hbase.address
    settings = ("kind=hbase", f"hbase.thrift={host}:{port}", f"hbase.table_prefix={prefix}")
    # A load reads the rows after a topic's last checkpoint; these rows are before it.
    sets = [*(f"storage.{each}" for each in settings), "topic.checkpoint_rows=1"]
    with Daemon(tmp_path / "data", *sets) as daemon:
        ids = {}
        for topic in DAMAGE:
            create(daemon.address, topic)
            for payloads in ((b"a", b"b"), (b"c", b"d"), (b"e", b"f")):
                publish(daemon.address, topic, *payloads)
            ids[topic] = [message_id.hex() for message_id, _ in read_all(daemon.address, topic)]
        daemon.stop()
    bad = {}

    async def damage_all():
        options = replace(OPTIONS, table_prefix=prefix)
        async with await HBaseStore.open([hbase.address], options) as store:
            for topic, change in DAMAGE.items():
                bad[topic] = await damage(store, TopicName("ring", topic), 1, change)

    trio.run(damage_all)
    with Daemon(tmp_path / "data", *sets) as daemon:
        findings = {each["topic"]: each for each in scrubbed(daemon)}
        assert set(findings) == set(DAMAGE)
        for topic, finding in findings.items():
            assert (finding["table"], finding["generation"], finding["namespace"]) == ("message", 1, "ring")
            assert finding["from"] <= ids[topic][2] < ids[topic][3] <= finding["to"]
            assert ids[topic][1] < finding["from"]
            assert finding["to"] < ids[topic][4]
            assert bad[topic][0].hex() in finding["why"]
            # A page ends before the damaged row, and a poll that begins there gets an error.
            assert [payload for _, payload in poll(daemon.address, topic)] == [b"a", b"b"]
            refused = ask(daemon.address, *poll_call(topic, PollRequest(bytes.fromhex(ids[topic][2]))))
            assert (refused.status, refused.code) == (503, "storage_failed")
            assert "set-aside" in refused.json()["hint"]
            line = [
                str(PLAINSONG),
                "--url",
                "http://{}:{}".format(*daemon.address),
                "topic",
                "set-aside",
                f"ring:{topic}",
            ]
            done = subprocess.run(
                [*line, finding["from"], finding["to"], "--yes", "--json"],
                capture_output=True,
                text=True,
                env=clean_environ(),
                check=False,
            )
            assert done.returncode == 0, done.stderr
            after = json.loads(done.stdout)["after"]
            assert after["rows"] is None
            kept = [json.loads(each) for each in (tmp_path / "data" / after["file"]).read_text().splitlines()]
            raw = [each["raw"] for each in kept if "raw" in each]
            key, cell = bad[topic]
            assert raw == [{"key": key.hex(), "cells": {CELL.hex(): base64.b64encode(cell).decode()}}]
            # Readers skip the row, and a header of the answer reports it.
            passed = ask(daemon.address, *poll_call(topic, PollRequest()))
            assert [payload for _, payload in passed.messages()] == [b"a", b"b", b"e", b"f"]
            assert passed.headers["plainsong-set-aside"] == "1"
            shown = ask(daemon.address, "GET", topic_path(topic, "/messages")).json()
            assert [each["state"] for each in shown] == ["plain", "plain", "set-aside", "plain", "plain"]
            publish(daemon.address, topic, b"later")
        assert scrubbed(daemon) == []
        daemon.kill()
        daemon.start()
        for topic in DAMAGE:
            payloads = [payload for _, payload in read_all(daemon.address, topic)]
            assert payloads == [b"a", b"b", b"e", b"f", b"later"]
