"""Chained topics over HTTP: signed heads, and a client that verifies a topic and detects tampering."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import replace

import pytest
from broker_in_process import START_MS, TOPICS, in_process

from actors.restoring import RestoredStore, RestoreRequest, RestoreRun
from plainsong import AsyncClient, ChainHead
from plainsong.chains import Verifying
from plainsong.protocol.effects import Delete, Put, Table, put_one
from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.keys import CHAIN_POINTER, generation_prefix, payload_prefix
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import plain_head
from storage.backup.files import LocalFiles
from storage.backup.folder import BackupFolder
from storage.base import read_rows
from storage.config import StorageConfig
from storage.copying import CopyRequest
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.memory import MemoryStore
from tests.kept.make import back_up
from tests.storage.faulty import FaultyStore

NAME = TopicName("ns", "t")
PREFIX = generation_prefix(NAME, 1)
ENTRIES = payload_prefix(NAME, 1, CHAIN_POINTER)
ROUTE = f"{TOPICS}/t/chain"
SECRET = base64.b64encode(b"k" * 32).decode()


async def memory(tmp_path):
    return None


async def leveldb(tmp_path):
    return await LevelDBStore.open(
        tmp_path / "db", LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16, block_cache_bytes=0))
    )


@pytest.fixture(params=[memory, leveldb], ids=["memory", "leveldb"])
async def daemon(request, tmp_path):
    store = await request.param(tmp_path)
    async with in_process(listener="hot", store=store) as daemon:
        yield daemon
    if store is not None:
        await store.aclose()


def client(daemon):
    return AsyncClient(str(daemon.http.base_url), namespace="ns")


async def verified(daemon, known=None):
    async with client(daemon) as caller:
        return await caller.admin.verify_chain("t", known=known)


async def head_of(daemon):
    async with client(daemon) as caller:
        return await caller.admin.chain_head("t")


async def write(daemon, *operations):
    """Write to the store directly, bypassing the daemon."""
    claim = await daemon.store.claim(NAME)
    await daemon.store.write(list(operations), claim=claim)
    daemon.service.directory.cache(NAME).clear()


async def rows(daemon, table=Table.MESSAGE, prefix=PREFIX):
    return await read_rows(daemon.store, table, prefix, prefix + b"\xff" * 18, limit=100)


async def some_messages(daemon):
    await daemon.create(chain="sha256")
    for number in range(3):
        daemon.clock.ms += 1
        await daemon.publish(f"{number} a", f"{number} b")


async def test_a_chained_topic_is_marked_and_has_a_head_that_moves_with_every_request(daemon):
    await daemon.create(chain="sha256")
    assert (await daemon.call("GET", f"{TOPICS}/t")).json()["properties"]["chain"] == "sha256"
    first = (await daemon.call("GET", ROUTE)).json()
    assert (first["topic"], first["generation"], first["count"], first["signature"]) == ("ns:t", 1, 1, None)
    _, last_id = await daemon.publish("one")
    second = (await daemon.call("GET", ROUTE)).json()
    assert (second["count"], second["id"]) == (2, last_id)
    assert second["hash"] != first["hash"]


async def test_a_topic_without_a_chain_has_no_head(daemon):
    await daemon.create()
    await daemon.call("GET", ROUTE, status=404, code="not_found")
    await daemon.call("GET", f"{ROUTE}/entries", status=404, code="not_found")
    await daemon.call("GET", f"{TOPICS}/nowhere/chain", status=404, code="topic_not_found")


async def test_a_client_verifies_published_messages(daemon):
    await some_messages(daemon)
    known = await head_of(daemon)
    await daemon.publish("later")
    found = await verified(daemon, known)
    assert found.is_good
    assert (found.messages, found.entries, found.known) == (7, 5, "found")
    assert found.head == await head_of(daemon)
    assert ChainHead.parse(json.dumps(found.head.shown())) == found.head


async def test_verifying_page_by_page_equals_verifying_at_once(daemon, monkeypatch):
    monkeypatch.setattr("actors.chain.MAX_BYTES", 10)
    await daemon.create()
    await daemon.publish("not covered")
    await daemon.call("PUT", f"{TOPICS}/t/properties", json={"chain": "sha256"})
    for number in range(5):
        await daemon.publish(*(f"{number} {index}" for index in range(number + 1)))
        if number == 2:
            await daemon.call("PUT", f"{TOPICS}/t/properties", json={})
            await daemon.publish("not covered either", "nor this")
            await daemon.call("PUT", f"{TOPICS}/t/properties", json={"chain": "sha256"})
    after, pages, messages = None, 0, 0
    while True:
        query = "?limit=2" if after is None else f"?limit=2&after={after}"
        page = (await daemon.call("GET", f"{ROUTE}/entries{query}")).json()
        pages, messages, after = pages + 1, messages + len(page["messages"]), page["next"]
        if after is None:
            break
    assert messages == 15
    assert pages > 4
    found = await verified(daemon)
    assert (found.is_good, found.messages, found.entries) == (True, 15, 8)


async def test_entries_can_be_read_without_messages(daemon):
    await some_messages(daemon)
    page = (await daemon.call("GET", f"{ROUTE}/entries?messages=false")).json()
    assert (len(page["entries"]), page["messages"], page["next"]) == (4, [], None)
    await daemon.call("GET", f"{ROUTE}/entries?limit=0", status=400, code="invalid_parameter")
    await daemon.call("GET", f"{ROUTE}/entries?after=xyz", status=400, code="invalid_message_id")
    await daemon.call("GET", f"{ROUTE}/entries?messages=maybe", status=400, code="invalid_parameter")


async def test_a_changed_message_is_found_and_its_id_named(daemon):
    await some_messages(daemon)
    key, _ = (await rows(daemon))[2]
    await write(daemon, Delete(Table.MESSAGE, [key]))
    await write(daemon, put_one(Table.MESSAGE, key, plain_head(3) + b"1 x"))
    [fault] = (await verified(daemon)).faults
    assert (fault.kind, fault.id) == ("changed", key[-10:].hex() + "0" * 20)


async def test_removed_inserted_and_swapped_messages_are_found(daemon):
    await some_messages(daemon)
    (a, one), (b, two), (c, _), *_ = await rows(daemon)
    await write(daemon, Delete(Table.MESSAGE, [a, b, c]))
    await write(daemon, Put(Table.MESSAGE, b"", [a, b, a[:-2] + b"\x70\x00"], [two, one, one]))
    faults = (await verified(daemon)).faults
    assert [(fault.kind, fault.id[:20]) for fault in faults] == [
        ("changed", a[-10:].hex()),
        ("inserted", (a[-10:-2] + b"\x70\x00").hex()),
        ("removed", c[-10:].hex()),
    ]


async def test_a_removed_entry_is_found(daemon):
    await some_messages(daemon)
    key, _ = (await rows(daemon, Table.PAYLOAD, ENTRIES))[2]
    await write(daemon, Delete(Table.PAYLOAD, [key]))
    assert "entry-removed" in [fault.kind for fault in (await verified(daemon)).faults]


async def test_a_topic_that_does_not_match_a_kept_head_is_found_out(daemon):
    await some_messages(daemon)
    head = await head_of(daemon)
    longer = replace(head, count=head.count + 5)
    assert [fault.kind for fault in (await verified(daemon, longer)).faults] == ["cut-off"]
    other = replace(head, hash="00" * 32)
    assert [fault.kind for fault in (await verified(daemon, other)).faults] == ["other-chain"]
    anew = replace(head, generation=2)
    assert [fault.kind for fault in (await verified(daemon, anew)).faults] == ["other-chain"]
    with pytest.raises(InvalidParameter, match="topic"):
        Verifying(head, replace(head, topic="ns:other"))


async def test_published_and_rolled_back_messages_of_transactions_are_verified(daemon):
    await daemon.create(chain="sha256")
    pointer = (await daemon.call("POST", "/v1/transactions")).json()["id"]
    body = {"messages": ["undone", "too"], "transactionWritePointer": pointer}
    await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
    during = await verified(daemon)
    assert (during.is_good, during.messages) == (True, 2)
    await daemon.call("POST", f"/v1/transactions/{pointer}/abort")
    found = await verified(daemon)
    assert (found.is_good, found.messages, found.entries) == (True, 2, 3)


async def some_stored(daemon):
    """Publish one of two stored segments in a transaction, and leave other messages staged."""
    pointer = (await daemon.call("POST", "/v1/transactions")).json()["id"]
    for segment, message in (("0.a", "one"), ("1.a", "lost"), ("0.a", "two")):
        body = {"transactionWritePointer": pointer, "segment": segment, "messages": [message, message + " too"]}
        await daemon.call("POST", f"{TOPICS}/t/store", json=body)
    body = {"transactionWritePointer": pointer, "segments": ["0.a"], "messages": ["with them"]}
    await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
    items = [{"payload": "staged", "attributes": {"colour": "red"}}, {"payload": "short", "ttlSeconds": 60}]
    body = {"producer": "job", "segment": "s", "sequenceIds": [0, 1], "messages": items}
    await daemon.call("POST", f"{TOPICS}/t/store", json=body)
    body = {"producer": "job", "segments": ["s"], "sequenceIds": [0], "messages": []}
    await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
    return pointer


async def test_verifying_stored_messages_page_by_page_equals_verifying_at_once(daemon, monkeypatch):
    await daemon.create(chain="sha256")
    pointer = await some_stored(daemon)
    found = await verified(daemon)
    assert (found.faults, found.messages, found.entries) == ((), 4 + 1 + 2, 4)
    monkeypatch.setattr("actors.chain.MAX_BYTES", 10)
    assert await verified(daemon, found.head) == replace(found, known="found")
    after, ids = None, []
    while True:
        query = "?limit=1" if after is None else f"?limit=1&after={after}"
        page = (await daemon.call("GET", f"{ROUTE}/entries{query}")).json()
        ids += [each["id"] for each in page["messages"]]
        after = page["next"]
        if after is None:
            break
        assert len(page["messages"]) <= 2
    assert len(ids) == 1 + 6 + 1 + 1 + 2
    assert ids == sorted(set(ids))
    await daemon.call("POST", f"/v1/transactions/{pointer}/abort")
    found = await verified(daemon)
    assert (found.faults, found.messages, found.entries) == ((), 7, 5)


async def test_a_stored_message_that_was_changed_or_removed_is_found_where_it_was_published(daemon):
    await daemon.create(chain="sha256")
    await some_stored(daemon)
    stored = await rows(daemon, Table.PAYLOAD)
    (key, value) = next(row for row in stored if row[1].endswith(b"two too"))
    published = (await daemon.call("GET", f"{ROUTE}/entries")).json()["entries"][1]["id"]
    await write(daemon, put_one(Table.PAYLOAD, key, value[:-3] + b"few"))
    assert [(fault.kind, fault.id) for fault in (await verified(daemon)).faults] == [("changed", published)]
    await write(daemon, Delete(Table.PAYLOAD, [key]))
    assert [(fault.kind, fault.id) for fault in (await verified(daemon)).faults] == [("removed", published)]


async def test_a_chain_with_stored_messages_continues_after_a_restore_and_records_that_an_open_transaction_is_undone(
    tmp_path,
):
    async with in_process(listener="hot") as daemon:
        await daemon.create(chain="sha256")
        pointer = await some_stored(daemon)
        body = {"producer": "job", "segment": "later", "messages": ["still staged"]}
        await daemon.call("POST", f"{TOPICS}/t/store", json=body)
        known = await head_of(daemon)
        await back_up(daemon, tmp_path / "backups")
        await daemon.call("POST", f"/v1/transactions/{pointer}/commit")
    target = await restored(tmp_path / "backups", None)
    async with in_process(listener="hot", store=target) as daemon:
        daemon.clock.ms += 2_000
        body = {"producer": "job", "segments": ["later"], "sequenceIds": [1], "messages": []}
        await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
        found = await verified(daemon, known)
        # The open transaction's stored messages are gone; its published message counts as rolled back.
        assert (found.faults, found.known, found.restored) == ((), "found", 1)
        assert (found.messages, found.expired) == (1 + 2 + 1, 1)


async def test_a_topic_continues_its_chain_after_a_restart(tmp_path):
    store = await leveldb(tmp_path)
    async with in_process(store=store) as daemon:
        await some_messages(daemon)
        known = (await daemon.call("GET", ROUTE)).json()
    await store.aclose()
    store = await leveldb(tmp_path)
    async with in_process(listener="hot", store=store) as daemon:
        daemon.clock.ms += 1_000
        await daemon.publish("later")
        found = await verified(daemon, ChainHead.of(known))
    await store.aclose()
    assert (found.is_good, found.messages, found.found, found.known) == (True, 7, 0, "found")


async def test_a_head_is_signed_as_standard_webhooks_specifies(tmp_path):
    file = tmp_path / "secrets"
    file.write_text(f"whsec_{SECRET}\n")
    file.chmod(0o600)
    async with in_process(topic__chain_secret_file=str(file)) as daemon:
        await daemon.create(chain="sha256")
        head = (await daemon.call("GET", ROUTE)).json()
        signed = head.pop("signature")
        assert signed["payload"] == f"ns:t 1 1 {head['id']} {head['hash']}"
        text = f"{signed['id']}.{signed['timestamp']}.{signed['payload']}".encode()
        digest = hmac.digest(b"k" * 32, text, hashlib.sha256)
        assert signed["signature"] == f"v1,{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"topic": "a"}', '{"topic":"a:b","generation":1,"count":1,"id":"00","hash":"00"}']
)
def test_text_that_is_not_a_head_is_refused(text):
    with pytest.raises(InvalidParameter, match="not the head"):
        ChainHead.parse(text)


async def restored(backups, at_ms=None):
    """Restore a folder's only backup to a new store."""
    folder = BackupFolder.open(LocalFiles(backups))
    manifest = folder.manifest(folder.last_id())
    source = await RestoredStore.open(folder, manifest, RestoreRequest(at_ms), START_MS + 1_000)
    target = FaultyStore(MemoryStore())
    await RestoreRun(source, target, CopyRequest("kept")).run(lambda: START_MS + 1_000)
    return target


async def test_a_chain_switched_on_after_a_restore_records_the_restore(tmp_path):
    """The entry explains why messages of a transaction that is open in the backup are rolled back."""
    async with in_process(listener="hot") as daemon:
        await some_messages(daemon)
        pointer = (await daemon.call("POST", "/v1/transactions")).json()["id"]
        body = {"messages": ["open"], "transactionWritePointer": pointer}
        await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
        await daemon.call("PUT", f"{TOPICS}/t/properties", json={})
        await back_up(daemon, tmp_path / "backups")
    async with in_process(listener="hot", store=await restored(tmp_path / "backups")) as daemon:
        daemon.clock.ms += 2_000
        await daemon.publish("not covered")
        await daemon.call("PUT", f"{TOPICS}/t/properties", json={"chain": "sha256"})
        await daemon.publish("covered")
        found = await verified(daemon)
        assert (found.faults, found.messages, found.restored) == ((), 8, 1)


async def test_a_page_of_entries_ends_after_about_a_mebibyte_of_them_with_or_without_messages(daemon, monkeypatch):
    await some_messages(daemon)
    monkeypatch.setattr("actors.chain.MAX_BYTES", 10)
    after, found = None, []
    while True:
        query = "?messages=false" if after is None else f"?messages=false&after={after}"
        page = (await daemon.call("GET", f"{ROUTE}/entries{query}")).json()
        assert len(page["entries"]) <= 2
        found += page["entries"]
        after = page["next"]
        if after is None:
            break
    assert len(found) == 4
    assert (await verified(daemon)).messages == 6


async def test_short_messages_fill_a_page_like_long_ones_do(daemon, monkeypatch):
    monkeypatch.setattr("actors.chain.MAX_BYTES", 1_000)
    await daemon.create(chain="sha256")
    await daemon.publish(*[""] * 15)
    await daemon.publish(*[""] * 15)
    page = (await daemon.call("GET", f"{ROUTE}/entries")).json()
    assert len(page["messages"]) == 15 + 15
    await daemon.publish("")
    page = (await daemon.call("GET", f"{ROUTE}/entries")).json()
    assert len(page["messages"]) == 15 + 15
    assert page["next"] is not None
    assert (await verified(daemon)).messages == 31


async def test_there_are_no_entries_after_the_head(daemon):
    await some_messages(daemon)
    page = (await daemon.call("GET", f"{ROUTE}/entries?after={'f' * 20}{'0' * 20}")).json()
    assert (page["entries"], page["messages"], page["next"]) == ([], [], None)


async def test_messages_include_their_own_time_to_live(daemon):
    await daemon.create(chain="sha256")
    body = {"messages": ["long", {"payload": "short", "ttlSeconds": 60}]}
    await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
    page = (await daemon.call("GET", f"{ROUTE}/entries")).json()
    assert [each.get("ttlSeconds") for each in page["messages"]] == [None, 60]
    assert (await verified(daemon)).messages == 2


@pytest.mark.parametrize(("at_ms", "left", "faults"), [(None, 7, []), (START_MS + 2, 4, ["other-chain"])], ids=str)
async def test_a_restored_topic_has_its_chain_and_an_entry_about_the_restore(tmp_path, at_ms, left, faults):
    """Messages of a transaction that was open count as rolled back, without a separate entry."""
    async with in_process(listener="hot") as daemon:
        await some_messages(daemon)
        pointer = (await daemon.call("POST", "/v1/transactions")).json()["id"]
        body = {"messages": ["open"], "transactionWritePointer": pointer}
        await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
        known = await head_of(daemon)
        await back_up(daemon, tmp_path / "backups")
    target = await restored(tmp_path / "backups", at_ms)
    async with in_process(listener="hot", store=target) as daemon:
        daemon.clock.ms += 2_000
        await daemon.publish("later")
        await daemon.publish("later still")
        found = await verified(daemon)
        assert (found.faults, found.messages, found.restored, found.found) == ((), left + 2, 1, 0)
        again = await verified(daemon, known)
        assert [fault.kind for fault in again.faults] == faults
