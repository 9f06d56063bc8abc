"""TLS to HBase's gateways.

HBase's own gateway offers TLS only over HTTP, which clients of the framed protocol cannot use, so these tests put a
real TLS proxy in front of a real gateway, as in a deployment.
"""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
from dataclasses import replace
from functools import partial

import pytest

from broker.stores import gateway_tls
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.keys import metadata_key
from plainsong.protocol.names import TopicName
from storage.base import StoreError, StoreUnusable
from storage.hbase.settings import HBaseConfig
from storage.hbase.store import HBaseStore
from tests.certificates import Authority
from tests.daemon.harness import Daemon, DaemonEnded, run_plainsong
from tests.daemon.talk import create, publish, read_all
from tests.tls_proxy import TlsProxy

OPTIONS = HBaseConfig(table_prefix="tls_", timeout_s=20.0)
#: Options with a short time-out, for attempts that cannot succeed.
QUICK = replace(OPTIONS, timeout_s=1.0)
NAME = TopicName("shop", "orders")
KEYS = itertools.count()


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def proxy(hbase, authority):
    with TlsProxy(hbase.address, authority.issue("gateway")) as running:
        yield running


def trusting(authority: Authority, pair=None, options: HBaseConfig = OPTIONS):
    """Return the options of a store that trusts an authority, and the function that makes its TLS contexts."""
    certificate, key = ("", "") if pair is None else map(str, pair)
    return options, gateway_tls(str(authority.file), certificate, key)


async def put_and_get(store: HBaseStore) -> None:
    name = TopicName("shop", f"orders{next(KEYS)}")
    key = metadata_key(name)
    await store.write([put_one(Table.METADATA, key, b"value")], claim=await store.claim(name))
    assert await store.get(Table.METADATA, key) == b"value"


async def refused(address, options: HBaseConfig, tls=None) -> str:
    with pytest.raises(StoreUnusable) as caught:
        await HBaseStore.open([address], options, tls)
    return caught.value.detail


async def test_every_call_of_a_store_goes_through_tls(hbase, proxy, authority):
    async with await HBaseStore.open([proxy.address], *trusting(authority)) as store:
        await put_and_get(store)
        # A frame with the largest cell is many TLS records, in both directions.
        large = b"x" * (8 << 20)
        key = metadata_key(TopicName("shop", "large"))
        claim = await store.claim(TopicName("shop", "large"))
        await store.write([put_one(Table.METADATA, key, large)], claim=claim)
        assert await store.get(Table.METADATA, key) == large
    assert proxy.passed >= 2


async def test_a_gateway_of_another_authority_is_refused_and_gets_no_data(hbase, proxy, tmp_path):
    stranger = Authority(tmp_path, "stranger")
    said = await refused(proxy.address, *trusting(stranger, options=QUICK))
    assert "its certificate is not valid: " in said
    assert "self-signed certificate in certificate chain" in said
    assert proxy.passed == 0


async def test_a_certificate_of_another_machine_is_refused(hbase, authority):
    with TlsProxy(hbase.address, authority.issue("elsewhere", "other.example", addresses=["127.0.0.9"])) as proxy:
        said = await refused(proxy.address, *trusting(authority, options=QUICK))
    assert "its certificate is not valid: " in said
    assert "127.0.0.1" in said


async def test_a_gateway_that_requires_a_certificate_gets_one(hbase, authority):
    with TlsProxy(hbase.address, authority.issue("gateway"), clients=authority) as proxy:
        mine = authority.issue("mine", "instance.example")
        async with await HBaseStore.open([proxy.address], *trusting(authority, mine)) as store:
            await put_and_get(store)
        assert "instance.example" in proxy.shown
        passed = proxy.passed
        said = await refused(proxy.address, *trusting(authority, options=QUICK))
        assert proxy.passed == passed
    assert "certificate required" in said


async def test_a_mismatch_of_plain_and_tls_is_recognised(hbase, proxy, authority):
    assert "if it expects TLS, set storage.hbase.tls" in await refused(proxy.address, QUICK)
    assert "perhaps it does not use TLS" in await refused(hbase.address, *trusting(authority, options=QUICK))


async def test_the_next_connections_use_renewed_files(hbase, authority, tmp_path):
    with TlsProxy(hbase.address, authority.issue("gateway")) as proxy:
        async with await HBaseStore.open([proxy.address], *trusting(authority)) as store:
            await put_and_get(store)
            renewed = Authority(tmp_path, "renewed")
            authority.file.write_bytes(renewed.file.read_bytes())
            proxy.show(renewed.issue("gateway"))
            proxy.cut()
            await put_and_get(store)


async def test_broken_files_fail_the_calls_and_not_the_store(hbase, authority, caplog):
    with TlsProxy(hbase.address, authority.issue("gateway")) as proxy:
        good = authority.file.read_bytes()
        async with await HBaseStore.open([proxy.address], *trusting(authority)) as store:
            store._pool.timeout_s = 2.0  # a short time-out, because the call cannot succeed
            authority.file.write_bytes(b"")
            proxy.cut()
            with caplog.at_level(logging.WARNING), pytest.raises(StoreError, match=r"storage\.hbase\.tls_ca"):
                await put_and_get(store)
            authority.file.write_bytes(good)
            store._pool.timeout_s = OPTIONS.timeout_s
            await put_and_get(store)
    assert "an HBase gateway does not answer" in caplog.text


# --- from a user's side ------------------------------------------------------------------------------


def settings(proxy, authority: Authority, prefix: str, **more: object) -> list[str]:
    given = {"thrift": proxy.text, "table_prefix": prefix, "tls": "true", "tls_ca": authority.file} | more
    return ["storage.kind=hbase", *(f"storage.hbase.{name}={value}" for name, value in given.items())]


def plainsong(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_plainsong(*words)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_daemon_and_commands_reach_hbase_over_tls(hbase, authority, tmp_path):
    with TlsProxy(hbase.address, authority.issue("gateway"), clients=authority) as proxy:
        mine = authority.issue("mine", "instance.example")
        files = {"tls_certificate": mine.certificate, "tls_key": mine.key}
        sets = settings(proxy, authority, "tlsd_", **files)
        with Daemon(tmp_path / "data", *sets) as daemon:
            create(daemon.address, "t")
            publish(daemon.address, "t", *(b"%d" % number for number in range(100)))
            assert len(read_all(daemon.address, "t")) == 100
            where = ("--url", "http://{}:{}".format(*daemon.address), "--table-prefix", "tlsd_")
            shown = ("--thrift-ca", authority.file, "--thrift-certificate", mine.certificate, "--thrift-key", mine.key)
            plainsong("maintain", *where, "--thrift", proxy.text, *shown)
            daemon.stop()
        explained = plainsong("store", "explain", "--json", *itertools.chain(*(("--set", each) for each in sets)))
        assert json.loads(explained.stdout)["topics"]
        config = tmp_path / "plainsong.toml"
        lines = {"tls_ca": authority.file, **files}
        config.write_text(
            "[storage.hbase]\ntls = true\n" + "".join(f'{name} = "{path}"\n' for name, path in lines.items())
        )
        sides = ("--from", f"hbase:{proxy.text}?prefix=tlsd_", "--to", f"leveldb:{tmp_path / 'copied'}")
        assert "both sides are the same" in plainsong("copy", *sides, "--config", config).stdout
        assert proxy.shown == {"instance.example"}


@pytest.mark.parametrize("verb", ["serve", "store", "copy", "maintain"])
def test_an_unusable_file_is_a_mistake_in_the_settings(hbase, authority, tmp_path, verb):
    mine = authority.issue("mine")
    mine.key.chmod(0o644)
    with TlsProxy(hbase.address, authority.issue("gateway")) as proxy:
        sets = settings(proxy, authority, "tlse_", tls_certificate=mine.certificate, tls_key=mine.key)
        said = itertools.chain(*(("--set", each) for each in sets))
        config = tmp_path / "plainsong.toml"
        config.write_text(
            f'[storage.hbase]\ntls = true\ntls_ca = "{authority.file}"\n'
            f'tls_certificate = "{mine.certificate}"\ntls_key = "{mine.key}"\n'
        )
        run = partial(plainsong, code=2)
        if verb == "serve":
            done = run("serve", "--bind", "127.0.0.1:0", *said)
        elif verb == "store":
            done = run("store", "explain", *said)
        elif verb == "copy":
            sides = ("--from", f"hbase:{proxy.text}?prefix=tlse_", "--to", f"leveldb:{tmp_path / 'copied'}")
            done = run("copy", *sides, "--config", config)
        else:
            with Daemon(
                tmp_path / "data", "storage.kind=hbase", f"storage.hbase.thrift=127.0.0.1:{hbase.thrift}"
            ) as own:
                shown = (
                    "--thrift-ca",
                    authority.file,
                    "--thrift-certificate",
                    mine.certificate,
                    "--thrift-key",
                    mine.key,
                )
                done = run("maintain", "--url", "http://{}:{}".format(*own.address), "--thrift", proxy.text, *shown)
        assert "can be read by all users (mode 0644)" in done.stderr
        assert "chmod 600" in done.stderr
    assert proxy.passed == 0


def test_a_daemon_does_not_start_on_a_gateway_with_a_bad_certificate(hbase, proxy, tmp_path):
    stranger = Authority(tmp_path, "stranger")
    sets = [*settings(proxy, stranger, "tlsf_"), "storage.hbase.timeout_s=1"]
    with pytest.raises(DaemonEnded, match="its certificate is not valid"):
        Daemon(tmp_path / "data", *sets).start()
    assert proxy.passed == 0
