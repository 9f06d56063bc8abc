"""The settings of a cluster: parsing, and refusals before anything is opened."""

from __future__ import annotations

import pytest

from broker.config import ConfigError, load_config
from broker.config.config import notes
from broker.config.sections import parse_ensemble

HBASE = {"storage.kind": "hbase", "cluster.zookeeper": "zk1:2181,zk2:2181/prod"}


def refused(flags):
    with pytest.raises(ConfigError) as error:
        load_config(None, {}, flags)
    return str(error.value)


def test_an_ensemble_consists_of_addresses_and_a_path():
    assert parse_ensemble("zk:2181") == ("zk:2181", "/plainsong")
    assert parse_ensemble("zk:2181/") == ("zk:2181", "/plainsong")
    assert parse_ensemble("zk1:2181,[::1]:2182/a/b/") == ("zk1:2181,[::1]:2182", "/a/b")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tls": "true"}, "storage.hbase.tls needs storage.hbase.tls_ca"),
        ({"tls": "true", "tls_ca": "ca", "tls_key": "k"}, "tls_certificate and storage.hbase.tls_key need each other"),
        ({"tls_certificate": "c"}, "tls_certificate and storage.hbase.tls_key need each other"),
    ],
)
def test_incomplete_tls_to_hbase_is_refused(given, says):
    assert says in refused(
        {"storage.kind": "hbase"} | {f"storage.hbase.{name}": value for name, value in given.items()}
    )


def test_files_for_tls_to_hbase_without_tls_are_noted():
    flags = {"storage.kind": "hbase", "storage.hbase.tls_ca": "ca.pem"}
    noted = notes(load_config(None, {}, flags).config)
    assert 'storage.hbase.tls_ca = "ca.pem" has no effect without storage.hbase.tls' in noted


def test_a_cluster_is_chosen_by_where_its_zookeeper_is():
    config = load_config(None, {}, HBASE | {"cluster.advertise": "host-1:7420", "http.bind": "0.0.0.0:7420"}).config
    assert config.cluster.zookeeper == "zk1:2181,zk2:2181/prod"
    assert config.cluster.advertise == "host-1:7420"
    assert load_config(None, {}, {}).config.cluster.zookeeper == ""


@pytest.mark.parametrize(
    "said", ["zk", "zk:2181,", "zk:port", "zk:2181/a b", "zk:99999", "zk:2181/../x", "http://zk:2181", "zk:2181/./x"]
)
def test_the_error_for_an_invalid_ensemble_names_the_setting(said):
    assert "cluster.zookeeper" in refused(HBASE | {"cluster.zookeeper": said})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"storage.kind": "leveldb"}, 'needs storage.kind = "hbase", and storage.kind = "leveldb"'),
        ({"http.bind": "0.0.0.0:7420"}, "set cluster.advertise to this instance's address"),
        ({"http.bind": "[::]:7420"}, "set cluster.advertise to this instance's address"),
        ({"cluster.advertise": "0.0.0.0:7420"}, "not an address that other instances and clients can reach"),
        ({"cluster.advertise": "host-1:0"}, "not an address that other instances and clients can reach"),
        ({"cluster.instance": "a/b"}, "up to 100 letters"),
        ({"cluster.weight": 0}, "cluster.weight"),
        (
            {"transactions.commit_deadline_s": 12},
            "commit_deadline_s = 12 is less than cluster.session_timeout_s = 10 and",
        ),
        ({"transactions.abort_deadline_s": 15, "cluster.session_timeout_s": 20}, "at least 23, or remove it"),
    ],
)
def test_invalid_settings_of_a_cluster_are_refused(flags, says):
    assert says in refused(HBASE | flags)


def test_the_commit_deadline_must_cover_a_takeover_only_in_a_cluster():
    for flags in ({"transactions.commit_deadline_s": 13}, {"cluster.session_timeout_s": 60}):
        load_config(None, {}, HBASE | {"cluster.advertise": "host-1:7420"} | flags)
    load_config(None, {}, {"transactions.commit_deadline_s": 1})  # valid without a cluster


def test_a_single_instance_may_listen_anywhere():
    assert load_config(None, {}, {"http.bind": "0.0.0.0:0"}).config.cluster.zookeeper == ""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({}, []),
        ({"http.bind": "0.0.0.0:7420"}, []),
        (
            {"storage.hbase.table_prefix": "prod_"},
            ['table_prefix = "prod_" has no effect while storage.kind = "leveldb"'],
        ),
        ({"cluster.instance": "a", "cluster.weight": 7}, ['instance = "a" has no effect', "weight = 7 has no effect"]),
        (
            {"storage.kind": "hbase"},
            ["without cluster.zookeeper this instance assumes that no other daemon uses its tables"],
        ),
        (HBASE | {"cluster.advertise": "host-1:7420"}, []),
        (HBASE | {"cluster.advertise": "127.0.0.1:7420"}, ["only instances on this machine can reach this one"]),
        (HBASE | {"http.bind": "[::1]:7420"}, ["only instances on this machine can reach this one"]),
        (HBASE | {"http.bind": "host-1:0"}, ["gets a new name at each start"]),
    ],
)
def test_allowed_but_suspicious_settings_are_noted(flags, says):
    found = notes(load_config(None, {}, flags).config)
    assert len(found) == len(says)
    assert all(said in note for said, note in zip(says, found, strict=True))
