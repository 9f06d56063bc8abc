"""Opening a store on missing or unsuitable gateways: the error says what is wrong and what to do."""

from __future__ import annotations

import shutil
import socket
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.keys import metadata_key
from plainsong.protocol.names import TopicName
from storage.base import StoreUnusable
from storage.hbase.pool import Pool
from storage.hbase.store import HBaseStore
from tests.hbase.conftest import OPTIONS
from tests.hbase_server import PATIENCE_S, free_ports

if TYPE_CHECKING:
    from pathlib import Path

QUICK = replace(OPTIONS, timeout_s=1.0)
MISSING = replace(OPTIONS, table_prefix="contact_", create_tables=False)


@pytest.fixture
def gateway(hbase):
    """Return a function that starts another gateway and returns its address."""

    def start(*options: str, configured: Path | None = None) -> tuple[str, int]:
        (port,) = free_ports(1)
        hbase.start("other", "-p", str(port), *options, configured=configured)
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert hbase.processes["other"].poll() is None
                time.sleep(0.1)
        return "127.0.0.1", port

    yield start
    if "other" in hbase.processes:
        hbase.kill("other")


async def refused(addresses, options=OPTIONS) -> StoreUnusable:
    with pytest.raises(StoreUnusable) as caught:
        await HBaseStore.open(addresses, options)
    return caught.value


async def test_if_no_gateway_answers_each_is_named_with_the_reason():
    first, second = free_ports(2)
    error = await refused([("127.0.0.1", first), ("127.0.0.1", second)], QUICK)
    for port in (first, second):
        assert f"127.0.0.1:{port}: " in error.detail
    assert "no Thrift gateway of HBase answers" in error.detail
    assert "storage.hbase.thrift" in error.hint


async def test_a_silent_listener_is_not_a_gateway():
    with socket.create_server(("127.0.0.1", 0)) as silent, trio.fail_after(PATIENCE_S):
        error = await refused([silent.getsockname()], QUICK)
    assert "no Thrift gateway of HBase answers" in error.detail


async def test_one_gateway_of_several_is_enough(hbase, store):
    (nobody,) = free_ports(1)
    async with await HBaseStore.open([("127.0.0.1", nobody), hbase.address], OPTIONS):
        pass


async def test_an_unframed_gateway_is_distinguished_from_a_missing_one(gateway):
    error = await refused([gateway("-t", "60000")])
    assert "is not framed" in error.detail
    assert "-f" in error.hint


async def test_a_gateway_with_too_small_frames_is_refused_before_a_message_is(hbase, gateway, tmp_path):
    shutil.copytree(hbase.directory / "conf", tmp_path / "conf")
    site = tmp_path / "conf/hbase-site.xml"
    site.write_text(
        site.read_text().replace("max_frame_size_in_mb</name><value>64<", "max_frame_size_in_mb</name><value>2<")
    )
    error = await refused([gateway("-f", configured=tmp_path)])
    assert "does not accept frames of 19 MiB" in error.detail
    assert "max_frame_size_in_mb" in error.hint


async def test_a_gateway_that_ends_while_a_large_frame_is_sent_counts_as_missing(hbase):
    """The store retries it like any gateway that does not answer, and does not blame its settings."""
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        address = listener.socket.getsockname()

        async def forward(source, target, most):
            received = 0
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async for data in source:
                    received += len(data)
                    if received > most:
                        await listener.aclose()
                        break
                    await target.send_all(data)
            await trio.aclose_forcefully(source)
            await trio.aclose_forcefully(target)

        async def serve(client):
            server = await trio.open_tcp_stream(*hbase.address)
            nursery.start_soon(forward, client, server, 1 << 20)
            nursery.start_soon(forward, server, client, 1 << 30)

        async def listen():
            with suppress(trio.ClosedResourceError):
                while True:
                    nursery.start_soon(serve, await listener.accept())

        nursery.start_soon(listen)
        error = await refused([address], QUICK)
        nursery.cancel_scope.cancel()
    assert "no Thrift gateway of HBase answers" in error.detail
    assert "does not accept frames" not in error.detail


async def test_a_missing_table_names_the_script_and_the_existing_prefixes(hbase, store):
    error = await refused([hbase.address], MISSING)
    assert "HBase has no table contact_metadata" in error.detail
    assert "etc/hbase/tables.rb" in error.hint
    assert "'contract_'" in error.hint


@pytest.mark.parametrize("lost", ["metadata", "messages"])
async def test_a_lost_table_is_not_created_again_next_to_the_rows_of_the_others(hbase, lost):
    options = replace(OPTIONS, table_prefix=f"lost_{lost}_")
    name = TopicName("ns", "t")
    async with await HBaseStore.open([hbase.address], options) as made:
        claim = await made.claim(name)
        await made.write([put_one(Table.METADATA, metadata_key(name), b"x")], claim=claim)
        table = f"lost_{lost}_{lost}".encode()
        for call in ("disableTable", "deleteTable"):
            await made._pool.call(call, table)
        for _ in range(2):
            error = await refused([hbase.address], options)
            assert f"but no table {table.decode()}" in error.detail


async def test_creating_the_tables_continues_where_it_was_interrupted(hbase):
    options = replace(OPTIONS, table_prefix="halfmade_")
    async with await HBaseStore.open([hbase.address], options) as made:
        for call in ("disableTable", "deleteTable"):
            await made._pool.call(call, b"halfmade_payloads")
    async with await HBaseStore.open([hbase.address], options) as again:
        assert await again.get(Table.PAYLOAD, b"ns:t:x") is None


async def test_a_table_that_is_disabled_is_not_opened(hbase, store, monkeypatch):
    await store._pool.call("disableTable", b"contract_payloads")
    call = Pool.call

    async def with_its_time(pool, name, *args):
        """Give each call the full time-out; only the wait for a table between calls is short."""
        pool.timeout_s = OPTIONS.timeout_s
        answer = await call(pool, name, *args)
        pool.timeout_s = 0.5
        return answer

    try:
        with monkeypatch.context() as patched:
            patched.setattr(Pool, "call", with_its_time)
            error = await refused([hbase.address])
        assert "contract_payloads is disabled" in error.detail
    finally:
        await store._pool.call("enableTable", b"contract_payloads")


async def test_the_start_waits_for_a_table_that_is_not_enabled_yet(hbase, store, monkeypatch):
    await store._pool.call("disableTable", b"contract_payloads")
    asked = trio.Event()
    call = Pool.call

    async def watched(pool, name, *args):
        answer = await call(pool, name, *args)
        if name == "isTableEnabled" and not answer:
            asked.set()
        return answer

    async def enable_it():
        await asked.wait()
        await store._pool.call("enableTable", b"contract_payloads")

    monkeypatch.setattr(Pool, "call", watched)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(enable_it)
        async with await HBaseStore.open([hbase.address], OPTIONS) as opened:
            assert await opened.get(Table.PAYLOAD, b"ns:t:x") is None
