"""A transaction belongs to the name that began it; lists show only what a name may see; inspection shows no payload."""

from __future__ import annotations

import pytest

from plainsong.protocol.transactions.asks import Begin
from tests.security.named import named

T = "/v1/namespaces/ns/topics"
TX = "/v1/transactions"


@pytest.fixture
async def daemon(tmp_path):
    async with named(tmp_path) as running:
        for topic in ("a", "b"):
            await running.ask("operator", "PUT", f"{T}/{topic}", json={})
        await running.ask("operator", "PUT", "/v1/namespaces/shop/topics/x-1", json={})
        await running.ask("operator", "PUT", "/v1/namespaces/shop/topics/y", json={})
        await running.ask("operator", "PUT", "/v1/namespaces/bank/topics/z", json={})
        yield running


async def begun(daemon, who="owner"):
    return (await daemon.ask(who, "POST", TX, json={"clientId": "of-owner"})).json()["id"]


@pytest.mark.parametrize("verb", ["prepare", "commit", "abort", "invalidate", "checkpoint"])
async def test_a_transaction_is_ended_by_its_name_or_an_operator(daemon, verb):
    first, second = await begun(daemon), await begun(daemon)
    refused = await daemon.ask("other", "POST", f"{TX}/{first}/{verb}")
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert refused.headers["www-authenticate"].endswith('scope="operate service"')
    assert (await daemon.ask("owner", "POST", f"{TX}/{first}/{verb}")).status_code == 200
    assert (await daemon.ask("operator", "POST", f"{TX}/{second}/{verb}")).status_code == 200


async def test_an_existing_topic_needs_no_right_to_create_it(daemon):
    declared = "?ifNotExists=true"
    assert (await daemon.ask("writer", "PUT", f"{T}/a{declared}", json={})).status_code == 200
    assert (await daemon.ask("writer", "PUT", f"{T}/a{declared}", json={"ttl": 5})).json()["code"] == "topic_exists"
    for path in (f"{T}/a", f"{T}/none", f"{T}/none{declared}", f"/v1/namespaces/bank/topics/z{declared}"):
        refused = await daemon.ask("writer", "PUT", path, json={})
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden"), path
    assert (await daemon.ask("operator", "GET", f"{T}/none")).status_code == 404


async def test_a_name_that_may_publish_takes_part_in_the_transaction_of_another_but_cannot_roll_back(daemon):
    pointer = await begun(daemon)
    body = {"transactionWritePointer": pointer, "messages": ["m"]}
    assert (await daemon.ask("writer", "POST", f"{T}/a/publish", json=body)).status_code == 200
    refused = await daemon.ask("writer", "POST", f"{T}/a/rollback", json={"transactionWritePointer": pointer})
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    unknown = {"transactionWritePointer": 17}
    assert (await daemon.ask("writer", "POST", f"{T}/a/rollback", json=unknown)).status_code == 200
    own = {"transactionWritePointer": pointer}
    assert (await daemon.ask("owner", "POST", f"{T}/a/rollback", json=own)).status_code == 200


async def test_the_owner_of_a_transaction_survives_a_restart(tmp_path):
    async with named(tmp_path) as running:
        pointer = await begun(running)
        store = running.daemon.store
        async with named(tmp_path, store=store) as again:
            assert (await again.ask("other", "POST", f"{TX}/{pointer}/abort")).status_code == 403
            assert (await again.ask("owner", "POST", f"{TX}/{pointer}/abort")).status_code == 200


async def test_a_transaction_without_a_name_belongs_to_operators(tmp_path):
    async with named(tmp_path) as running:
        service = running.daemon.service.authority.embedded
        pointer = (await service.ask(Begin())).transaction.transaction_id
        assert (await running.ask("owner", "POST", f"{TX}/{pointer}/commit")).status_code == 403
        assert (await running.ask("operator", "POST", f"{TX}/{pointer}/commit")).status_code == 200


async def test_the_client_and_topics_of_the_transactions_of_others_are_hidden(daemon):
    pointer = await begun(daemon)
    body = {"transactionWritePointer": pointer, "messages": ["m"]}
    await daemon.ask("owner", "POST", f"{T}/b/publish", json=body)
    for path in (TX, f"{TX}/{pointer}"):

        def one(answer):
            return answer.json()[0] if isinstance(answer.json(), list) else answer.json()

        assert one(await daemon.ask("owner", "GET", path))["clientId"] == "of-owner"
        assert one(await daemon.ask("owner", "GET", path))["name"] == "owner"
        assert one(await daemon.ask("watcher", "GET", path))["clientId"] == "of-owner"
        assert one(await daemon.ask("watcher", "GET", path))["name"] == "owner"
        assert one(await daemon.ask("other", "GET", path))["clientId"] is None
        assert "name" not in one(await daemon.ask("other", "GET", path))
    assert (await daemon.ask("reader", "GET", TX)).status_code == 403


async def test_in_the_transaction_of_another_only_visible_topics_are_shown_and_counted(daemon):
    pointer = await begun(daemon, "operator")
    for topics, count in ((f"{T}/a", 2), ("/v1/namespaces/bank/topics/z", 3)):
        body = {"transactionWritePointer": pointer, "messages": ["m"] * count}
        assert (await daemon.ask("operator", "POST", f"{topics}/publish", json=body)).status_code == 200
    for path in (TX, f"{TX}/{pointer}"):
        for who, topics, hidden in (("other", ["ns:a"], 2), ("operator", ["bank:z", "ns:a"], 5)):
            answer = (await daemon.ask(who, "GET", path)).json()
            told = answer[0] if isinstance(answer, list) else answer
            assert (told["topics"], told["hiddenMessages"]) == (topics, hidden), (who, path)


async def test_lists_show_what_the_name_may_see(daemon):
    async def listed(who, path):
        return (await daemon.ask(who, "GET", path)).json()

    assert await listed("operator", "/v1/namespaces") == ["bank", "ns", "shop"]
    assert await listed("narrow", "/v1/namespaces") == ["ns", "shop"]
    assert await listed("stranger", "/v1/namespaces") == []
    assert await listed("narrow", T) == ["a"]
    assert await listed("narrow", "/v1/namespaces/shop/topics") == ["x-1"]
    assert await listed("watcher", T) == ["a", "b"]
    assert (await daemon.ask("narrow", "GET", "/v1/namespaces/bank/topics")).status_code == 403
    names = {
        each["name"] if isinstance(each, dict) else each for each in (await listed("narrow", "/v1/topics"))["topics"]
    }
    assert len(names) == 2


async def test_the_verb_inspect_alone_shows_no_payload_and_no_attribute(daemon):
    body = {"messages": ["secret"], "attributes": [{"key": "hidden"}]}
    assert (await daemon.ask("writer", "POST", f"{T}/a/publish", json=body)).status_code == 200
    (seen,) = (await daemon.ask("reader", "GET", f"{T}/a/messages")).json()
    assert (seen["payload"], seen["attributes"]) == ("secret", {"key": "hidden"})
    answer = await daemon.ask("watcher", "GET", f"{T}/a/messages")
    assert "secret" not in answer.text
    assert "hidden" not in answer.text
    (shown,) = answer.json()
    assert {**seen, "payload": None, "attributes": None} == shown
    one = f"{T}/a/messages/{seen['id']}"
    assert (await daemon.ask("watcher", "GET", one)).json()["payload"] is None
    bare = {"Accept": "application/octet-stream"}
    assert (await daemon.ask("watcher", "GET", one, headers=bare)).status_code == 403
    assert (await daemon.ask("reader", "GET", one, headers=bare)).content == b"secret"
    assert (await daemon.ask("watcher", "GET", f"{T}/a/messages?filter=sec")).status_code == 403


async def test_each_of_many_topics_is_read_or_refused_by_itself(daemon):
    await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["m"]})
    answer = await daemon.ask(
        "narrow", "POST", "/v1/namespaces/ns/poll", json={"topics": {"a": {}, "b": {}, "none": {}}}
    )
    topics = answer.json()["topics"]
    assert topics["a"]["messages"][0]["payload"] == "m"
    assert [topics[name]["error"]["code"] for name in ("b", "none")] == ["forbidden"] * 2
    assert topics["b"]["error"] == {**topics["none"]["error"], "detail": topics["b"]["error"]["detail"]}
