"""Errors in the settings of a second copy are reported before anything is written, and never show a secret."""

from __future__ import annotations

import sys

import pytest

from broker.config import ConfigError, load_config
from broker.config.config import notes
from broker.replication import open_for_backups, open_objects, outbox_of
from storage.base import StoreUnusable


def loaded(**values):
    return load_config(None, {}, {f"replication.{name}": value for name, value in values.items()}).config


def test_without_a_place_there_is_no_second_copy():
    assert outbox_of(loaded()) is None
    assert outbox_of(loaded(to="file:/somewhere")) is not None


@pytest.mark.parametrize("kind", ["memory", "hbase"])
def test_only_the_store_on_this_disk_has_a_second_copy(kind):
    with pytest.raises(ConfigError, match="leveldb") as refused:
        load_config(None, {}, {"replication.to": "s3://bucket/x", "storage.kind": kind})
    assert "HBase keeps its own replicas" in refused.value.problems[0].hint


def test_a_backlog_holds_two_segments_at_least():
    with pytest.raises(ConfigError, match=r"replication\.segment_bytes"):
        loaded(to="file:/x", backlog_bytes="4 MiB", segment_bytes="3 MiB")


@pytest.mark.parametrize("lease_s", [1e-9, 0.1, 0.99])
def test_a_lease_that_no_object_store_renews_in_time_is_refused(lease_s):
    with pytest.raises(ConfigError, match=r"replication\.lease_s") as refused:
        loaded(to="file:/x", lease_s=lease_s)
    assert "by hand" in refused.value.problems[0].hint


@pytest.mark.parametrize("lease_s", [0, 1, 3600])
def test_a_lease_has_a_time_or_none(lease_s):
    assert loaded(to="file:/x", lease_s=lease_s).replication.lease_s == lease_s


def test_a_folder_has_no_lease_so_no_standby_can_be_expected():
    with pytest.raises(ConfigError, match="it has no lease"):
        loaded(to="file:/somewhere", standby="expected")
    assert loaded(to="s3://bucket/x", standby="expected").replication.standby == "expected"


def test_settings_without_a_place_are_noted():
    assert any("without replication.to" in note for note in notes(loaded(keep_s=60)))


@pytest.mark.parametrize("url", ["ftp://host/x", "bucket", "file:relative"])
def test_a_place_of_another_kind_is_refused(url):
    with pytest.raises(ConfigError, match="or file:/path"):
        loaded(to=url)


@pytest.mark.parametrize(
    "urls", ["http://db-1:7420", "http://db-1:7420, https://[::1]:1", "http://xn--hxalaok.example"]
)
def test_urls_of_the_primary_may_be_several(urls):
    assert loaded(to="file:/x", urls=urls).replication.urls == urls


@pytest.mark.parametrize(
    "urls", ["db-1:7420", "http://d\xe9:1", "http://a,http://\u6771", "http://a b", "http://a\tb", ","]
)
def test_urls_that_no_header_can_carry_are_refused(urls):
    with pytest.raises(ConfigError, match=r"replication\.urls"):
        loaded(to="file:/x", urls=urls)


def test_credentials_in_the_place_are_refused_and_not_quoted():
    with pytest.raises(StoreUnusable, match="environment") as refused:
        open_objects(loaded(to="s3://key:a-secret@bucket/x").replication.to, 1.0)
    assert "a-secret" not in str(refused.value)


@pytest.mark.parametrize("open_", [open_objects, open_for_backups])
def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch, open_):
    monkeypatch.delitem(sys.modules, "storage.replication.object_store", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StoreUnusable, match=r"plainsong-server\[replication\]"):
        open_("s3://bucket/x", 1.0)
