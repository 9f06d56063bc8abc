"""Damaged rows that are set aside: copied to a file, reported in messages and headers, and skipped by readers."""

from __future__ import annotations

import base64
import json
import shutil
from random import Random

import pytest
import trio
from broker_in_process import TOPICS, in_process
from event_source import event_source

from plainsong import Client
from plainsong.cli.dry_run import effect_lines
from plainsong.protocol.effects import Put, Table
from plainsong.protocol.ids import NO_PAYLOAD_PART
from plainsong.protocol.keys import generation_prefix
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.asks import Cleaned, NoteSetAside
from storage.base import StoreError, read_rows
from storage.config import StorageConfig
from storage.leveldb import LevelDBOptions, LevelDBStore
from tests.patience import PATIENCE_S

NAME = TopicName("ns", "t")
PREFIX = generation_prefix(NAME, 1)
SMALL = LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16, block_cache_bytes=0))
ROUTE = f"{TOPICS}/t/set-aside"


@pytest.fixture
async def daemon(tmp_path):
    """A daemon on an in-memory store, with a folder for rows that are set aside."""
    (tmp_path / "data").mkdir()
    async with in_process(storage__data_dir=tmp_path / "data") as daemon:
        yield daemon


@pytest.fixture
async def listening(tmp_path):
    """The same with a listener on a socket."""
    (tmp_path / "data").mkdir()
    async with in_process(listener="hot", storage__data_dir=tmp_path / "data") as daemon:
        yield daemon


async def damage(daemon, *ids):
    """Make the rows of these messages unreadable."""
    claim = await daemon.store.claim(NAME)
    keys = [bytes.fromhex(each)[:10] for each in ids]
    await daemon.store.write([Put(Table.MESSAGE, PREFIX, keys, [b"\xff"] * len(keys))], claim=claim)
    daemon.service.directory.cache(NAME).clear()


async def published(daemon, *payloads):
    """Publish each message in a separate millisecond, and return the ids."""
    ids = []
    for payload in payloads:
        daemon.clock.ms += 1
        ids.append((await daemon.publish(payload))[0])
    return ids


def kept(folder):
    """Return the header and the rows of the only file that was written."""
    (file,) = (folder / "set-aside").iterdir()
    about, *rows = map(json.loads, file.read_text().splitlines())
    return about, rows


async def test_a_damaged_row_stops_readers_until_it_is_set_aside(daemon, tmp_path):
    await daemon.create()
    ids = await published(daemon, "a", "b", "c", "d")
    await damage(daemon, ids[1], ids[2])
    assert [each["payload"] for each in await daemon.poll()] == ["a"]
    await daemon.call("POST", f"{TOPICS}/t/poll", json={"startFrom": ids[1]}, status=503)
    answer = await daemon.call("POST", ROUTE, json={"from": ids[1], "to": ids[2]})
    told = answer.json()
    assert told["action"] == "topic.set-aside"
    assert told["target"] == "ns:t"
    assert told["dryRun"] is False
    file = told["after"].pop("file")
    assert told["after"] == {"state": "set-aside", "from": ids[1], "to": ids[2], "rows": 2}
    assert (tmp_path / "data" / file).exists()
    assert [each["payload"] for each in await daemon.poll()] == ["a", "d"]
    about, rows = kept(tmp_path / "data")
    assert (about["topic"], about["generation"]) == ("ns:t", 1)
    assert [row["key"] for row in rows] == [(PREFIX + bytes.fromhex(each)[:10]).hex() for each in ids[1:3]]
    assert {base64.b64decode(row["value"]) for row in rows} == {b"\xff"}


async def test_a_range_set_aside_is_one_entry_among_messages_and_a_header_of_pages_that_skip_it(daemon):
    await daemon.create()
    ids = await published(daemon, "a", "b", "c", "d")
    await daemon.call("POST", ROUTE, json={"from": ids[1], "to": ids[2]})
    entry = {"state": "set-aside", "from": ids[1], "to": ids[2], "rows": 2}

    async def shown(query):
        answer = await daemon.call("GET", f"{TOPICS}/t/messages{query}")
        return [each.get("id") or each for each in answer.json()], answer.headers.get("plainsong-set-aside")

    assert await shown("") == ([ids[0], entry, ids[3]], "2")
    assert await shown("?order=desc") == ([ids[3], entry, ids[0]], "2")
    assert await shown("?limit=1") == ([ids[0]], None)
    assert await shown("?limit=1&order=desc") == ([ids[3]], None)
    assert await shown(f"?from={ids[1]}&limit=1") == ([entry, ids[3]], "2")
    assert await shown(f"?from={ids[3]}") == ([ids[3]], None)

    async def passed(**body):
        answer = await daemon.call("POST", f"{TOPICS}/t/poll", json=body)
        return answer.headers.get("plainsong-set-aside")

    assert await passed() == "2"
    assert await passed(limit=1) is None
    assert await passed(startFrom=ids[0], inclusive=False) == "2"
    assert await passed(startFrom=ids[0], inclusive=False, isolation="committed") == "2"
    assert await passed(startFrom=ids[3]) is None
    answer = await daemon.call(
        "POST", f"{TOPICS}/t/poll", json={}, headers={"Accept": "application/vnd.plainsong.frames"}
    )
    assert answer.headers["plainsong-set-aside"] == "2"


async def test_a_poll_that_waits_reports_messages_skipped_before_the_wait(daemon, autojump_clock):
    await daemon.create()
    ids = await published(daemon, "a", "b")
    await daemon.call("POST", ROUTE, json={"from": ids[1], "to": ids[1]})
    body = {"startFrom": ids[0], "inclusive": False, "waitMs": 5_000}
    told = {}

    async def wait(isolation):
        answer = await daemon.call("POST", f"{TOPICS}/t/poll", json={**body, "isolation": isolation})
        told[isolation] = ([each["payload"] for each in answer.json()], answer.headers.get("plainsong-set-aside"))

    async with trio.open_nursery() as nursery:
        for isolation in ("uncommitted", "committed"):
            nursery.start_soon(wait, isolation)
        await trio.sleep(1)
        await published(daemon, "c")
    assert told == {"uncommitted": (["c"], "1"), "committed": (["c"], "1")}


async def test_a_poll_of_many_topics_counts_the_rows_that_each_page_skipped(daemon):
    for topic in ("t", "u"):
        await daemon.create(topic)
    ids = await published(daemon, "a", "b", "c", "d", "e")
    await daemon.publish("x", topic="u")
    await daemon.call("POST", ROUTE, json={"from": ids[1], "to": ids[2]})
    await daemon.call("POST", ROUTE, json={"from": ids[4], "to": ids[4]})

    async def passed(limit=100, **given):
        answer = await daemon.call(
            "POST", "/v1/namespaces/ns/poll", json={"topics": {"t": given, "u": {}}, "limit": limit}
        )
        found = answer.json()["topics"]
        assert "setAside" not in found["u"]
        return [each["payload"] for each in found["t"]["messages"]], found["t"].get("setAside")

    assert await passed() == (["a", "d"], 2)
    assert await passed(limit=2) == (["a"], None)
    assert await passed(startFrom=ids[0], inclusive=False) == (["d"], 2)
    assert await passed(startFrom=ids[3]) == (["d"], None)
    assert await passed(startFrom=ids[3], inclusive=False) == ([], 1)
    assert await passed(startFrom=ids[4], inclusive=False) == ([], None)


async def test_a_stream_of_events_reports_each_range_set_aside_once_in_its_place(listening):
    await listening.create()
    ids = await published(listening, "a", "b", "c", "d", "e")
    await listening.call("POST", ROUTE, json={"from": ids[1], "to": ids[2]})
    await listening.call("POST", ROUTE, json={"from": ids[4], "to": ids[4]})
    stretches = [{"from": ids[1], "to": ids[2], "rows": 2}, {"from": ids[4], "to": ids[4], "rows": 1}]

    async def read(source, count):
        with trio.fail_after(PATIENCE_S):
            found = [await anext(source) for _ in range(count)]
        return [each.value.get("payload") or each.value for each in found], found[-1]

    url = f"{TOPICS}/t/events?from=0"
    async with event_source(listening.http.base_url, url) as source:
        told, last = await read(source, 2)
        assert told == ["a", stretches[0]]
        assert (last.kind, last.last_event_id) == ("set-aside", ids[2])
        await published(listening, "f")
        assert (await read(source, 3))[0] == ["d", stretches[1], "f"]
    async with event_source(listening.http.base_url, url, **{"Last-Event-ID": ids[2]}) as source:
        assert (await read(source, 3))[0] == ["d", stretches[1], "f"]


async def test_pages_report_what_they_skipped(listening):
    await listening.create()
    ids = await published(listening, "a", "b", "c", "d")
    await listening.call("POST", ROUTE, json={"from": ids[1], "to": ids[2]})

    def read():
        with Client(str(listening.http.base_url), namespace="ns") as client:
            page = client.poll("t")
            return [message.payload for message in page], page.set_aside, client.poll("t", page[1].id)

    payloads, set_aside, behind = await trio.to_thread.run_sync(read)
    assert (payloads, set_aside) == ([b"a", b"d"], 2)
    assert behind.set_aside == 0


async def test_a_dry_run_reports_what_would_be_removed_and_changes_nothing(daemon, tmp_path):
    await daemon.create()
    ids = await published(daemon, "a", "b", "c")
    await damage(daemon, ids[1])
    told = (await daemon.call("POST", f"{ROUTE}?dryRun=true", json={"from": ids[1], "to": ids[2]})).json()
    assert told["dryRun"] is True
    assert told["after"] == {"state": "set-aside", "from": ids[1], "to": ids[2], "rows": 2, "file": None}
    assert told["effect"]["removes"]["messages"] == 2
    assert (told["effect"]["damagedRows"], told["effect"]["unreadable"]) == (1, 0)
    assert told["warnings"] == ["1 of these rows are intact: readers lose them too"]
    assert not (tmp_path / "data" / "set-aside").exists()
    assert [each.get("state") for each in (await daemon.call("GET", f"{TOPICS}/t/messages")).json()] == [
        "plain",
        "damaged",
        "plain",
    ]


async def test_a_dry_run_writes_nothing(daemon):
    await daemon.create()
    ids = await published(daemon, "a", "b")
    await daemon.call("GET", f"{TOPICS}/t/stats")
    before = [await rows(daemon, table) for table in Table]
    daemon.clock.ms += 3_600_000
    await daemon.call("POST", f"{ROUTE}?dryRun=true", json={"from": ids[0], "to": ids[1]})
    assert [await rows(daemon, table) for table in Table] == before


async def rows(daemon, table):
    """Return the keys and values of a table."""
    found = []

    def feed(more):
        found.extend(map(repr, more))
        return True

    await daemon.store.scan(table, b"", b"\xff" * 40, feed)
    return found


async def test_rows_set_aside_leave_the_counts_and_the_findings_of_the_scrub(daemon):
    await daemon.create()
    ids = await published(daemon, "a", "b", "c")
    await damage(daemon, ids[1])
    await daemon.service.scrub.round()
    (finding,) = (await daemon.call("GET", "/v1/scrub")).json()["findings"]
    await daemon.call("POST", ROUTE, json={"from": finding["from"], "to": finding["to"]})
    assert (await daemon.call("GET", "/v1/scrub")).json()["findings"] == []
    assert not [each for each in (await daemon.call("GET", "/v1/attention")).json() if each["kind"] == "damaged"]
    assert (await daemon.call("GET", f"{TOPICS}/t/stats")).json()["messages"] == 2
    await daemon.service.scrub.round()
    assert (await daemon.call("GET", "/v1/scrub")).json()["findings"] == []


async def test_stored_messages_are_set_aside_with_the_row_that_publishes_them(daemon, tmp_path):
    await daemon.create()
    begun = (await daemon.call("POST", "/v1/transactions", json={})).json()
    pointer = {"transactionWritePointer": begun["writePointer"]}
    await daemon.call("POST", f"{TOPICS}/t/store", json={"messages": ["one", "two"], **pointer})
    await daemon.call("POST", f"{TOPICS}/t/publish", json={"messages": [], **pointer})
    await daemon.call("POST", f"/v1/transactions/{begun['id']}/commit", json={})
    first, _ = [each["id"] for each in await daemon.poll()]
    told = (await daemon.call("POST", ROUTE, json={"from": first, "to": first})).json()
    assert (told["after"]["rows"], told["effect"]["removes"]["messages"]) == (3, 2)
    assert [row["table"] for row in kept(tmp_path / "data")[1]] == ["message", "payload", "payload"]
    assert await daemon.poll() == []
    assert not await read_rows(daemon.store, Table.PAYLOAD, PREFIX, PREFIX + b"\xff" * 30, limit=1)


async def test_overlapping_ranges_become_one_and_the_topic_continues_after_them(daemon):
    await daemon.create()
    ids = await published(daemon, "a", "b", "c")
    await daemon.call("POST", ROUTE, json={"from": ids[1], "to": ids[1]})
    await daemon.call("POST", ROUTE, json={"from": ids[0], "to": "f" * 40})
    (entry,) = (await daemon.call("GET", f"{TOPICS}/t/messages")).json()
    assert entry == {"state": "set-aside", "from": ids[0], "to": ids[2], "rows": 3}
    await published(daemon, "d")
    assert [each["payload"] for each in await daemon.poll()] == ["d"]


async def test_in_an_empty_range_nothing_is_set_aside(daemon, tmp_path):
    await daemon.create()
    (only,) = await published(daemon, "a")
    before = "0" * 40
    await daemon.call("POST", ROUTE, json={"from": before, "to": before}, status=404, code="not_found")
    await daemon.call("POST", ROUTE, json={"from": only, "to": before}, status=400, code="invalid_parameter")
    await daemon.call("POST", ROUTE, json={"from": only}, status=400, code="malformed_body")
    await daemon.call("POST", ROUTE, json={"from": only, "to": "x"}, status=400)
    await daemon.call("POST", f"{TOPICS}/none/set-aside", json={"from": only, "to": only}, status=404)
    assert not list((tmp_path / "data").glob("set-aside/*"))
    assert len(await daemon.poll()) == 1


async def test_rows_are_kept_if_their_file_cannot_be_written(daemon, tmp_path):
    await daemon.create()
    (only,) = await published(daemon, "a")
    (tmp_path / "data" / "set-aside").write_text("in the way")
    await daemon.call("POST", ROUTE, json={"from": only, "to": only}, status=503, code="low_space")
    assert len(await daemon.poll()) == 1
    assert "set-aside" not in str((await daemon.call("GET", f"{TOPICS}/t/messages")).json())


async def test_a_failure_after_the_note_is_repaired_by_a_retry_and_no_file_is_lost(daemon, tmp_path, monkeypatch):
    await daemon.create()
    ids = await published(daemon, "a", "b", "c")

    async def fails(table, ranges):
        raise StoreError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(daemon.store, "drop", fails)
        await daemon.call("POST", ROUTE, json={"from": ids[1], "to": ids[1]}, status=503, code="storage_failed")
    assert len(await daemon.poll()) == 3
    told = (await daemon.call("POST", ROUTE, json={"from": ids[1], "to": ids[1]})).json()
    assert [each["payload"] for each in await daemon.poll()] == ["a", "c"]
    files = sorted(each.name for each in (tmp_path / "data" / "set-aside").iterdir())
    assert len(files) == 2
    assert told["after"]["file"].endswith("-2.ndjson")


# --- a real LevelDB with unreadable blocks -------------------------------------------------------------


async def filled(tmp_path, count=2_000):
    """Fill a topic in a LevelDB, flip a bit in the middle of a table, and return the ids of the messages."""
    random, ids = Random(1), []
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store, in_process(store=store) as daemon:
        await daemon.create()
        for _ in range(count // 10):
            daemon.clock.ms += 1
            payloads = [{"payload": {"base64": base64.b64encode(random.randbytes(200)).decode()}} for _ in range(10)]
            first, _ = await daemon.publish(*payloads)
            at = int(first[:20], 16)
            ids += [f"{at + number:020x}" + NO_PAYLOAD_PART.hex() for number in range(10)]
    table = max((tmp_path / "data").glob("volumes/*/*.ldb"), key=lambda each: each.stat().st_size)
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    return ids


def flip_at_one_end(folder, ids, end):
    """Flip a bit next to the topic's first, or last, key that a table stores in full."""
    keys = [PREFIX + bytes.fromhex(each)[:10] for each in ids]
    tables = {path: path.read_bytes() for path in folder.glob("volumes/*/*.ldb")}
    key, path = end((key, path) for path, data in tables.items() for key in keys if key in data)
    data = bytearray(tables[path])
    data[data.find(key) + len(key) + 50] ^= 1
    path.write_bytes(data)


async def read_on(daemon):
    """Poll to the end; return the ids, and the number of rows set aside that the pages skipped."""
    found, passed, at = [], 0, {}
    while True:
        answer = await daemon.call("POST", f"{TOPICS}/t/poll", json={"limit": 300, **at})
        found += [each["id"] for each in answer.json()]
        passed += int(answer.headers.get("plainsong-set-aside", 0))
        if answer.headers["plainsong-end"] == "end":
            return found, passed
        at = {"startFrom": answer.headers["plainsong-last-id"], "inclusive": False}


async def shown_down(daemon):
    """Return all that ``GET messages`` shows from the newest message down, over all pages."""
    found, query = [], ""
    while True:
        answer = await daemon.call("GET", f"{TOPICS}/t/messages?order=desc&limit=300{query}")
        found += answer.json()
        if answer.headers["plainsong-end"] == "end":
            return found
        query = f"&to={answer.headers['plainsong-last-id']}"


async def test_an_unreadable_block_is_skipped_and_everything_around_it_is_read(tmp_path):
    ids = await filled(tmp_path)
    async with (
        await LevelDBStore.open(tmp_path / "data", SMALL) as store,
        in_process(store=store, storage__data_dir=tmp_path / "data") as daemon,
    ):
        daemon.clock.ms += 10_000
        await daemon.service.scrub.round()
        (finding,) = (await daemon.call("GET", "/v1/scrub")).json()["findings"]
        assert finding["file"].startswith("volumes/")
        assert (tmp_path / "data" / finding["file"]).exists()
        place = {"from": finding["from"], "to": finding["to"]}
        told = (await daemon.call("POST", ROUTE, json=place)).json()
        assert told["after"]["rows"] is None
        assert told["effect"]["unreadable"] == 1
        found, passed = await read_on(daemon)
        assert passed == 1
        lost = sorted(set(ids) - set(found))
        assert 0 < len(lost) < 100
        assert found == [each for each in ids if each not in set(lost)]
        assert told["after"]["from"] <= lost[0] <= lost[-1] <= told["after"]["to"]
        entry = {"state": "set-aside", "from": told["after"]["from"], "to": told["after"]["to"], "rows": None}
        down = await shown_down(daemon)
        assert [each["id"] for each in down if each != entry] == found[::-1]
        assert down.count(entry) == 1
        await daemon.service.scrub.round()
        assert (await daemon.call("GET", "/v1/scrub")).json()["findings"] == []
        await published(daemon, "later")
    # Also after a restart.
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store, in_process(store=store) as daemon:
        daemon.clock.ms += 20_000
        again, passed = await read_on(daemon)
        assert (again[:-1], passed) == (found, 1)
        assert (await shown_down(daemon)).count(entry) == 1


@pytest.mark.parametrize("end", [min, max])
async def test_a_topic_continues_where_its_first_or_last_block_was_set_aside_and_no_longer_reports_it(tmp_path, end):
    here = {"storage__data_dir": tmp_path / "data"}
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store, in_process(store=store, **here) as daemon:
        await daemon.create()
        random = Random(1)
        ids = await published(daemon, *[random.randbytes(250).hex() for _ in range(60)])
    async with await LevelDBStore.open(tmp_path / "data", SMALL):
        pass  # opening moved the log into a table
    flip_at_one_end(tmp_path / "data", ids, end)
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store, in_process(store=store, **here) as daemon:
        daemon.clock.ms += 10_000
        await daemon.service.scrub.round()
        (finding,) = (await daemon.call("GET", "/v1/scrub")).json()["findings"]
        assert finding["file"].startswith("volumes/")
        place = {"from": finding["from"], "to": finding["to"]}
        told = (await daemon.call("POST", f"{ROUTE}?dryRun=true", json=place)).json()
        assert "removes 1 place where nothing can be read" in effect_lines(told)
        await daemon.call("POST", ROUTE, json=place)
        assert (await daemon.call("GET", "/v1/scrub")).json()["findings"] == []
        later = await published(daemon, "later", "and later")
        found, passed = await read_on(daemon)
        assert passed == 1
        assert found[-2:] == later
        lost = sorted(set(ids) - set(found))
        assert 0 < len(lost) < len(ids)
        assert place["from"] <= lost[0] <= lost[-1] <= place["to"]
        assert [each["id"] for each in await shown_down(daemon) if "id" in each] == found[::-1]
        await daemon.service.scrub.round()
        assert (await daemon.call("GET", "/v1/scrub")).json()["findings"] == []


@pytest.mark.parametrize("limit", [1, 7, 5_000])
async def test_pages_of_every_size_end_before_an_unreadable_block_and_lack_no_message(tmp_path, limit):
    ids = await filled(tmp_path)
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store, in_process(store=store) as daemon:
        daemon.clock.ms += 10_000
        await daemon.service.scrub.round()
        (finding,) = (await daemon.call("GET", "/v1/scrub")).json()["findings"]
        start = max(each for each in ids if each < finding["from"])
        body = {"startFrom": ids[max(0, ids.index(start) - 20)], "limit": limit}
        found = []
        while True:
            answer = await daemon.http.post(f"{TOPICS}/t/poll", json=body)
            if answer.status_code != 200:
                break
            assert answer.headers["plainsong-end"] == "more"
            assert 0 < len(answer.json()) <= limit
            found += [each["id"] for each in answer.json()]
            body |= {"startFrom": answer.headers["plainsong-last-id"], "inclusive": False}
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_failed")
        at = ids.index(start)
        assert found == ids[max(0, at - 20) : at + 1]


STEPS = ("noted", "payloads removed", "messages removed", "counted")


@pytest.mark.parametrize("killed_before", range(len(STEPS)), ids=STEPS)
async def test_a_daemon_killed_in_between_lost_nothing_and_the_request_can_be_repeated(tmp_path, killed_before):
    at = []

    def step(call):
        async def counted(*args, **named):
            if len(at) == killed_before:
                shutil.copytree(tmp_path / "data", tmp_path / "killed")
            at.append(1)
            return await call(*args, **named)

        return counted

    here = {"storage__data_dir": tmp_path / "data"}
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store, in_process(store=store, **here) as daemon:
        await daemon.create()
        begun = (await daemon.call("POST", "/v1/transactions", json={})).json()
        pointer = {"transactionWritePointer": begun["writePointer"]}
        await daemon.call("POST", f"{TOPICS}/t/store", json={"messages": ["stored"], **pointer})
        await daemon.call("POST", f"{TOPICS}/t/publish", json={"messages": [], **pointer})
        await daemon.call("POST", f"/v1/transactions/{begun['id']}/commit", json={})
        ids = [(await daemon.poll())[0]["id"], *(await published(daemon, "b", "c"))]
        directory, ask = daemon.service.directory, daemon.service.directory.ask

        async def asked(name, what):
            if isinstance(what, NoteSetAside | Cleaned):
                return await step(ask)(name, what)
            return await ask(name, what)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(directory), "ask", lambda self, name, what: asked(name, what))
            patch.setattr(LevelDBStore, "drop", step(store.drop.__func__))
            await daemon.call("POST", ROUTE, json={"from": ids[0], "to": ids[1]})
        assert len(at) == len(STEPS)
        assert [each["payload"] for each in await daemon.poll()] == ["c"]
    here = {"storage__data_dir": tmp_path / "killed"}
    async with await LevelDBStore.open(tmp_path / "killed", SMALL) as store, in_process(store=store, **here) as daemon:
        daemon.clock.ms += 60_000
        left = [each["payload"] for each in await daemon.poll()]
        # Rows that readers miss are in the file, and a header of the poll reports their number.
        about, rows = kept(tmp_path / "killed")
        assert (about["topic"], len(rows)) == ("ns:t", 3)
        if left != ["stored", "b", "c"]:
            answer = await daemon.call("POST", f"{TOPICS}/t/poll", json={})
            assert int(answer.headers["plainsong-set-aside"]) == 3
        if left != ["c"]:
            await daemon.call("POST", ROUTE, json={"from": ids[0], "to": ids[1]})
            assert len(list((tmp_path / "killed" / "set-aside").iterdir())) == 2
        assert [each["payload"] for each in await daemon.poll()] == ["c"]
