"""Transaction authorities: one per store, changed only while nothing depends on it; bounds of the settings."""

from __future__ import annotations

import pytest
from broker_in_process import START_MS, TOPICS, in_process

from actors.authority import AuthorityChanged, keep_authority
from broker.authority import build_authority, describe_authority, service_settings
from broker.config.sections import ClusterConfig, TransactionsConfig
from plainsong.protocol.errors import TransactionsUnavailable
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore

POINTER = START_MS * 1_000_000


def kept_store():
    """Return a store that outlives its daemons."""
    return FaultyStore(MemoryStore())


async def publish_under(daemon, pointer, topic="t"):
    body = {"transactionWritePointer": pointer, "messages": ["x"]}
    await daemon.call("POST", f"{TOPICS}/{topic}/publish", json=body)


async def test_a_store_without_undecided_messages_takes_any_authority():
    store = kept_store()
    for service in ("off", "embedded", "off", "embedded"):
        async with in_process(store=store, transactions__service=service) as daemon:
            if service == "off":
                await daemon.call("PUT", f"{TOPICS}/t?ifNotExists=true")
                await daemon.publish("plain")


async def test_another_authority_is_refused_while_undecided_pointers_have_messages():
    store = kept_store()
    async with in_process(store=store, transactions__service="off") as daemon:
        for topic in "abcdefg":
            await daemon.create(topic)
            await publish_under(daemon, POINTER, topic)
    with pytest.raises(AuthorityChanged) as refused:
        await keep_authority(store, "embedded")
    assert "changed from 'off' to 'embedded'" in refused.value.detail
    assert "ns:a, ns:b, ns:c, ns:d, ns:e and others" in refused.value.detail
    assert "transactions.service = 'off'" in refused.value.hint
    await keep_authority(store, "off")  # the refusal changed nothing


async def test_rolled_back_and_decided_pointers_do_not_block_a_change():
    store = kept_store()
    async with in_process(store=store) as daemon:
        await daemon.create()
        for verb in ("commit", "abort"):
            begun = (await daemon.call("POST", "/v1/transactions")).json()
            await publish_under(daemon, begun["id"])
            await daemon.call("POST", f"/v1/transactions/{begun['id']}/{verb}")
        begun = (await daemon.call("POST", "/v1/transactions")).json()
        await publish_under(daemon, begun["id"])
        await daemon.call("POST", f"{TOPICS}/t/rollback", json={"transactionWritePointer": begun["id"]})
    await keep_authority(store, "off")


async def test_a_first_start_accepts_any_choice_whatever_the_store_has():
    store = kept_store()
    await keep_authority(store, "tephra")
    with pytest.raises(TransactionsUnavailable, match="no transaction service"):
        build_authority(TransactionsConfig(service="off"), store, None, None, None, None).transactions.view()


async def test_undecided_pointers_outlive_a_restart_and_are_decided_after_it():
    store = kept_store()
    async with in_process(store=store) as daemon:
        await daemon.create()
        begun = (await daemon.call("POST", "/v1/transactions")).json()
        await publish_under(daemon, begun["id"])
    async with in_process(store=store) as daemon:
        assert await daemon.poll(isolation="committed") == []
        (listed,) = (await daemon.call("GET", "/v1/transactions")).json()
        assert (listed["topics"], listed["hiddenMessages"]) == (["ns:t"], 1)
        await daemon.call("POST", f"/v1/transactions/{begun['id']}/commit")
        assert len(await daemon.poll(isolation="committed")) == 1


async def test_with_a_tephra_its_clients_are_referred_to_it(autojump_clock):
    """No server listens at Tephra's address; the daemon starts nevertheless."""
    settings = {"transactions__service": "tephra", "transactions__tephra": "127.0.0.1:1"}
    async with in_process(**settings) as daemon:
        await daemon.create()
        await daemon.publish("plain")
        await publish_under(daemon, POINTER)
        refused = {"status": 503, "code": "transactions_unavailable"}
        answer = await daemon.call("POST", "/v1/transactions", **refused)
        assert "127.0.0.1:1" in answer.json()["hint"]
        answer = await daemon.call("POST", f"{TOPICS}/t/poll", json={"isolation": "committed"})
        assert [each["payload"] for each in answer.json()] == ["plain"]
        behind = {"isolation": "committed", "startFrom": answer.headers["plainsong-last-id"], "inclusive": False}
        await daemon.call("POST", f"{TOPICS}/t/poll", json=behind, **refused)
        assert len(await daemon.poll()) == 2
        said = (await daemon.call("GET", "/readyz")).json()
        assert (said["ready"], said["transactions"]["available"]) == (True, False)


def test_the_service_has_the_bounds_of_the_settings():
    settings = service_settings(TransactionsConfig(timeout_s=5, max_open=7, abort_deadline_s=0.5))
    assert (settings.timeout_ms, settings.max_open, settings.abort_deadline_s) == (5_000, 7, 0.5)
    assert (settings.max_lifetime_ms, settings.long_timeout_ms) == (90_000_000, 86_400_000)


def test_decisions_wait_for_topics_that_change_hands_whatever_the_session_time_out_is():
    for session_s, expected in ((5.0, (15.0, 15.0)), (30.0, (33.0, 33.0))):
        cluster = ClusterConfig(zookeeper="zk:2181", session_timeout_s=session_s)
        settings = service_settings(TransactionsConfig(), cluster.take_over_s)
        assert (settings.commit_deadline_s, settings.abort_deadline_s) == expected
    alone = ClusterConfig(session_timeout_s=30.0)
    assert service_settings(TransactionsConfig(commit_deadline_s=1.0), alone.take_over_s).commit_deadline_s == 1.0


def test_the_list_is_not_pruned_automatically_while_others_may_rely_on_it():
    assert service_settings(TransactionsConfig()).prune
    assert not service_settings(TransactionsConfig(thrift="127.0.0.1:15165")).prune
    assert not service_settings(TransactionsConfig(prune=False)).prune


def test_the_banner_names_the_authority():
    assert describe_authority(TransactionsConfig()) == "transactions itself"
    assert describe_authority(TransactionsConfig(service="off")) == "no transactions"
    assert "the Tephra at t:1 does" in describe_authority(TransactionsConfig(service="tephra", tephra="t:1"))
