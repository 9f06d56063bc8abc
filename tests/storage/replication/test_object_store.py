"""One contract for every object store: memory, a local folder, and a real S3 server."""

from __future__ import annotations

import errno
import os
import stat
import threading

import pytest
import trio

from plainsong.protocol.effects import Table
from storage.base import StoreUnusable
from storage.replication import protocol
from storage.replication.carry import ObjectStoreRefused, ObjectStoreUnavailable, carry_out
from storage.replication.object_store import ObjectStore, open_blocking
from storage.replication.protocol import Exchange, Fetched, Get, Verdict
from storage.replication.segment import ASYNC, Change, Commit
from tests.patience import PATIENCE_S
from tests.ports import free_ports
from tests.storage.replication.s3_server import BUCKET, s3_server

DONE, REFUSED = Verdict.DONE, Verdict.REFUSED
FIRST, SECOND = bytes([1] * 16), bytes([2] * 16)


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


#: A prefix of characters that URLs encode, or that look encoded.
ODD = "a%20b+c%2F\xe9:d=e&f"


@pytest.fixture(params=["memory", "file", "s3", "file-odd", "s3-odd"])
def url(request, tmp_path, monkeypatch):
    kind, _, is_odd = request.param.partition("-")
    if kind == "memory":
        return "memory:"
    if kind == "file":
        return f"file:{tmp_path}/{ODD if is_odd else 'copies'}"
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}/{ODD if is_odd else 'below'}"


@pytest.fixture
def objects(url):
    return ObjectStore.open(url, timeout_s=PATIENCE_S)


async def no_pause(_):
    await trio.lowlevel.checkpoint()


async def test_an_object_is_read_as_it_was_created_and_a_missing_one_is_none(objects):
    data = bytes(range(256)) * 40
    assert await objects.get("log/1/1") is None
    assert await objects.create("log/1/1", data) is DONE
    assert (await objects.get("log/1/1")).data == data
    assert await objects.create("empty", b"") is DONE
    assert (await objects.get("empty")).data == b""


async def test_of_many_concurrent_creations_of_one_object_exactly_one_succeeds(objects):
    verdicts = {}

    async def attempt(data):
        while data not in verdicts:
            verdict = await objects.create("log/1/1", data)
            # 409: another write was under way, and nothing is there yet
            if verdict is DONE or await objects.get("log/1/1") is not None:
                verdicts[data] = verdict

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(attempt, b"%d" % number)
    (winner,) = [data for data, verdict in verdicts.items() if verdict is DONE]
    assert (await objects.get("log/1/1")).data == winner


async def test_an_object_is_never_created_over_another_not_even_an_equal_one(objects):
    assert await objects.create("a", b"one") is DONE
    assert await objects.create("a", b"two") is REFUSED
    assert await objects.create("a", b"one") is REFUSED
    assert (await objects.get("a")).data == b"one"


async def test_an_object_is_replaced_only_in_the_version_that_was_read(objects, url):
    await objects.create("lease.json", b"one")
    first = await objects.get("lease.json")
    if url.startswith("file:"):
        with pytest.raises(StoreUnusable, match="conditionally"):
            await objects.exchange("lease.json", b"two", first.etag)
        assert (await objects.get("lease.json")).data == b"one"
        return
    assert await objects.exchange("lease.json", b"two", first.etag) is DONE
    assert await objects.exchange("lease.json", b"three", first.etag) is REFUSED
    second = await objects.get("lease.json")
    assert (second.data, second.etag != first.etag) == (b"two", True)
    assert await objects.exchange("missing", b"x", first.etag) is REFUSED
    assert await objects.get("missing") is None


async def test_names_below_a_prefix_are_listed_in_order_and_no_others(objects):
    names = [f"bases/{number:020}/m" for number in range(120)]
    async with trio.open_nursery() as nursery:
        for name in [*names, "log/1/1", "basest/1"]:
            nursery.start_soon(objects.create, name, b"x")
    assert await objects.names("bases") == names
    assert await objects.names("none") == []


async def test_removed_objects_are_absent_and_missing_ones_are_not_an_error(objects):
    for name in ("a", "b", "c"):
        await objects.create(name, b"x")
    await objects.remove(["missing", "a", "c"])
    assert [await objects.get(name) is None for name in ("a", "b", "c")] == [True, False, True]


@pytest.fixture
def share(tmp_path):
    return tmp_path / "share"


@pytest.fixture
def folder(share):
    return open_blocking(f"file:{share}", timeout_s=1)


def test_a_folder_that_another_one_replaces_stays_the_one_that_was_opened(share, folder, tmp_path):
    assert folder.create("log/1/1", b"one") is DONE
    share.rename(tmp_path / "unmounted")
    share.mkdir()
    assert folder.create("log/1/1", b"two") is REFUSED
    assert folder.create("log/1/2", b"two") is DONE
    folder.put("lease.json", b"x")
    assert folder.get("log/1/1").data == b"one"
    assert [name for name, _ in folder.sizes("")] == ["lease.json", "log/1/1", "log/1/2"]
    assert list(share.iterdir()) == []
    assert (tmp_path / "unmounted/log/1/2").read_bytes() == b"two"


def test_nothing_is_written_in_the_place_of_a_folder_that_was_removed(share, folder):
    share.rmdir()
    share.mkdir()
    with pytest.raises(ObjectStoreRefused, match="was removed"):
        folder.create("log/1/1", b"one")
    assert list(share.iterdir()) == []


def test_a_file_of_a_folder_that_was_never_completed_is_no_object(share, folder):
    (share / "log/1").mkdir(parents=True)
    (share / "log/1/1#1").write_bytes(b"half")
    assert folder.sizes("log") == []
    assert folder.create("log/1/1", b"one") is DONE
    assert folder.sizes("log") == [("log/1/1", 3)]


def test_an_object_of_a_folder_that_cannot_be_synced_is_neither_created_nor_read(folder, monkeypatch):
    assert folder.create("log/1/1", b"one") is DONE
    synced = os.fsync

    def fail(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    assert folder.create("log/1/2", b"two") is Verdict.UNKNOWN
    with pytest.raises(ObjectStoreUnavailable, match="Input/output error"):
        folder.get("log/1/1")


async def test_a_call_that_never_returns_is_given_up(autojump_clock, monkeypatch):
    objects, never = ObjectStore.open("memory:", timeout_s=1), threading.Event()
    monkeypatch.setattr("obstore.put", lambda *_, **__: never.wait(PATIENCE_S))
    monkeypatch.setattr("obstore.get", lambda *_, **__: never.wait(PATIENCE_S))
    assert await objects.create("a", b"x") is Verdict.UNKNOWN
    with pytest.raises(ObjectStoreUnavailable, match="no answer"):
        await objects.get("a")
    never.set()


async def test_two_processes_take_the_log_over_one_after_the_other_and_the_first_is_fenced(objects, url):
    if url.startswith("file:"):
        pytest.skip("a local folder has no lease")
    applied = []

    async def apply(segments):
        applied.extend(segments)
        await trio.lowlevel.checkpoint()

    async def do(steps):
        return await carry_out(objects, steps, apply, pause=no_pause)

    reign = protocol.Reign(await do(protocol.take_over(FIRST, protocol.ROOT)), FIRST, ASYNC, has_base=False)
    opening = reign.open(40, 1)
    written = reign.cut(41, [Commit(2, (Change(Table.MESSAGE, b"key", b"value"),))])
    late = reign.cut(42, [Commit(3, (Change(Table.MESSAGE, b"key", b"late"),))])
    await do(protocol.store(opening))
    await do(protocol.store(written))
    await do(protocol.store(written))  # its answer was lost
    place = await do(protocol.take_over(SECOND, protocol.ROOT, known=1))
    assert (place.epoch, place.number, place.commit) == (2, 1, 41)
    assert [segment.last for segment in applied] == [40, 41]
    with pytest.raises(protocol.ReignOver):
        await do(protocol.store(late))


async def test_a_read_without_an_answer_is_repeated_and_a_lost_answer_of_a_write_is_reported(monkeypatch):
    objects, pauses, seen = ObjectStore.open("memory:", timeout_s=1), [], []
    await objects.create("a", b"one")
    failures = iter([True, True, False])
    real = objects.get

    async def get(name):
        if next(failures):
            raise ObjectStoreUnavailable("no answer")
        return await real(name)

    async def exchange(name, data, etag):
        del name, data, etag
        await trio.lowlevel.checkpoint()
        return Verdict.UNKNOWN

    async def pause(seconds):
        pauses.append(seconds)
        await trio.lowlevel.checkpoint()

    def steps():
        seen.append((yield Get("a")))
        seen.append((yield Exchange("a", b"two", "0")))

    monkeypatch.setattr(objects, "get", get)
    monkeypatch.setattr(objects, "exchange", exchange)
    await carry_out(objects, steps(), apply=no_pause, pause=pause)
    assert isinstance(seen[0], Fetched)
    assert seen[1] is Verdict.UNKNOWN
    assert pauses == [0.1, 0.2, 0.1]


async def test_wrong_credentials_are_refused_and_are_in_no_error(s3, monkeypatch):
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    objects = ObjectStore.open(f"s3://{BUCKET}/x", timeout_s=PATIENCE_S)
    for call in (objects.get("a"), objects.create("a", b"x"), objects.names("log"), objects.remove(["a"])):
        with pytest.raises(ObjectStoreRefused) as refused:
            await call
        assert "wrong-secret" not in str(refused.value)


async def test_a_bucket_that_does_not_exist_is_reported(s3, monkeypatch):
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    objects = ObjectStore.open("s3://no-such-bucket/x", timeout_s=PATIENCE_S)
    with pytest.raises(ObjectStoreRefused, match="no such bucket"):
        await objects.create("FORMAT", b"1")


async def test_a_server_that_is_unavailable_leaves_a_write_unknown_and_fails_a_read(monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    objects = ObjectStore.open("s3://away/x", timeout_s=PATIENCE_S)
    assert await objects.create("a", b"x") is Verdict.UNKNOWN
    with pytest.raises(ObjectStoreUnavailable):
        await objects.get("a")
    with pytest.raises(ObjectStoreUnavailable):
        await objects.names("a")


@pytest.mark.parametrize(("url", "named"), [("gs://bucket/x", "version"), ("az://container/x", "e_tag")])
def test_the_object_stores_of_google_and_azure_are_opened_and_a_replacement_names_a_version(url, named, monkeypatch):
    """Nothing is asked of them here; a request would need credentials."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    modes = []
    monkeypatch.setattr("obstore.put", lambda *_, mode, **__: modes.append(mode))
    objects = open_blocking(url, timeout_s=1)
    assert objects.exchange("lease.json", b"x", "7") is DONE
    assert modes == [{named: "7"}]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://x/y",
        "s3:///x",
        "file:relative",
        "file://host/x",
        "s3://key:secret@bucket/x",
        "s3://bucket/x?secret=y",
    ],
)
def test_a_url_that_is_not_one_of_an_object_store_is_refused_without_quoting_credentials(url):
    with pytest.raises(StoreUnusable) as refused:
        ObjectStore.open(url, timeout_s=1)
    assert "secret" not in str(refused.value)
