"""Polls with isolation=committed: results, waits and wake-ups."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
import trio
from broker_in_process import START_MS, TOPICS, in_process
from started_polls import subject_of_polls

from actors.pointers import PointerIndex
from plainsong.protocol.errors import TransactionsUnavailable
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.asks import Look
from tests.patience import PATIENCE_S

TX = "/v1/transactions"
PATH = f"{TOPICS}/t/poll"
every_listener = pytest.mark.parametrize("listener", [None, "hot", "application"])


async def begin(daemon, **body):
    return (await daemon.call("POST", TX, json=body)).json()


async def under(daemon, transaction, *payloads, verb="publish", topic="t"):
    body = {"transactionWritePointer": transaction["writePointer"], "messages": list(payloads)}
    answer = await daemon.call("POST", f"{TOPICS}/{topic}/{verb}", json=body)
    return answer.json() if answer.content else None


async def decide(daemon, transaction, verb):
    await daemon.call("POST", f"{TX}/{transaction['id']}/{verb}")


class Waiting:
    """A waiting committed poll, and its answer."""

    def __init__(self, daemon, path, body):
        self._daemon, self._path, self._body = daemon, path, body
        self._done = trio.Event()

    async def run(self):
        self.answer = await self._daemon.http.post(self._path, json=self._body, timeout=PATIENCE_S)
        self._done.set()

    async def messages(self):
        with trio.fail_after(PATIENCE_S):
            await self._done.wait()
        assert self.answer.status_code == 200, self.answer.text
        return [message["payload"] for message in self.answer.json()]


@asynccontextmanager
async def held(daemon, count=1, **body):
    """Run committed polls that stay blocked while the ``with`` block runs."""
    body = {"isolation": "committed", "waitMs": 60_000, **body}
    async with trio.open_nursery() as nursery:
        polls = [Waiting(daemon, PATH, body) for _ in range(count)]
        for poll in polls:
            nursery.start_soon(poll.run)
        with trio.fail_after(PATIENCE_S):
            while daemon.service.pointers.waiters < count:
                await trio.lowlevel.checkpoint()
        yield polls[0] if count == 1 else polls


@every_listener
async def test_a_commit_releases_a_held_poll(listener):
    async with in_process(listener=listener) as daemon:
        await daemon.create()
        begun = await begin(daemon)
        await under(daemon, begun, "decided")
        async with held(daemon) as poll:
            await daemon.publish("behind")
            await decide(daemon, begun, "commit")
            assert await poll.messages() == ["decided", "behind"]
            assert poll.answer.headers["plainsong-end"] == "end"


@pytest.mark.parametrize("verb", ["abort", "invalidate"])
async def test_an_abort_and_an_invalidation_release_a_held_poll_to_the_messages_after_it(daemon, verb):
    await daemon.create()
    begun = await begin(daemon)
    await under(daemon, begun, "gone")
    await daemon.publish("behind")
    async with held(daemon) as poll:
        await decide(daemon, begun, verb)
        assert await poll.messages() == ["behind"]


async def test_a_timeout_releases_a_held_poll(autojump_clock, daemon):
    await daemon.create()
    begun = await begin(daemon, timeoutSeconds=5)
    await under(daemon, begun, "gone")
    await daemon.publish("behind")
    began_s = trio.current_time()
    poll = Waiting(daemon, PATH, {"isolation": "committed", "waitMs": 60_000})
    await poll.run()
    assert await poll.messages() == ["behind"]
    assert trio.current_time() - began_s == pytest.approx(5, abs=0.1)


async def test_a_rollback_by_the_client_releases_a_held_poll(daemon):
    await daemon.create()
    begun = await begin(daemon)
    response = await under(daemon, begun, "gone")
    await daemon.publish("behind")
    async with held(daemon) as poll:
        await daemon.call("POST", f"{TOPICS}/t/rollback", json=response)
        assert await poll.messages() == ["behind"]
    other = await begin(daemon)
    await under(daemon, other, "gone too")
    async with held(daemon, startFrom=poll.answer.headers["plainsong-last-id"], inclusive=False) as poll:
        await daemon.call("POST", f"{TOPICS}/t/rollback", json={"transactionWritePointer": other["id"]})
        await daemon.publish("more")
        assert await poll.messages() == ["more"]


async def test_a_poll_released_by_one_transaction_may_be_held_by_the_next(daemon):
    await daemon.create()
    first, second = await begin(daemon), await begin(daemon)
    await under(daemon, first, "one")
    await under(daemon, second, "two")
    async with held(daemon) as poll:
        await decide(daemon, second, "commit")
        await decide(daemon, first, "abort")
        assert await poll.messages() == ["two"]


async def test_a_commit_releases_every_poll_that_waits_for_it(daemon):
    await daemon.create()
    begun = await begin(daemon)
    await under(daemon, begun, "decided")
    async with held(daemon, count=20) as polls:
        await decide(daemon, begun, "commit")
        for poll in polls:
            assert await poll.messages() == ["decided"]
    assert daemon.service.pointers.waiters == 0


async def test_a_poll_at_the_end_of_the_topic_gets_messages_published_and_then_committed(daemon):
    await daemon.create()
    poll = Waiting(daemon, PATH, {"isolation": "committed", "waitMs": 60_000})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll.run)
        begun = await begin(daemon)
        await under(daemon, begun, "stored", verb="store")
        await under(daemon, begun)
        while not daemon.service.pointers.waiters:
            await trio.lowlevel.checkpoint()
        await decide(daemon, begun, "commit")
        assert await poll.messages() == ["stored"]


async def test_messages_before_the_undecided_one_are_delivered_without_waiting(daemon):
    await daemon.create()
    await daemon.publish("before")
    daemon.clock.ms += 3
    begun = await begin(daemon)
    await under(daemon, begun, "open", "open")
    answer = await daemon.call("POST", PATH, json={"isolation": "committed", "waitMs": 60_000})
    assert [message["payload"] for message in answer.json()] == ["before"]
    said = {name: value for name, value in answer.headers.items() if name.startswith("plainsong-")}
    resume = said.pop("plainsong-last-id")
    assert said == {
        "plainsong-end": "held",
        "plainsong-held-by": str(begun["id"]),
        "plainsong-held-since": str(START_MS + 3),
        "plainsong-hidden-messages": "2",
    }
    await decide(daemon, begun, "commit")
    rest = await daemon.poll(isolation="committed", startFrom=resume, inclusive=False)
    assert [message["payload"] for message in rest] == ["open", "open"]


async def test_a_held_poll_is_answered_at_its_deadline_and_names_what_holds_it(autojump_clock, daemon):
    await daemon.create()
    begun = await begin(daemon)
    await under(daemon, begun, "open")
    began_s = trio.current_time()
    answer = await daemon.call("POST", PATH, json={"isolation": "committed", "waitMs": 3_000}, timeout=PATIENCE_S)
    assert trio.current_time() - began_s == pytest.approx(3, abs=0.1)
    assert answer.json() == []
    assert answer.headers["plainsong-held-by"] == str(begun["id"])


async def test_without_a_wait_a_held_poll_is_answered_at_once(daemon):
    await daemon.create()
    await under(daemon, await begin(daemon), "open")
    assert await daemon.poll(isolation="committed") == []


async def test_a_pointer_unknown_to_the_service_holds_until_the_read_pointer_has_passed_it(autojump_clock, daemon):
    environment = daemon.service.directory.environment
    environment.limits = replace(environment.limits, issues_pointers=False)  # as in earlier versions
    await daemon.create()
    foreign = {"writePointer": START_MS * 1_000_000 + 500}
    await under(daemon, foreign, "foreign")
    async with held(daemon) as poll:
        daemon.clock.ms += 1
        await decide(daemon, await begin(daemon), "commit")
        assert await poll.messages() == ["foreign"]


async def test_a_stopping_daemon_answers_its_held_polls(daemon):
    await daemon.create()
    begun = await begin(daemon)
    await under(daemon, begun, "open")
    async with held(daemon) as poll:
        daemon.service.stop()
        assert await poll.messages() == []
        assert poll.answer.headers["plainsong-end"] == "held"


async def test_a_held_poll_of_a_deleted_topic_ends_with_not_found(autojump_clock, daemon):
    await daemon.create()
    await under(daemon, await begin(daemon), "open")
    async with held(daemon, waitMs=2_000) as poll:
        await daemon.call("DELETE", f"{TOPICS}/t")
    assert poll.answer.status_code == 404


async def test_a_client_that_leaves_ends_its_wait(daemon):
    await daemon.create()
    await under(daemon, await begin(daemon), "open")
    with trio.CancelScope() as scope:
        async with held(daemon):
            scope.cancel()
    while daemon.service.pointers.waiters:
        await trio.lowlevel.checkpoint()


async def test_held_polls_are_bounded_and_counted(monkeypatch):
    monkeypatch.setattr("broker.core.PointerIndex", partial(PointerIndex, max_waiting=1))
    async with in_process() as daemon:
        await daemon.create()
        begun = await begin(daemon)
        await under(daemon, begun, "open")
        async with held(daemon) as poll:
            body = {"isolation": "committed", "waitMs": 1_000}
            await daemon.call("POST", PATH, json=body, status=503, code="overloaded")
            metrics = (await daemon.call("GET", "/metrics")).text
            for line in (
                "plainsong_held_polls 1.0",
                "plainsong_polls_held_total 2.0",
                "plainsong_transactions_open 1.0",
                "plainsong_hidden_messages 1.0",
                "plainsong_undecided_pointers 1.0",
            ):
                assert line in metrics.splitlines()
            await decide(daemon, begun, "commit")
            assert await poll.messages() == ["open"]
        metrics = (await daemon.call("GET", "/metrics")).text
        assert 'plainsong_transactions_decided_total{state="committed"} 1.0' in metrics
        assert "plainsong_hidden_messages 0.0" in metrics.splitlines()


@every_listener
@pytest.mark.parametrize("kind", ["avro/binary", "avro/binary; version=2", "application/json"])
async def test_the_isolation_may_be_in_the_query_whatever_the_encoding(listener, kind):
    async with in_process(listener=listener) as daemon:
        await daemon.create()
        await daemon.publish("before")
        await under(daemon, await begin(daemon), "open")
        everything = {"application/json": b"{}", "avro/binary": bytes.fromhex("04010202")}.get(kind)
        content = everything or bytes.fromhex("04010202") + bytes.fromhex("00000000")
        headers = {"Content-Type": kind}
        answer = await daemon.call("POST", PATH + "?isolation=committed", content=content, headers=headers)
        assert answer.headers["plainsong-end"] == "held"
        assert b"before" in answer.content
        assert b"open" not in answer.content


async def test_a_committed_poll_follows_every_message_once_and_in_order(daemon):
    """Three transactions, with plain messages in between, end in a different order than they began."""
    await daemon.create()
    seen, last = [], None
    ends = iter(["commit", "abort", "commit"])
    open_ones = []
    for number in range(3):
        begun = await begin(daemon)
        await under(daemon, begun, f"tx{number}")
        await daemon.publish(f"plain{number}")
        open_ones.append(begun)
    for begun in (open_ones[2], open_ones[0], open_ones[1]):
        await decide(daemon, begun, next(ends))
        while True:
            body = {"isolation": "committed", "limit": 1, "startFrom": last, "inclusive": False}
            answer = await daemon.call("POST", PATH, json={name: v for name, v in body.items() if v is not None})
            last = answer.headers.get("plainsong-last-id", last)
            if not answer.json():
                break
            seen.append(answer.json()[0]["payload"])
    assert seen == ["plain0", "tx1", "plain1", "tx2", "plain2"]


def looks_in_a_task(daemon, monkeypatch):
    """Keep the topic's actor busy, so that every look at it waits in its mailbox."""
    monkeypatch.setattr(daemon.service.directory, "look_now", lambda *_: None)


@pytest.mark.parametrize("in_a_task", [False, True])
@pytest.mark.parametrize("wait_ms", [0, 5_000])
async def test_a_transaction_that_grows_and_commits_during_a_poll_is_shown_whole_or_not_at_all(
    daemon, monkeypatch, wait_ms, in_a_task
):
    await daemon.create()
    begun = await begin(daemon)
    await under(daemon, begun, "first")
    pages = subject_of_polls(daemon).pages
    read = pages.read
    met = []

    async def commit_and_read(name, span, **bounds):
        if not met:
            met.append(span)
            await under(daemon, begun, "second")
            await decide(daemon, begun, "commit")
        return await read(name, span, **bounds)

    monkeypatch.setattr(pages, "read", commit_and_read)
    monkeypatch.setattr(pages, "read_now", lambda *_, **__: None)
    if in_a_task:
        looks_in_a_task(daemon, monkeypatch)
    body = {"isolation": "committed"} | ({"waitMs": wait_ms} if wait_ms else {})
    answer = await daemon.http.post(PATH, json=body)
    assert met
    assert [message["payload"] for message in answer.json()] == (["first", "second"] if wait_ms else [])


async def test_a_transaction_that_commits_between_the_query_and_the_view_is_shown_in_full(daemon, monkeypatch):
    await daemon.create()
    begun = await begin(daemon)
    await under(daemon, begun, "first")
    ask = daemon.service.directory.ask
    met = []

    async def ask_and_commit(name, question):
        answer = await ask(name, question)
        if isinstance(question, Look) and question.undecided and not met:
            met.append(answer.undecided)
            await under(daemon, begun, "second")
            await decide(daemon, begun, "commit")
        return answer

    monkeypatch.setattr(daemon.service.directory, "ask", ask_and_commit)
    looks_in_a_task(daemon, monkeypatch)
    answer = await daemon.http.post(PATH, json={"isolation": "committed"})
    assert met == [{begun["id"]}]
    assert [message["payload"] for message in answer.json()] == ["first", "second"]


@pytest.mark.parametrize("in_a_task", [False, True])
async def test_a_poll_that_meets_an_open_transaction_queries_its_topic_once(daemon, monkeypatch, in_a_task):
    await daemon.create()
    await daemon.publish("before")
    for _ in range(3):
        await under(daemon, await begin(daemon), "undecided")
    directory, looks = daemon.service.directory, []
    ask, look_now = directory.ask, directory.look_now

    async def counted_ask(name, question):
        looks.append(question)
        return await ask(name, question)

    def counted_look(name, question):
        looks.append(question)
        return look_now(name, question)

    monkeypatch.setattr(directory, "ask", counted_ask)
    monkeypatch.setattr(directory, "look_now", counted_look)
    if in_a_task:
        looks_in_a_task(daemon, monkeypatch)
    answer = await daemon.http.post(PATH, json={"isolation": "committed"})
    assert [message["payload"] for message in answer.json()] == ["before"]
    assert answer.headers["plainsong-hidden-messages"] == "3"
    assert len(looks) == 1


# --- while the transaction service is unavailable -----------------------------------------------------------


REFUSED = {"status": 503, "code": "transactions_unavailable"}


def take_away(daemon, monkeypatch):
    """Make the service unavailable to every reader."""

    async def fresh():
        raise TransactionsUnavailable("it is unavailable")

    def view():
        raise TransactionsUnavailable("it is unavailable")

    monkeypatch.setattr(daemon.service.authority.transactions, "fresh", fresh)
    monkeypatch.setattr(daemon.service.authority.transactions, "view", view)
    monkeypatch.setattr(daemon.service.authority.transactions, "view_now", lambda: None)


async def test_a_topic_with_nothing_undecided_is_read_without_the_service(daemon, monkeypatch):
    await daemon.create()
    await daemon.publish("plain")
    for payload, verb in (("committed", "commit"), ("rolled back", "abort")):
        begun = await begin(daemon)
        await under(daemon, begun, payload)
        await under(daemon, begun, payload + " and stored", verb="store")
        await under(daemon, begun)
        await decide(daemon, begun, verb)
    await daemon.publish("behind")
    seen = await daemon.poll(isolation="committed")
    take_away(daemon, monkeypatch)
    assert await daemon.poll(isolation="committed") == seen
    assert [each["payload"] for each in seen] == ["plain", "committed", "committed and stored", "behind"]
    many = {"topics": {"t": {}}, "isolation": "committed"}
    assert (await daemon.call("POST", "/v1/namespaces/ns/poll", json=many)).json()["topics"]["t"]["messages"] == seen
    measured = (await daemon.call("POST", f"{TOPICS}/t/offsets", json={"isolation": "committed"})).json()
    assert measured["count"] == 4


async def test_without_the_service_reading_stops_at_the_first_undecided_message(daemon, monkeypatch):
    await daemon.create()
    await daemon.create("other")
    await daemon.publish("plain")
    await daemon.publish("plain", topic="other")
    begun = await begin(daemon)
    await under(daemon, begun, "undecided")
    await daemon.publish("behind")
    take_away(daemon, monkeypatch)
    answer = await daemon.call("POST", PATH, json={"isolation": "committed"})
    assert [each["payload"] for each in answer.json()] == ["plain"]
    assert answer.headers["plainsong-end"] == "more"
    assert "plainsong-held-by" not in answer.headers
    last = {"startFrom": answer.headers["plainsong-last-id"], "inclusive": False}
    await daemon.call("POST", PATH, json={"isolation": "committed", **last}, **REFUSED)
    await daemon.call("POST", PATH, json={"isolation": "committed", "waitMs": 60_000, **last}, **REFUSED)
    start = last["startFrom"][:-1] + "1"
    await daemon.call("POST", f"{TOPICS}/t/offsets", json={"isolation": "committed", "start": start}, **REFUSED)
    many = {"topics": {"t": last, "other": {}}, "isolation": "committed"}
    found = (await daemon.call("POST", "/v1/namespaces/ns/poll", json=many)).json()["topics"]
    assert found["t"]["error"]["code"] == "transactions_unavailable"
    assert [each["payload"] for each in found["other"]["messages"]] == ["plain"]


async def test_a_committed_poll_that_waits_without_the_service_gets_new_messages(daemon, monkeypatch):
    await daemon.create()
    take_away(daemon, monkeypatch)
    poll = Waiting(daemon, PATH, {"isolation": "committed", "waitMs": 60_000})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll.run)
        core = None
        while core is None or not len(core.parking):
            await trio.lowlevel.checkpoint()
            core = daemon.service.directory.entry(TopicName("ns", "t")).actor.core
        await daemon.publish("plain")
        assert await poll.messages() == ["plain"]


async def test_a_daemon_that_has_no_service_refuses_every_committed_poll():
    async with in_process(transactions__service="off") as daemon:
        await daemon.create()
        await daemon.publish("plain")
        await daemon.call("POST", PATH, json={"isolation": "committed"}, **REFUSED)
