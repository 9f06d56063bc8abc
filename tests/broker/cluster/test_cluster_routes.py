"""Daemons with a real ZooKeeper: the cluster's state, drains and pins, and topics that change owners under load."""

from __future__ import annotations

from itertools import count

import pytest
import trio

from actors.observe import SystemClock
from broker.config.sections import Ensemble
from broker.membership.membership import Membership
from plainsong.protocol.cluster import NameTaken
from tests.broker.cluster.daemons import TOPICS, daemons
from tests.patience import PATIENCE_S

paths = count()


@pytest.fixture
def ensemble(zookeeper):
    return Ensemble(zookeeper.address, f"/of-daemons/{next(paths)}")


async def test_every_instance_shows_members_and_owners(ensemble, monkeypatch):
    async with daemons(ensemble, monkeypatch, "a", "b", "c") as each:
        found = [await daemon.cluster("?topic=ns:t") for daemon in each.values()]
        assert [one["instance"] for one in found] == ["a", "b", "c"]
        assert len({one["topic"]["owner"] for one in found}) == 1
        assert len({one["transactions"] for one in found}) == 1
        for one in found:
            assert one["zookeeper"]["connected"]
            assert [there["address"] for there in one["instances"]] == [
                daemon.address.removeprefix("http://") for daemon in each.values()
            ]
        ready = await each["a"].call("GET", "/readyz")
        assert ready["cluster"]["instances"] == 3
        text = (await each["a"].http.get("/metrics")).text
        assert "plainsong_zookeeper_connected 1.0" in text
        assert "plainsong_instances 3.0" in text
        assert "plainsong_slices 64.0" in text


async def test_a_message_published_anywhere_is_read_everywhere_and_topics_are_counted_where_they_are_open(
    ensemble, monkeypatch
):
    async with daemons(ensemble, monkeypatch, "a", "b") as each:
        for number in range(12):
            await each["a"].call("PUT", f"{TOPICS}/t{number}")
            await each["b"].publish(f"t{number}", "hello")
        for daemon in each.values():
            assert [await daemon.poll(f"t{number}") for number in range(12)] == [["hello"]] * 12
            opened = [there["topicsOpen"] for there in (await daemon.cluster())["instances"]]
            assert sum(opened) == 12
            assert all(opened)


async def test_a_drained_instance_owns_nothing_and_still_answers(ensemble, monkeypatch):
    async with daemons(ensemble, monkeypatch, "a", "b") as each:
        a, b = each["a"], each["b"]
        for number in range(12):
            await a.call("PUT", f"{TOPICS}/t{number}")
            await a.publish(f"t{number}", "one")
        told = await b.call("PUT", "/v1/cluster/instances/a/drain?dryRun=true")
        opened = (await a.cluster())["instances"][0]["topicsOpen"]
        assert (told["action"], told["target"], told["effect"]["moves"]) == (
            "cluster.drain",
            "a",
            {"topicsOpen": opened},
        )
        assert (told["before"], told["after"], told["warnings"]) == ({"drained": False}, {"drained": True}, [])
        assert not (await a.cluster())["instances"][0]["drained"]
        done = await b.call("PUT", "/v1/cluster/instances/a/drain")
        assert (done["instance"], done["drained"]) == ("a", True)
        assert done == {**told, "dryRun": False, "instance": "a", "drained": True}
        found = await a.until(lambda found: found["instances"][0]["topicsOpen"] == 0)
        assert found["instances"][0]["drained"]
        for number in range(12):
            assert await a.owner(f"t{number}") == "b"
            await a.publish(f"t{number}", "two")
            assert await a.poll(f"t{number}") == ["one", "two"]
        assert await a.call("DELETE", "/v1/cluster/instances/a/drain") == {"instance": "a", "drained": False}
        await each.together()
        assert {await a.owner(f"t{number}") for number in range(12)} == {"a", "b"}


async def test_a_pinned_topic_is_at_the_instance_it_is_pinned_to(ensemble, monkeypatch):
    async with daemons(ensemble, monkeypatch, "a", "b") as each:
        a, b = each["a"], each["b"]
        await a.call("PUT", f"{TOPICS}/t")
        for to in ("a", "b", "a"):
            await b.call("PUT", "/v1/cluster/pins/ns/t", json={"instance": to})
            assert await b.owner("t") == to
            await a.publish("t", to)
        assert (await b.cluster())["pins"] == {"ns:t": "a"}
        assert await b.poll("t") == ["a", "b", "a"]
        assert await b.call("DELETE", "/v1/cluster/pins/ns/t") == {"topic": "ns:t", "instance": None}
        assert (await b.cluster())["pins"] == {}


async def test_pins_are_exported_and_imported_with_the_definitions(ensemble, monkeypatch):
    async with daemons(ensemble, monkeypatch, "a", "b") as each:
        a, b = each["a"], each["b"]
        for topic, instance in (("t", "a"), ("u", "b")):
            await a.call("PUT", f"{TOPICS}/{topic}")
            await a.call("PUT", f"/v1/cluster/pins/ns/{topic}", json={"instance": instance})
        with trio.fail_after(PATIENCE_S):  # the other instances apply a pin a moment later
            pins = {"ns:t": "a", "ns:u": "b"}
            while (exported := await b.call("GET", "/v1/definitions"))["pins"] != pins:  # noqa: ASYNC110 - there is no notification
                await trio.sleep(0.01)
        await b.call("DELETE", "/v1/cluster/pins/ns/t")
        await b.call("PUT", "/v1/cluster/pins/ns/u", json={"instance": "a"})
        done = await b.call("PUT", "/v1/definitions", json=exported)
        assert (done["created"], done["changed"]) == (["pins/ns:t"], ["pins/ns:u"])
        assert await b.call("GET", "/v1/definitions") == exported
        assert (await b.cluster())["pins"] == exported["pins"]


async def test_invalid_requests_are_refused(ensemble, monkeypatch):
    async with daemons(ensemble, monkeypatch, "a") as each:
        a = each["a"]
        assert (await a.call("PUT", "/v1/cluster/instances/b/drain", status=404))["code"] == "not_found"
        refused = await a.call("PUT", "/v1/cluster/pins/ns/t", json={"instance": "b"}, status=400)
        assert refused["code"] == "invalid_parameter"
        await a.call("PUT", "/v1/cluster/pins/ns/t", status=400)
        await a.call("PUT", "/v1/cluster/pins/ns/a b", json={"instance": "a"}, status=400)
        await a.call("GET", "/v1/cluster?topic=t", status=400)
        await a.call("DELETE", "/v1/cluster/instances/b/drain")


async def test_a_stopping_instance_hands_over_its_topics_while_they_are_in_use(ensemble, monkeypatch):
    async with daemons(ensemble, monkeypatch, "a", "b") as each:
        a, b = each["a"], each["b"]
        names = [f"t{number}" for number in range(6)]
        for name in names:
            await a.call("PUT", f"{TOPICS}/{name}")
        published = {name: [] for name in names}
        left = trio.Event()

        async def publisher(name, more, enough):
            while more:
                payload = f"{name}-{len(published[name])}"
                answer = await b.http.post(f"{TOPICS}/{name}/publish", json={"messages": [payload]})
                if answer.status_code == 200:
                    published[name].append(payload)
                else:
                    assert answer.json()["outcome"] == "not-applied", answer.text
                if len(published[name]) > 20:
                    enough.set()
                more -= left.is_set()

        async with trio.open_nursery() as nursery:
            enough = {name: trio.Event() for name in names}
            for name in names:
                nursery.start_soon(publisher, name, 10, enough[name])
            for each_enough in enough.values():
                await each_enough.wait()
            a.leave()
            await a.ended.wait()
            await b.until(lambda found: [there["name"] for there in found["instances"]] == ["b"])
            left.set()
        for name in names:
            assert await b.poll(name) == published[name]


async def test_a_long_poll_survives_the_handover_of_its_topic(ensemble, monkeypatch):
    async with daemons(ensemble, monkeypatch, "a", "b") as each:
        a, b = each["a"], each["b"]
        await a.call("PUT", f"{TOPICS}/t")
        await a.call("PUT", "/v1/cluster/pins/ns/t", json={"instance": "a"})
        found = []

        async def consume():
            while not found:
                found.extend(await b.poll("t", waitMs=20_000))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(consume)
            await a.until(lambda found: found["instances"][0]["topicsOpen"])
            await a.call("PUT", "/v1/cluster/pins/ns/t", json={"instance": "b"})
            await b.publish("t", "after the hand-over")
        assert found == ["after the hand-over"]


async def test_an_open_transaction_stays_open_when_its_service_moves(ensemble, monkeypatch):
    async with daemons(ensemble, monkeypatch, "a", "b", **{"transactions.service": "embedded"}) as each:
        first = (await each["a"].cluster())["transactions"]
        (other,) = (daemon for name, daemon in each.items() if name != first)
        await other.call("PUT", f"{TOPICS}/t")
        begun = await other.call("POST", "/v1/transactions", json={})
        body = {"messages": ["under it"], "transactionWritePointer": begun["writePointer"]}
        await other.call("POST", f"{TOPICS}/t/publish", json=body)
        each[first].leave()
        await each[first].ended.wait()
        assert await other.poll("t", isolation="committed") == []
        await other.call("POST", f"/v1/transactions/{begun['id']}/commit")
        assert await other.poll("t", isolation="committed") == ["under it"]


async def test_a_dead_instance_is_replaced_and_nothing_acknowledged_is_lost(ensemble, monkeypatch):
    async with daemons(ensemble, monkeypatch, "a", "b") as each:
        a, b = each["a"], each["b"]
        names = [f"t{number}" for number in range(8)]
        for name in names:
            await b.call("PUT", f"{TOPICS}/{name}")
            await b.publish(name, "before")
        a.kill()
        await a.ended.wait()
        for name in names:
            await b.publish(name, "after")
            assert await b.poll(name) == ["before", "after"]


async def test_a_second_instance_of_one_name_is_refused(ensemble, monkeypatch):
    async with daemons(ensemble, monkeypatch, "a") as each:
        first = each["a"]
        with pytest.raises(ExceptionGroup) as refused:
            await started_concurrently(each, "a", **{"cluster.session_timeout_s": 5.0})  # it retries for one session
        assert refused.group_contains(NameTaken, depth=None)
        each["a"] = first
        await first.call("GET", "/readyz")


async def started_concurrently(each, name, **values):
    """Start another daemon, whose end does not end the others."""
    async with trio.open_nursery() as nursery:
        each._nursery = nursery
        await each.start(name, **values)


async def test_an_instance_whose_name_is_taken_is_not_ready_and_says_why(ensemble, monkeypatch):
    async with daemons(ensemble, monkeypatch, "a") as each:
        a = each["a"]
        membership = a.membership
        path = f"{ensemble.path}/instances/a"
        await membership._reading.acquire()  # delays the notice
        node = await membership._zookeeper.get(path)
        await membership._zookeeper.delete(path, node.version)
        async with trio.open_nursery() as nursery:
            other = Membership(ensemble, "a", weight=100, session_timeout_s=PATIENCE_S, clock=SystemClock())
            await nursery.start(other.run)
            await other.enter("elsewhere:7420")
            membership._reading.release()
            answer = await a.http.get("/readyz")
            while answer.status_code == 200:
                answer = await a.http.get("/readyz")
            assert (answer.json()["code"], "elsewhere:7420" in answer.json()["detail"]) == ("no_owner", True)
            monkeypatch.setattr("broker.cluster.owners.PATIENCE_S", 0.1)
            refused = await a.http.put(f"{TOPICS}/t")
            assert (refused.status_code, refused.json()["outcome"]) == (503, "not-applied")
            nursery.cancel_scope.cancel()
        while (await a.http.get("/readyz")).status_code != 200:
            pass
        await a.call("PUT", f"{TOPICS}/t")
