"""Backups over HTTP: one cut at a time, which is kept as long as requested, and objects that match their names."""

from __future__ import annotations

import hashlib

import trio
from broker_in_process import START_MS, SetClock, in_process

from broker.api.operations.backups import Backups
from broker.config.sections import BackupConfig
from storage.backup.objects import decode_rows
from storage.leveldb import LevelDBOptions, LevelDBStore
from tests.handling import subject_of
from tests.storage.far_store import FarStore, fill

BACKUPS = "/v1/backups"


def backups_of(daemon) -> Backups:
    return next(subject_of(each) for each in daemon.service.endpoints if each.route.subject is Backups)


async def begin(daemon, **more):
    return (await daemon.call("POST", BACKUPS, **more)).json()


async def objects_of(daemon, begun, topic="ns:t"):
    answer = await daemon.call("GET", f"{BACKUPS}/{begun['id']}/objects", params={"topic": topic})
    return answer.json()


async def test_a_cut_contains_exactly_the_messages_published_before_it(daemon):
    await daemon.create()
    _, last = await daemon.publish("before")
    begun = await begin(daemon)
    await daemon.publish("later")
    await daemon.create("other")
    assert [(each["namespace"], each["topic"]) for each in begun["topics"]] == [("ns", "t")]
    assert begun["exact"]
    page = await objects_of(daemon, begun)
    assert page["next"] is None
    assert page["line"] == last[:20]
    rows = {}
    for each in page["objects"]:
        data = (await daemon.call("GET", f"{BACKUPS}/{begun['id']}/objects/{each['sha256']}")).content
        assert hashlib.sha256(data).hexdigest() == each["sha256"]
        assert len(data) == each["bytes"]
        rows[each["table"]] = decode_rows(data)
        assert len(rows[each["table"]]) == each["rows"]
    assert [value[-6:] for _, value in rows["messages"]] == [b"before"]
    assert len(rows["metadata"]) >= 1


async def test_ids_are_in_the_order_of_their_cuts_even_within_a_second(daemon):
    ids = []
    for ms in (1, 9, 10, 200, 999):
        daemon.clock.ms = START_MS + ms
        ids.append((await daemon.call("POST", "/v1/backups")).json()["id"])
        await daemon.call("DELETE", f"/v1/backups/{ids[-1]}")
    assert ids == sorted(ids)


async def test_a_second_backup_is_refused_until_the_first_has_ended(daemon):
    begun = await begin(daemon)
    await daemon.call("POST", BACKUPS, status=409, code="backup_running")
    assert (await daemon.call("DELETE", f"{BACKUPS}/{begun['id']}")).json() == {"id": begun["id"], "ended": True}
    other = await begin(daemon)
    assert other["id"] != begun["id"]
    await daemon.call("GET", f"{BACKUPS}/{begun['id']}/objects?topic=service", status=404, code="not_found")


async def test_a_backup_whose_client_has_been_silent_is_replaced_by_a_new_one(daemon):
    begun = await begin(daemon)
    backups_of(daemon)._held.asked_s -= 21
    other = await begin(daemon)
    await daemon.call("DELETE", f"{BACKUPS}/{begun['id']}", status=404, code="not_found")
    await daemon.call("DELETE", f"{BACKUPS}/{other['id']}")


async def test_an_unused_cut_ends_after_its_hold_time():
    async with in_process(backup__hold_s=30) as daemon:
        begun = await begin(daemon)
        backups_of(daemon)._held.asked_s -= 29
        await objects_of(daemon, begun, "service")
        backups_of(daemon)._held.asked_s -= 29
        await objects_of(daemon, begun, "metadata")
        backups_of(daemon)._held.asked_s -= 31
        path = f"{BACKUPS}/{begun['id']}/objects?topic=service"
        await daemon.call("GET", path, status=404, code="not_found")


async def test_invalid_requests_are_refused(daemon):
    await daemon.create()
    begun = await begin(daemon)
    path = f"{BACKUPS}/{begun['id']}/objects"
    await daemon.call("GET", f"{path}?topic=orders", status=400, code="invalid_parameter")
    await daemon.call("GET", f"{path}?topic=ns:t&after=x", status=400, code="invalid_parameter")
    await daemon.call("GET", f"{path}?topic=ns:t&after=messages.-1", status=400, code="invalid_parameter")
    await daemon.call("GET", f"{path}?topic=n/s:t", status=400, code="invalid_name")
    await daemon.call("GET", f"{path}/{'0' * 64}", status=404, code="not_found")
    assert (await objects_of(daemon, begun, "ns:none"))["objects"] == []


async def test_a_client_that_has_the_whole_backup_reports_it_and_its_time_is_a_metric(daemon):
    begun = await begin(daemon)
    await daemon.call("DELETE", f"{BACKUPS}/{begun['id']}")
    assert b"\nplainsong_backup_last_success_timestamp_seconds" not in (await daemon.call("GET", "/metrics")).content
    begun = await begin(daemon)
    await daemon.call("DELETE", f"{BACKUPS}/{begun['id']}?complete=true")
    shown = (await daemon.call("GET", "/metrics")).content
    assert b"\nplainsong_backup_last_success_timestamp_seconds 1.7e+09" in shown


async def test_on_leveldb_the_time_of_the_last_backup_outlives_a_restart(tmp_path):
    here, shown = {"storage__data_dir": tmp_path / "data"}, []
    for turn in range(3):
        async with await LevelDBStore.open(tmp_path / "data", LevelDBOptions()) as store:
            if turn == 2:
                (tmp_path / "data" / "last-backup.json").write_text("{")
            async with in_process(store=store, **here) as daemon:
                daemon.clock.ms += 5_000
                if turn == 0:
                    begun = await begin(daemon)
                    await daemon.call("DELETE", f"{BACKUPS}/{begun['id']}?complete=true")
                shown.append(daemon.service.metrics.render()[0])
    line = b"\nplainsong_backup_last_success_timestamp_seconds 1.700000005e+09"
    assert [line in each for each in shown] == [True, True, False]


async def test_listing_the_topics_of_a_remote_store_takes_at_most_twice_its_response_times(autojump_clock):
    store = FarStore()
    names = await fill(store, 5_000)
    backups = Backups(store, SetClock(), "a", "0", BackupConfig(hold_s=600, bytes_per_s=0))
    begun_s = trio.current_time()
    held = await backups._cut(around_damage=False)
    assert [each.name for each in held.topics] == names
    assert trio.current_time() - begun_s < 2 * store.waited_s
