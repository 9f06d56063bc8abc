"""A daemon that other machines can reach requires authentication and TLS, or warns that it runs without them."""

from __future__ import annotations

import pytest

from broker.config import ConfigError, load_config
from broker.config.exposure import Exposure, in_effect, refusals

MENDED = 'set security.authentication = "required" (plainsong token create makes the first token)'
FILES = {"tls.certificate": "c.pem", "tls.key": "k.pem", "tls.client_ca": "ca.pem"}
REQUIRED = {"security.authentication": "required"}


def found(values: dict[str, str]) -> list[Exposure]:
    return refusals(load_config(None, {}, values).config)


@pytest.mark.parametrize("bind", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/a", "unix:/a,127.0.0.2:1"])
def test_loopback_alone_requires_nothing(bind):
    assert found({"http.bind": bind}) == []
    assert found({"transactions.thrift": "127.0.0.1:1"}) == []


def test_the_refusal_has_the_words_of_the_contract():
    (refusal,) = found({"http.bind": "0.0.0.0:7420"})
    assert refusal.detail == (
        'http.bind = "0.0.0.0:7420" can be reached from other machines without authentication and without TLS'
    )
    assert refusal.hint == (
        f'{MENDED}; set tls.certificate and tls.key; or accept the risk: security.allow_insecure = "authentication,tls"'
    )


@pytest.mark.parametrize(
    ("more", "lacks", "hint"),
    [
        (
            REQUIRED,
            "without TLS",
            'set tls.certificate and tls.key; or accept the risk: security.allow_insecure = "tls"',
        ),
        (
            FILES,
            "without authentication",
            f'{MENDED}; or accept the risk: security.allow_insecure = "authentication"',
        ),
        (
            {"security.allow_insecure": "tls"},
            "without authentication",
            f'{MENDED}; or accept the risk: security.allow_insecure = "authentication,tls"',
        ),
        (
            {"security.allow_insecure": "authentication,thrift"},
            "without TLS",
            "set tls.certificate and tls.key; "
            'or accept the risk: security.allow_insecure = "authentication,tls,thrift"',
        ),
    ],
)
def test_only_what_is_missing_is_named(more, lacks, hint):
    (refusal,) = found({"http.bind": "queue.example:7420"} | more)
    assert refusal == Exposure(f'http.bind = "queue.example:7420" can be reached from other machines {lacks}', hint)


def test_only_addresses_that_others_reach_are_named():
    (refusal,) = found({"http.bind": "127.0.0.1:1,10.0.0.1:2,unix:/a,[::]:3"})
    assert refusal.detail.startswith('http.bind = "10.0.0.1:2,[::]:3" can be reached')


@pytest.mark.parametrize(
    "values",
    [
        REQUIRED | FILES,
        {"security.allow_insecure": " authentication , tls "},
        REQUIRED | {"security.allow_insecure": "tls"},
    ],
)
def test_the_daemon_starts_with_both_protections_or_if_they_are_waived_explicitly(values):
    assert found({"http.bind": "0.0.0.0:1"} | values) == []


def test_thrift_beyond_this_machine_needs_certificates():
    everywhere = {"transactions.thrift": "0.0.0.0:15165"}
    (refusal,) = found(everywhere)
    assert refusal.detail == (
        'transactions.thrift = "0.0.0.0:15165" can be reached from other machines without authentication and without TLS'
    )
    assert refusal.hint == (
        'set transactions.thrift_tls = true and tls.client_certificates = "required"; '
        'or accept the risk: security.allow_insecure = "thrift"'
    )
    tls = FILES | {"transactions.thrift_tls": "true"}
    assert "without authentication" in found(everywhere | tls)[0].detail
    assert "TLS" not in found(everywhere | tls)[0].detail
    assert found(everywhere | tls | {"tls.client_certificates": "required"}) == []
    assert found(everywhere | {"security.allow_insecure": "thrift"}) == []


def test_a_missing_protection_is_mentioned_only_where_it_matters():
    def said(values: dict[str, str]) -> list[str]:
        return list(in_effect(load_config(None, {}, values).config).values())

    everything = {"security.allow_insecure": "authentication,tls,thrift"}
    assert said(everything) == []
    assert said(everything | {"http.bind": "0.0.0.0:1"}) == [
        "reachable without authentication",
        "reachable without TLS",
    ]
    assert said(everything | {"http.bind": "0.0.0.0:1"} | REQUIRED) == ["reachable without TLS"]
    assert said(everything | {"transactions.thrift": "0.0.0.0:1"}) == [
        "reachable without a certificate: Thrift at 0.0.0.0:1"
    ]


@pytest.mark.parametrize("words", ["everything", "authentication tls", "tls,", "TLS", "*"])
def test_a_missing_mandatory_protection_is_refused(words):
    with pytest.raises(ConfigError):
        load_config(None, {}, {"security.allow_insecure": words})


def test_instances_with_authentication_prove_themselves_to_each_other():
    cluster = REQUIRED | {"cluster.zookeeper": "zk:2181", "storage.kind": "hbase", "cluster.advertise": "a:7420"}
    (refusal,) = found(cluster)
    assert refusal.detail.startswith(
        'security.authentication = "required" and cluster.zookeeper without cluster.secret'
    )
    assert refusal.hint == (
        "set cluster.secret_file to the same secret on all instances; "
        'or accept the risk: security.allow_insecure = "peers"'
    )
    assert found(cluster | {"cluster.secret_file": "secret"}) == []
    without = cluster | {"security.allow_insecure": "peers"}
    assert found(without) == []
    assert list(in_effect(load_config(None, {}, without).config)) == ["peers"]
    with pytest.raises(ConfigError, match=r"TLS needs tls\.client_ca"):
        load_config(None, {}, cluster | {"tls.certificate": "c", "tls.key": "k"})
