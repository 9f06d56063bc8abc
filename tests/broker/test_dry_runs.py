"""Dry runs: the counts are correct, refusals equal those of the real change, and nothing changes."""

from __future__ import annotations

import pytest
from broker_in_process import START_MS, TOPICS
from test_committed_polls import begin, decide, held, under

from broker.api.change import NOT_COUNTED, NOTHING
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.asks import PlanCleaning
from storage.base import StoreError
from tests.broker.cluster.in_process import cluster

T = f"{TOPICS}/t"
TX = "/v1/transactions"


async def dry(daemon, method, path, **more):
    """Return the answer to a dry run, and check that nothing has changed."""
    before = await state(daemon)
    answer = await daemon.call(method, f"{path}?dryRun=true", **more)
    assert await state(daemon) == before
    return answer.json() if answer.status_code == 200 else answer


async def really(daemon, told, method, path, **more):
    """Make the change after its dry run, and check that its answer reports the same."""
    etag = {"If-Match": told["etag"]} if told["etag"] else {}
    answer = await daemon.call(method, path, headers={**etag, "Prefer": "return=representation"}, **more)
    done = answer.json()
    assert {name: done[name] for name in told if name != "etag"} == {
        name: False if name == "dryRun" else value for name, value in told.items() if name != "etag"
    }
    return done


async def state(daemon):
    """Return everything that could have changed."""
    found = []
    for path in (
        T,
        f"{T}/messages",
        f"{T}/readers",
        f"{T}/producers",
        "/v1/transactions",
        "/v1/namespaces/ns/properties",
    ):
        answer = await daemon.http.get(path)
        found.append((answer.status_code, answer.text, answer.headers.get("etag")))
    return found


def some(messages, size, oldest_ms, newest_ms):
    return {"messages": messages, "bytes": size, "estimated": False, "oldestMs": oldest_ms, "newestMs": newest_ms}


async def test_the_preview_of_a_shorter_ttl_counts_hidden_messages_exactly(daemon):
    await daemon.create(ttl=3600)
    for at in range(10):
        await daemon.publish("abcde", ms=START_MS + at * 60_000)
    told = await dry(daemon, "PUT", f"{T}/properties", json={"ttl": 300})
    assert (told["dryRun"], told["action"], told["target"], told["changed"]) == (
        True,
        "topic.properties",
        "ns:t",
        ["ttl"],
    )
    assert (told["before"]["ttl"], told["after"]["ttl"]) == ("3600", "300")
    hides = told["effect"]["hides"]
    assert (hides["messages"], hides["oldestMs"], hides["newestMs"]) == (4, START_MS, START_MS + 180_000)
    assert hides["bytes"] >= 20
    assert (told["effect"]["returns"], told["effect"]["removes"]) == (NOTHING, NOTHING)
    answer = await daemon.call("GET", T)
    assert told["etag"] == answer.headers["etag"]
    done = await really(daemon, told, "PUT", f"{T}/properties", json={"ttl": 300})
    assert done["etag"] == (await daemon.call("GET", T)).headers["etag"] != told["etag"]
    assert len(await daemon.poll()) == 10 - hides["messages"]


async def test_the_preview_of_a_longer_ttl_restores_nothing_and_counts_what_stays_expired(daemon):
    await daemon.create(ttl=60)
    await daemon.publish("a", "b", ms=START_MS)
    await daemon.publish("c", ms=START_MS + 90_000)
    told = await dry(daemon, "PUT", f"{T}/properties", json={"ttl": 3600, "max_bytes": 1, "deduplication": "disabled"})
    assert told["effect"] == {"hides": NOTHING, "returns": NOTHING, "removes": NOTHING}
    expired, full, forgotten = told["warnings"]
    assert expired == "2 messages already expired; a longer ttl does not bring expired messages back"
    assert "publishes are refused" in full
    assert forgotten == "the topic forgets 0 producers"
    assert told["changed"] == ["deduplication", "max_bytes", "ttl"]


async def test_a_preview_without_effect_says_so(daemon):
    await daemon.create(ttl=60)
    told = await dry(daemon, "PUT", f"{T}/properties", json={"ttl": 60})
    assert (told["changed"], told["before"]) == ([], told["after"])


async def test_the_preview_of_a_deletion_lists_everything_removed_and_the_undelete_deadline(daemon):
    await daemon.create()
    await daemon.publish("a", ms=START_MS)
    _, last = await daemon.publish("b", producer="p", sequenceIds=[1], ms=START_MS + 5)
    await daemon.call("PUT", f"{T}/readers/r", json={"position": last})
    await under(daemon, await begin(daemon), "undecided")
    stats = (await daemon.call("GET", f"{T}/stats")).json()
    told = await dry(daemon, "DELETE", T)
    assert (told["action"], told["after"]) == ("topic.delete", None)
    assert told["effect"] == {
        "hides": NOTHING,
        "returns": NOTHING,
        "removes": some(3, stats["bytes"], START_MS, START_MS + 5),
        "undeleteUntilMs": START_MS + 5 + daemon.service.config.retention.delete_grace_s * 1000,
        "readers": 1,
        "producers": 1,
        "openTransactions": 1,
        "parkedPolls": 0,
    }
    await really(daemon, told, "DELETE", T)
    back = await dry(daemon, "POST", f"{T}/undelete")
    assert (back["action"], back["before"]) == ("topic.undelete", None)
    assert back["effect"]["returns"] == told["effect"]["removes"]
    done = await really(daemon, back, "POST", f"{T}/undelete")
    assert (done["name"], done["properties"]["generation"]) == ("t", "1")
    assert len(await daemon.poll()) == 3


async def test_an_undelete_restores_the_previewed_generation_or_nothing(daemon):
    await daemon.create()
    await daemon.publish("first")
    await daemon.call("DELETE", T)
    told = await dry(daemon, "POST", f"{T}/undelete")
    await daemon.create()
    await daemon.publish("second")
    await daemon.call("DELETE", T)
    refused = {"headers": {"If-Match": told["etag"]}, "status": 412, "code": "precondition_failed"}
    await daemon.call("POST", f"{T}/undelete", **refused)
    await daemon.call("GET", T, status=404, code="topic_not_found")
    told = await dry(daemon, "POST", f"{T}/undelete")
    await really(daemon, told, "POST", f"{T}/undelete")
    assert [each["payload"] for each in await daemon.poll()] == ["second"]


async def test_a_change_whose_effect_cannot_be_counted_is_answered_as_made(daemon, monkeypatch):
    await daemon.create(ttl=3600)
    await daemon.publish("a", ms=START_MS)
    told = await dry(daemon, "DELETE", T)

    async def fails(*given):
        raise StoreError("the disk is gone")

    monkeypatch.setattr("broker.api.topics.changes.count_from", fails)
    daemon.clock.ms += 1000
    for method, path, more in (
        ("PUT", f"{T}/properties", {"json": {"ttl": 1}}),
        ("DELETE", T, {}),
        ("POST", f"{T}/undelete", {}),
    ):
        done = (await daemon.call(method, path, **more)).json()
        assert (done["warnings"], done["effect"]["removes"]) == ([NOT_COUNTED], NOTHING)
    assert told["effect"]["removes"]["messages"] == 1


async def test_an_empty_topic_loses_nothing_by_its_deletion(daemon):
    await daemon.create()
    assert (await dry(daemon, "DELETE", T))["effect"]["removes"] == NOTHING


async def test_the_preview_of_a_creation_shows_the_topic(daemon):
    told = await dry(daemon, "PUT", T, json={"ttl": 60})
    assert (told["action"], told["before"], told["after"]["ttl"]) == ("topic.create", None, "60")
    await daemon.create()
    await dry(daemon, "PUT", T, status=409, code="topic_exists")


async def test_previews_of_readers_and_producers_show_them_before_and_after(daemon):
    await daemon.create()
    first, last = await daemon.publish("a", "b", producer="p", sequenceIds=[1, 2])
    told = await dry(daemon, "PUT", f"{T}/readers/r", json={"position": first})
    assert (told["action"], told["target"], told["before"]) == ("reader.reset", "ns:t/r", None)
    assert told["after"]["position"] == first
    await daemon.call("PUT", f"{T}/readers/r", json={"position": first})
    told = await dry(daemon, "PUT", f"{T}/readers/r", json={"position": last})
    assert (told["before"]["position"], told["after"]["position"]) == (first, last)
    assert "position" in told["changed"]
    told = await dry(daemon, "DELETE", f"{T}/readers/r")
    assert (told["action"], told["before"]["position"], told["after"]) == ("reader.delete", first, None)
    told = await dry(daemon, "DELETE", f"{T}/producers/p")
    assert (told["action"], told["target"], told["before"]["lastSequenceId"]) == ("producer.delete", "ns:t/p", 2)


async def test_the_preview_of_a_namespace_shows_its_properties_before_and_after(daemon):
    told = await dry(daemon, "PUT", "/v1/namespaces/ns/properties", json={"deduplication": "disabled"})
    assert (told["action"], told["target"]) == ("namespace.properties", "ns:*")
    assert (told["before"], told["after"]) == ({"deduplication": "inherit"}, {"deduplication": "disabled"})


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "more"),
    [
        ("PUT", "t/properties", 400, "invalid_property", {"json": {"ttl": 0}}),
        ("PUT", "t/properties", 412, "precondition_failed", {"headers": {"If-Match": '"1-0"'}}),
        ("PUT", "none/properties", 404, "topic_not_found", {}),
        ("DELETE", "t", 412, "precondition_failed", {"headers": {"If-Match": '"1-0"'}}),
        ("DELETE", "none", 404, "topic_not_found", {}),
        ("POST", "t/undelete", 409, "topic_exists", {}),
        ("POST", "none/undelete", 404, "topic_not_found", {}),
        ("PUT", "t/readers/r", 409, "position_changed", {"json": {"position": "0" * 40, "expected": "1" * 40}}),
        ("DELETE", "t/readers/none", 404, "not_found", {}),
        ("DELETE", "t/producers/none", 404, "producer_not_found", {}),
    ],
)
async def test_a_dry_run_is_refused_like_the_change(daemon, method, path, status, code, more):
    await daemon.create()
    refused = {"status": status, "code": code, **more}
    await dry(daemon, method, f"{TOPICS}/{path}", **refused)
    await daemon.call(method, f"{TOPICS}/{path}", **refused)
    await daemon.call(method, f"{TOPICS}/{path}?dryRun=yes", status=400, code="invalid_parameter")


# --- transactions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "becomes"), [("abort", "aborted"), ("invalidate", "invalid")])
async def test_the_preview_of_an_abort_shows_what_disappears_and_what_it_releases(daemon, verb, becomes):
    await daemon.create()
    await daemon.create("u")
    begun, other = await begin(daemon), await begin(daemon)
    await under(daemon, begun, "one", "two")
    await daemon.publish("plain", "plain")
    await under(daemon, other, "undecided too")
    await daemon.publish("behind both")
    await under(daemon, begun, "three", topic="u")
    async with held(daemon):
        told = await dry(daemon, "POST", f"{TX}/{begun['id']}/{verb}")
        assert (told["action"], told["target"]) == (f"transaction.{verb}", str(begun["id"]))
        assert (told["before"], told["after"]) == ({"state": "in_progress"}, {"state": becomes})
        effect = told["effect"]
        topics = sorted(effect["topics"], key=lambda each: each["topic"])
        assert topics == [{"topic": "ns:t", "messages": 2}, {"topic": "ns:u", "messages": 1}]
        assert effect["releases"] == {"heldPolls": 1, "hiddenMessages": 2}
        done = await really(daemon, told, "POST", f"{TX}/{begun['id']}/{verb}")
        assert (done["id"], done["state"]) == (begun["id"], becomes)
    found = await daemon.poll(isolation="committed")
    assert len(found) == effect["releases"]["hiddenMessages"]


async def test_the_preview_of_a_decided_or_unknown_transaction_is_refused_like_the_change(daemon):
    begun = await begin(daemon)
    await decide(daemon, begun, "commit")
    for verb in ("abort", "invalidate"):
        for query in ("", "?dryRun=true"):
            refused = {"status": 409, "code": "transaction_not_in_progress"}
            await daemon.call("POST", f"{TX}/{begun['id']}/{verb}{query}", **refused)
            await daemon.call("POST", f"{TX}/17/{verb}{query}", status=404, code="transaction_not_found")


async def test_an_abort_returns_the_state_alone_unless_more_is_requested(daemon):
    begun = await begin(daemon)
    answer = await daemon.call("POST", f"{TX}/{begun['id']}/abort")
    assert answer.json() == {"id": begun["id"], "state": "aborted"}


async def test_an_abort_of_a_long_or_an_invalid_transaction_is_previewed_as_it_ends(daemon):
    long, short = await begin(daemon, type="long"), await begin(daemon)
    await decide(daemon, short, "invalidate")
    for begun, before, after in ((long, "in_progress", "invalid"), (short, "invalid", "aborted")):
        told = await dry(daemon, "POST", f"{TX}/{begun['id']}/abort")
        assert (told["before"]["state"], told["after"]["state"]) == (before, after)
        await really(daemon, told, "POST", f"{TX}/{begun['id']}/abort")


async def test_a_deleted_topic_does_not_keep_a_transaction_from_ending(daemon):
    await daemon.create()
    begun = await begin(daemon)
    await under(daemon, begun, "one")
    await daemon.call("DELETE", T)
    told = await dry(daemon, "POST", f"{TX}/{begun['id']}/abort")
    assert told["effect"]["topics"] == [{"topic": "ns:t", "messages": None}]
    assert told["warnings"] == ["ns:t does not answer: its messages are not counted"]
    await really(daemon, told, "POST", f"{TX}/{begun['id']}/abort")


async def test_the_preview_of_a_truncation_counts_the_removed_pointers(daemon):
    begun, kept = await begin(daemon), await begin(daemon)
    for each in (begun, kept):
        await decide(daemon, each, "invalidate")
    told = await dry(daemon, "POST", f"{TX}/truncate", json={"ids": [begun["id"], 17]})
    assert (told["action"], told["target"]) == ("transaction.truncate", "service")
    assert (told["before"], told["after"], told["effect"]["removed"]) == ({"invalid": 2}, {"invalid": 1}, 1)
    told = await dry(daemon, "POST", f"{TX}/truncate", json={"beforeMs": START_MS + 1000})
    assert told["effect"]["removed"] == 2
    done = await really(daemon, told, "POST", f"{TX}/truncate", json={"beforeMs": START_MS + 1000})
    assert done["removed"] == 2
    open_ = await begin(daemon)
    for query in ("", "?dryRun=true"):
        refused = {"status": 400, "code": "invalid_parameter"}
        body = {"beforeMs": START_MS + 10_000}
        await daemon.call("POST", f"{TX}/truncate{query}", json=body, **refused)
    await decide(daemon, open_, "abort")


async def test_previews_are_made_at_the_owner():
    async with cluster("a", "b", transactions__service="embedded") as nodes:
        nodes.move("ns:t", "b")
        await nodes["a"].create()
        await nodes["a"].publish("t", "one", "two")
        told = (await nodes["a"].call("DELETE", f"{T}?dryRun=true")).json()
        assert told["effect"]["removes"]["messages"] == 2
        assert await nodes["a"].poll() == ["one", "two"]


# --- deleted topics --------------------------------------------------------------------------------


async def test_deleted_topics_are_listed_with_their_content_until_they_are_cleaned(daemon):
    grace_ms = daemon.service.config.retention.delete_grace_s * 1000
    assert (await daemon.call("GET", f"{TOPICS}?deleted=true")).json() == []
    for topic, count in (("b", 2), ("a", 0), ("kept", 1)):
        await daemon.create(topic)
        if count:
            await daemon.publish(*["x"] * count, topic=topic)
    stats = (await daemon.call("GET", f"{TOPICS}/b/stats")).json()
    for topic in "ab":
        await daemon.call("DELETE", f"{TOPICS}/{topic}")
    listed = (await daemon.call("GET", f"{TOPICS}?deleted=true")).json()
    common = {"generation": 1, "deletedMs": START_MS, "undeleteUntilMs": START_MS + grace_ms, "state": "kept"}
    assert listed == [
        {"name": "a", **common, "messages": 0, "bytes": 0},
        {"name": "b", **common, "messages": 2, "bytes": stats["bytes"]},
    ]
    everywhere = (await daemon.call("GET", "/v1/topics?deleted=true")).json()
    assert everywhere == {"topics": [{"namespace": "ns", **each} for each in listed], "total": 2, "next": None}
    some = (await daemon.call("GET", "/v1/topics?deleted=true&namespace=ns&q=:B&limit=1")).json()
    assert [each["name"] for each in some["topics"]] == ["b"]
    await daemon.call("POST", f"{TOPICS}/a/undelete")
    await daemon.create("b")
    assert (await daemon.call("GET", f"{TOPICS}?deleted=true")).json() == []
    await daemon.call("GET", f"{TOPICS}?deleted=maybe", status=400, code="invalid_parameter")


async def test_a_deleted_topic_whose_rows_are_being_removed_says_so(daemon):
    await daemon.create()
    await daemon.publish("x")
    await daemon.call("DELETE", T)
    grace_ms = daemon.service.config.retention.delete_grace_s * 1000
    daemon.clock.ms += grace_ms + 1
    await daemon.service.directory.ask(TopicName("ns", "t"), PlanCleaning(grace_ms))
    (found,) = (await daemon.call("GET", f"{TOPICS}?deleted=true")).json()
    assert found["state"] == "partly-cleaned"
    daemon.clock.ms += grace_ms
    assert (await daemon.call("GET", f"{TOPICS}?deleted=true")).json() == []


@pytest.mark.parametrize("count", [0, 1])
async def test_a_deleted_topic_can_be_undeleted_within_the_grace_period_and_not_after_it(daemon, count):
    grace_ms = daemon.service.config.retention.delete_grace_s * 1000
    await daemon.create()
    if count:
        await daemon.publish("x")
    await daemon.call("DELETE", T)
    daemon.clock.ms += grace_ms - 1
    await daemon.call("POST", f"{T}/undelete")
    await daemon.call("DELETE", T)
    daemon.clock.ms += grace_ms
    for query in ("?dryRun=true", ""):
        await daemon.call("POST", f"{T}/undelete{query}", status=410, code="partly_cleaned")
    await daemon.create()
