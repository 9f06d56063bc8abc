"""The failure matrix of producers on HBase, row by row, and the test that covers each row there.

row of deduplication's matrix        shown on HBase by
1, 10, 11, 12, 13, 14, 15, 19, 28    this file
2, 8, 10, 23                         test_matrix_on_hbase: any call lost, late or cut
3, 4, 5, 6, 7                        test_matrix_on_hbase: the daemon dies in any call
9, 26                                this file: a gateway that stalls, one that refuses
20, 21                               this file: an owner that was replaced; tests/hbase/test_hbase_owners.py, and
                                     every interleaving in tests/storage/test_ownership_model.py
24                                   test_cluster_histories: a clock that jumps by an hour under load
16, 17, 18, 22, 25, 27               tests/broker/test_producer_failures.py: rules of the core, before any store
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import trio

from tests.cluster.cases import MAX_CELL_BYTES
from tests.cluster.harness import SESSION_TIMEOUT_S, Cluster, Instance, open_cluster
from tests.cluster.proxy import Fate, Once, calm
from tests.daemon.harness import Daemon
from tests.daemon.talk import JSON_HEADERS, Answer, ConnectionLost, NotConnected, Talk, ask, topic_path
from tests.patience import PATIENCE_S

TX = "/v1/transactions"
#: Body of a begin whose transaction outlives several starts of a daemon on a busy machine.
LONG = b'{"timeoutSeconds": 600}'


@pytest.fixture(scope="module")
def daemon(hbase, tmp_path_factory):
    """A daemon shared by all tests whose only fault is its death."""
    directory = tmp_path_factory.mktemp("rows")
    sets = ["storage.min_free_bytes=0", "storage.kind=hbase", f"storage.hbase.thrift=127.0.0.1:{hbase.thrift}"]
    sets += ["storage.hbase.table_prefix=rows_", f"storage.hbase.max_cell_bytes={MAX_CELL_BYTES}"]
    with Daemon(directory / "data", *sets) as running:
        yield running


class Topic:
    """A new topic, and requests to it."""

    def __init__(self, daemon: Daemon, name: str) -> None:
        self.daemon, self.name = daemon, name
        assert self.ask("PUT", "", {}).status == 200

    def ask(self, method: str, path: str, value: Any = None) -> Answer:
        body = b"" if value is None else json.dumps(value).encode()
        return ask(self.daemon.address, method, topic_path(self.name, path), body, JSON_HEADERS)

    def open(self) -> dict[str, Any]:
        opened: dict[str, Any] = self.ask("PUT", "/producers/p", {}).json()
        return opened

    def send(self, sequences: list[int], **more: Any) -> Answer:
        messages = [f"m{number}" for number in sequences]
        return self.ask("POST", "/publish", {"producer": "p", "sequenceIds": sequences, "messages": messages, **more})

    def read(self) -> list[str]:
        return [message["payload"] for message in self.ask("POST", "/poll", {}).json()]


def die(daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


@pytest.mark.parametrize("dies", [False, True], ids=["alive", "killed"])
def test_rows_1_and_10_to_14_repeated_ids_get_their_outcome(daemon, dies):
    topic = Topic(daemon, f"again-{dies}")
    assert topic.open()["lastSequenceId"] == -1
    first = topic.send([0]).json()
    for sequence in range(1, 8):
        topic.send([sequence])
    last = topic.send([9]).json()
    if dies:
        die(daemon)
    assert topic.open()["lastSequenceId"] == 9
    again, older, never = topic.send([9]).json(), topic.send([0]).json(), topic.send([8]).json()
    assert (again["duplicate"], again["firstId"], again["lastId"]) == (True, last["firstId"], last["lastId"])
    assert (older["duplicate"], older["firstId"], first["duplicate"]) == (True, None, False)
    assert (never["duplicate"], never["firstId"]) == (True, None)
    assert topic.send([9, 10], atomic=True).code == "partial_duplicate"
    assert topic.send([9, 10]).headers["plainsong-duplicate"] == "partial"
    assert topic.read() == [f"m{number}" for number in (*range(8), 9, 10)]


@pytest.mark.parametrize("dies", [False, True], ids=["alive", "killed"])
def test_row_15_an_older_session_is_fenced(daemon, dies):
    topic = Topic(daemon, f"fenced-{dies}")
    older, newer = topic.open()["epoch"], topic.open()["epoch"]
    assert newer > older
    if dies:
        die(daemon)
    assert topic.send([0], producerEpoch=older).code == "producer_fenced"
    assert topic.send([0], producerEpoch=newer).status == 200
    assert topic.read() == ["m0"]


def test_row_19_a_recreated_topic_accepts_nothing_meant_for_the_old_one(daemon):
    topic = Topic(daemon, "anew")
    generation = topic.open()["generation"]
    topic.send([0], generation=generation)
    assert topic.ask("DELETE", "").status == 200
    die(daemon)
    assert topic.ask("PUT", "", {}).status == 200
    assert topic.send([0], generation=generation).code == "generation_changed"
    told = topic.ask("GET", f"/producers/p?generation={generation}").json()
    assert told["lastSequenceId"] == 0
    assert topic.read() == []


@pytest.mark.parametrize("dies", [False, True], ids=["alive", "killed"])
def test_row_28_and_e59_ids_that_a_rolled_back_transaction_used_are_consumed(daemon, dies):
    topic = Topic(daemon, f"consumed-{dies}")
    begun = [ask(daemon.address, "POST", TX, LONG, JSON_HEADERS).json() for _ in range(2)]
    one, other = (each["writePointer"] for each in begun)
    first = topic.send([0, 1], transactionWritePointer=one)
    if dies:
        die(daemon)
    assert topic.send([0, 1], transactionWritePointer=one).json() == first.json() | {"duplicate": True}
    assert ask(daemon.address, "POST", f"{TX}/{begun[0]['id']}/abort", b"", JSON_HEADERS).json()["state"] == "aborted"
    assert topic.send([0, 1], transactionWritePointer=other).code == "sequence_consumed"
    assert topic.send([2], transactionWritePointer=other).status == 200
    assert (
        ask(daemon.address, "POST", f"{TX}/{begun[1]['id']}/commit", b"", JSON_HEADERS).json()["state"] == "committed"
    )
    committed = topic.ask("POST", "/poll?isolation=committed", {}).json()
    assert [message["payload"] for message in committed] == ["m2"]


def test_e60_a_store_repeated_after_a_crash_delivers_each_payload_once(daemon):
    topic = Topic(daemon, "stored")
    begun = ask(daemon.address, "POST", TX, LONG, JSON_HEADERS).json()
    stored = {"producer": "p", "sequenceIds": [0, 1], "messages": ["m0", "m1"]}
    for _ in range(2):
        assert topic.ask("POST", "/store", stored | {"transactionWritePointer": begun["writePointer"]}).status == 200
        die(daemon)
    for _ in range(2):
        published = {"producer": "p", "sequenceIds": [2], "messages": []}
        answer = topic.ask("POST", "/publish", published | {"transactionWritePointer": begun["writePointer"]})
        assert answer.status == 200, answer
        die(daemon)
    assert ask(daemon.address, "POST", f"{TX}/{begun['id']}/commit", b"", JSON_HEADERS).status == 200
    assert topic.read() == ["m0", "m1"]


def test_e51_a_batch_larger_than_a_cell_is_whole_and_a_message_larger_than_one_is_refused(daemon):
    topic = Topic(daemon, "large")
    messages = [f"{number}" + "x" * 100_000 for number in range(6)]
    assert topic.ask("POST", "/publish", {"messages": messages, "atomic": True}).status == 200
    assert topic.ask("POST", "/publish", {"messages": ["x" * MAX_CELL_BYTES]}).code == "message_too_large"
    die(daemon)
    assert topic.read() == messages


# --- gateways and owners that fail ---------------------------------------------------------------


async def tell(instance: Instance, method: str, path: str, value: Any = None) -> Answer | None:
    """Return the answer; None if there is none within 30 s."""
    body = b"" if value is None else json.dumps(value).encode()
    with trio.move_on_after(30), suppress(ConnectionLost, NotConnected):
        async with await Talk.to(instance.address) as talk:
            return await talk.ask(method, topic_path("t", path), body, JSON_HEADERS)
    return None


async def until_answered(instance: Instance, method: str, path: str, value: Any = None) -> Answer:
    """Repeat the request until the answer is 200."""
    with trio.fail_after(PATIENCE_S):
        while True:
            answer = await tell(instance, method, path, value)
            if answer is not None and answer.status == 200:
                return answer
            assert answer is None or answer.status == 503, answer
            await trio.sleep(0.1)


async def test_rows_9_and_26_copies_share_one_outcome_and_nothing_is_accepted_unchecked(hbase, tmp_path):
    request = {"producer": "p", "sequenceIds": [0], "messages": ["m0"]}
    async with open_cluster(hbase, tmp_path, 1, "storage.hbase.timeout_s=12", alone=True) as cluster:
        instance, answers = cluster[0], []
        await until_answered(instance, "PUT", "?ifNotExists=true", {})

        async def send() -> None:
            answers.append(await tell(instance, "POST", "/publish", request))

        instance.thrift.stall()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            nursery.start_soon(send)
            await trio.sleep(1)
            instance.thrift.heal()
        assert sorted(answer.json()["firstId"] for answer in answers) == [answers[0].json()["firstId"]] * 2
        instance.thrift.refuse()
        await instance.kill()
        instance.thrift.heal()
        await instance.start()
        instance.thrift.refuse()
        refused = await tell(instance, "POST", "/publish", request | {"sequenceIds": [1]})
        assert refused is not None
        assert (refused.status, refused.json()["outcome"]) == (503, "not-applied")
        instance.thrift.heal()
        await until_answered(instance, "POST", "/publish", request | {"sequenceIds": [1]})
        found = await until_answered(instance, "POST", "/poll", {})
        assert len(found.json()) == 2


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.torture)])
async def test_rows_20_and_21_and_e56_e57_a_late_put_of_a_replaced_owner_has_no_effect(hbase, tmp_path, times):
    """The owner loses ZooKeeper while its commit is in flight; the commit arrives after another has taken over."""
    async with open_cluster(hbase, tmp_path, 2, "storage.hbase.timeout_s=2") as cluster:
        await until_answered(cluster[0], "PUT", "?ifNotExists=true", {})
        for sequence in range(times):
            await _replaced(cluster, {"producer": "p", "sequenceIds": [sequence], "messages": [f"m{sequence}"]})
            for instance in cluster.instances:
                found = await until_answered(instance, "POST", "/poll", {})
                assert [each["payload"] for each in found.json()] == [f"m{number}" for number in range(sequence + 1)]


async def _replaced(cluster: Cluster, request: dict[str, Any]) -> None:
    """Make one commit, and let its put arrive after the owner was replaced."""
    owner, other = await _owner_first(cluster)
    assert owner.zookeeper is not None
    late = Once(b"checkAndPut", Fate("late request", SESSION_TIMEOUT_S + 4.0))
    owner.thrift.landed = trio.Event()
    owner.thrift.choose = late
    answer = await tell(owner, "POST", "/publish", request)
    assert late.met.is_set()
    owner.zookeeper.refuse()
    owner.thrift.choose = calm
    told = await until_answered(other, "POST", "/publish", request)
    assert answer is None or answer.status in (200, 503)
    await owner.thrift.landed.wait()
    again = await until_answered(other, "POST", "/publish", request)
    assert again.json()["duplicate"]
    assert again.json()["firstId"] == told.json()["firstId"]
    owner.zookeeper.heal()


async def _owner_first(cluster: Cluster) -> tuple[Instance, Instance]:
    """Return the owner and the other instance, once both agree on the owner."""
    with trio.fail_after(PATIENCE_S):
        while True:
            answers = [await until_answered(each, "POST", "/poll", {}) for each in cluster.instances]
            named = [answer.headers.get("plainsong-owner") for answer in answers]
            owner, other = (cluster[0], cluster[1]) if named[0] is None else (cluster[1], cluster[0])
            if {*named} == {None, "{}:{}".format(*owner.address)}:
                return owner, other
