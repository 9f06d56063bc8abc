"""Cached answers to equal requests are always equal to fresh ones, and bounded in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from broker_in_process import TOPICS, in_process
from hypothesis import given
from hypothesis import strategies as st
from started_polls import AVRO_TYPE, FRAMES, JSON_TYPE, NAME, POINTERS, answered, asked, same, started

from broker.api.messages.kept_answers import (
    MAX_ANSWER_BYTES,
    MAX_BYTES,
    REQUEST_BYTES,
    KeptAnswer,
    KeptAnswers,
    question_of,
)
from broker.api.messages.poll import Polling
from broker.http.messages import Request
from broker.metrics import Rates
from plainsong.protocol.errors import InvalidName, MalformedBody
from plainsong.protocol.ids import FIRST_BOUND, after
from plainsong.protocol.records import SetAside
from plainsong.protocol.topic.asks import Look, Span


@pytest.fixture
def made(monkeypatch):
    """A list that grows with each rendered answer, but not with a cached one."""
    topics = []
    make = Polling._asked

    def counted(self, request):
        topics.append(request.name)
        return make(self, request)

    monkeypatch.setattr(Polling, "_asked", counted)
    return topics


def kept(daemon, make, made):
    """Return the answer, given without a task, and check that it came from the cache."""
    before = len(made)
    answer = started(daemon, make)
    assert len(made) == before
    return answer


def anew(daemon, make, made):
    """Return the answer, given without a task, and check that it was rendered; None if it needs a task."""
    before = len(made)
    answer = started(daemon, make)
    assert len(made) == before + 1
    return answer


def keep(daemon, make):
    """Ask until the answer is cached."""
    for _ in range(2):
        assert started(daemon, make) is not None


async def begin(daemon):
    return (await daemon.call("POST", "/v1/transactions", json={})).json()


async def test_an_answer_is_kept_from_the_second_request_on_and_counts_like_any(made):
    async with in_process() as daemon:
        await daemon.create()
        _, last = await daemon.publish("a", "b", "c")
        budget = daemon.service.directory.cache(NAME).budget
        for times in range(5):
            before = budget.hits
            get = anew if times < 2 else kept
            assert b'"b"' in get(daemon, asked(limit=2), made)[3]
            assert budget.hits == before + 1
        assert kept(daemon, asked(limit=2), made) == await answered(daemon, asked(limit=2))
        keep(daemon, asked())
        named = JSON_TYPE | {"plainsong-reader": "one"}
        assert kept(daemon, asked(named), made) is not None
        (reader,) = (await daemon.call("GET", f"{TOPICS}/t/lag")).json()["readers"]
        assert (reader["name"], reader["position"]) == ("one", last)
        with pytest.raises(InvalidName, match="reader"):
            started(daemon, asked(JSON_TYPE | {"plainsong-reader": "n o"}))


@pytest.mark.parametrize(
    ("other", "more"),
    [
        (AVRO_TYPE, {"limit": 2}),
        (JSON_TYPE | FRAMES, {"limit": 2}),
        (JSON_TYPE, {"limit": 1}),
        (JSON_TYPE, {"limit": 2, "topic": "u"}),
        (JSON_TYPE, {"limit": 2, "query": "payload=base64"}),
        (JSON_TYPE, {"limit": 2, "isolation": "committed"}),
    ],
)
async def test_a_reader_with_another_request_gets_another_answer(made, other, more):
    async with in_process() as daemon:
        for topic in ("t", "u"):
            await daemon.create(topic)
            await daemon.publish(f"a in {topic}", "b", topic=topic)
        keep(daemon, asked(limit=2))
        found = anew(daemon, asked(other, **more), made)
        assert found == await answered(daemon, asked(other, **more))


async def test_kept_answers_count_as_delivered_each_time(made, monkeypatch):
    delivered = []
    monkeypatch.setattr(Rates, "delivered", lambda self, name, count, now_s: delivered.append((name, count)))
    async with in_process() as daemon:
        await daemon.create()
        await daemon.publish("a", "b")
        keep(daemon, asked())
        assert kept(daemon, asked(), made) is not None
        assert delivered == [(NAME, 2)] * 3


async def test_topics_of_one_name_in_two_namespaces_have_answers_of_their_own(made):
    async with in_process() as daemon:
        for namespace in ("ns", "other"):
            await daemon.call("PUT", f"/v1/namespaces/{namespace}/topics/t")
            await daemon.call("POST", f"/v1/namespaces/{namespace}/topics/t/publish", json={"messages": [namespace]})

        def there():
            request = asked()()
            request.path = {"namespace": "other", "topic": "t"}
            return request

        keep(daemon, asked())
        assert b'"other"' in anew(daemon, there, made)[3]


async def test_a_body_that_is_valid_in_one_encoding_is_refused_in_another(made):
    async with in_process() as daemon:
        await daemon.create()
        await daemon.publish("a")

        def empty(headers):
            return lambda: Request({"namespace": "ns", "topic": "t"}, "", headers, b"{}")

        keep(daemon, empty(JSON_TYPE))
        with pytest.raises(MalformedBody):
            started(daemon, empty(AVRO_TYPE))


async def test_a_page_ended_by_a_limit_stays_and_one_to_the_end_is_rebuilt_after_a_publish(made):
    async with in_process() as daemon:
        await daemon.create()
        _, last = await daemon.publish("a", "b")
        cut, whole = asked(limit=1), asked()
        ended = asked(end_before=bytes.fromhex(last))
        empty = asked(start_from=bytes.fromhex(last), inclusive=False)
        for each in (cut, whole, empty, ended):
            keep(daemon, each)
        await daemon.publish("c")
        assert kept(daemon, ended, made) == await answered(daemon, ended)
        assert kept(daemon, cut, made) == await answered(daemon, cut)
        assert b'"c"' in anew(daemon, whole, made)[3]
        assert b'"c"' in anew(daemon, empty, made)[3]
        assert b'"c"' in kept(daemon, empty, made)[3]


async def test_a_poll_that_waits_uses_a_kept_answer_unless_that_is_empty(made):
    async with in_process() as daemon:
        await daemon.create()
        _, last = await daemon.publish("a")
        last = bytes.fromhex(last)
        keep(daemon, asked(wait_ms=50))
        assert b'"a"' in kept(daemon, asked(wait_ms=50), made)[3]
        keep(daemon, asked(start_from=last, inclusive=False))
        for _ in range(3):
            assert started(daemon, asked(start_from=last, inclusive=False, wait_ms=50)) is None


async def test_undecided_and_rolled_back_messages_end_what_was_kept(made):
    async with in_process() as daemon:
        await daemon.create()
        await daemon.publish("a")
        committed, everything = asked(isolation="committed"), asked()
        keep(daemon, committed)
        begun = await begin(daemon)
        under = {"transactionWritePointer": begun["writePointer"], "messages": ["b"]}
        await daemon.call("POST", f"{TOPICS}/t/publish", json=under)
        for _ in range(3):
            assert ("Plainsong-End", "held") in started(daemon, committed)[2]
        keep(daemon, everything)
        await daemon.call("POST", f"/v1/transactions/{begun['id']}/abort")
        await answered(daemon, committed)  # runs after the step that rolls back
        found = anew(daemon, everything, made)
        assert found == await answered(daemon, everything)
        assert b'"b"' not in (await same(daemon, committed))[3]


async def test_kept_answers_contain_no_expired_messages(made):
    async with in_process() as daemon:
        await daemon.create(ttl=10)
        await daemon.publish("a")
        daemon.clock.ms += 5_000
        await daemon.publish("b")
        for limit in (1, None):
            keep(daemon, asked(limit=limit))
        daemon.clock.ms += 6_000
        await answered(daemon, asked())  # runs after the step that makes it durable
        for limit in (1, None):
            assert b'"a"' not in anew(daemon, asked(limit=limit), made)[3]
            keep(daemon, asked(limit=limit))
            assert kept(daemon, asked(limit=limit), made) == await answered(daemon, asked(limit=limit))
        # An expired message stays expired, even if the TTL is increased.
        await daemon.call("PUT", f"{TOPICS}/t/properties", json={"ttl": 1000})
        for limit in (1, None):
            assert started(daemon, asked(limit=limit)) == await answered(daemon, asked(limit=limit))


async def test_kept_answers_contain_no_messages_with_their_own_time_to_live(made):
    async with in_process() as daemon:
        await daemon.create()
        await daemon.publish("a", ttlSeconds=5)
        await daemon.publish("b")
        for _ in range(3):
            assert b'"a"' in anew(daemon, asked(), made)[3]
        daemon.clock.ms += 6_000
        assert b'"a"' not in (await answered(daemon, asked()))[3]
        assert b'"a"' not in started(daemon, asked())[3]


async def test_a_page_that_ended_before_such_a_message_is_reported_as_last_once_that_has_expired(made):
    async with in_process() as daemon:
        await daemon.create()
        await daemon.publish(*["a"] * 300)  # fills a chunk of the scan cache
        await daemon.publish("b", ttlSeconds=5)
        for _ in range(3):
            assert ("Plainsong-End", "more") in anew(daemon, asked(limit=300), made)[2]
        daemon.clock.ms += 6_000
        expected = await answered(daemon, asked(limit=300))
        assert ("Plainsong-End", "end") in expected[2]
        assert started(daemon, asked(limit=300)) in (None, expected)


async def test_after_a_rollback_of_unknown_outcome_no_kept_answer_is_sent(made):
    async with in_process() as daemon:
        await daemon.create()
        begun = await begin(daemon)
        under = {"transactionWritePointer": begun["writePointer"], "messages": ["a"]}
        await daemon.call("POST", f"{TOPICS}/t/publish", json=under)
        pointers = asked(JSON_TYPE | POINTERS)
        keep(daemon, pointers)
        daemon.store.fail_next("write", applied=True)
        under = {"transactionWritePointer": begun["writePointer"]}
        await daemon.call("POST", f"{TOPICS}/t/rollback", json=under, status=503)
        expected = await answered(daemon, pointers)
        assert started(daemon, pointers) in (None, expected)


async def test_kept_answers_of_a_topic_end_with_it(made):
    async with in_process() as daemon:
        await daemon.create()
        await daemon.publish("a")
        keep(daemon, asked())
        await daemon.call("DELETE", f"{TOPICS}/t")
        assert started(daemon, asked()) is None
        await daemon.create()
        await daemon.publish("b")
        assert b'"a"' not in anew(daemon, asked(), made)[3]
        assert b'"a"' not in (await same(daemon, asked()))[3]


async def test_a_page_that_skips_rows_set_aside_reports_them_from_then_on(made, tmp_path):
    async with in_process(storage__data_dir=tmp_path) as daemon:
        await daemon.create()
        for payload in ("a", "b", "c"):
            await daemon.publish(payload)
        ids = [each["id"] for each in await daemon.poll()]
        for limit in (1, 2, 1000):
            keep(daemon, asked(limit=limit))
        await daemon.call("POST", f"{TOPICS}/t/set-aside", json={"from": ids[1], "to": ids[1]})
        for limit in (2, 1000):
            assert ("Plainsong-Set-Aside", "1") in (await answered(daemon, asked(limit=limit)))[2]
        for limit in (1, 2, 1000):
            for _ in range(4):
                assert started(daemon, asked(limit=limit)) in (None, await answered(daemon, asked(limit=limit)))


async def test_a_reader_never_gets_a_kept_page_larger_than_its_quota(made):
    async with in_process() as daemon:
        await daemon.create()
        await daemon.publish(*["m" * 100] * 20)

        def limited():
            request = asked()()
            request.page_bytes = 250
            return request

        keep(daemon, asked())
        small = await answered(daemon, limited)
        assert small[3].count(b"m" * 100) < 20
        assert anew(daemon, limited, made) == small
        assert kept(daemon, asked(), made)[3].count(b"m" * 100) == 20


async def test_long_requests_are_not_compared(made):
    async with in_process() as daemon:
        await daemon.create()
        await daemon.publish("a")

        def long_body():
            request = asked()()
            request.body += b" " * REQUEST_BYTES
            return request

        long_accept = asked(JSON_TYPE | {"accept": "a/b;x=" + "y" * REQUEST_BYTES})
        long_type = asked({"content-type": "application/json;x=" + "y" * REQUEST_BYTES})
        for long in (long_body, long_accept, long_type):
            for _ in range(3):
                assert anew(daemon, long, made) is not None


async def test_compressing_an_answer_for_one_reader_does_not_change_it_for_the_next(made):
    async with in_process(listener="hot") as daemon:
        await daemon.create()
        await daemon.publish(*["m" * 100] * 20)
        found = []
        for encoding in ("identity", "gzip", "gzip", "identity", "gzip"):
            answer = await daemon.http.post(f"{TOPICS}/t/poll", json={}, headers={"accept-encoding": encoding})
            assert answer.headers.get("content-encoding", "identity") == encoding
            assert answer.headers["vary"].lower() == "accept-encoding"
            found.append(answer.json())
        assert found == found[:1] * 5
        assert len(made) < 5


SPAN = Span(1, b"p1", after(b"a" * 20), after(b"m" * 20), now_ms=9, oldest_ms=0, watermark=None)
STRETCH = SetAside(b"c" * 10, b"d" * 10, 1)


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize(
    ("span", "revision", "is_right"),
    [
        (SPAN, 7, "always"),
        (replace(SPAN, now_ms=100), 7, "always"),
        (replace(SPAN, until=after(b"n" * 20)), 7, "of a page that a limit ended"),
        (SPAN, 8, "never"),
        (replace(SPAN, prefix=b"p2"), 7, "never"),
        (replace(SPAN, until=after(b"l" * 20)), 7, "never"),
        (replace(SPAN, since=after(b"b" * 20)), 7, "never"),
        (replace(SPAN, set_aside=(STRETCH,)), 7, "never"),
    ],
)
def test_an_answer_is_valid_for_the_same_messages_only(span, revision, is_right, is_cut):
    first = after(b"a" * 20)[:20]
    kept = KeptAnswer(NAME, Look(FIRST_BOUND), SPAN, 7, first, is_cut, b"", "a/b", (), 1, first)
    assert kept.answers(span, revision) == (is_right == "always" or (is_cut and is_right.startswith("of")))


def test_kept_answers_stay_within_their_bound_and_the_oldest_are_evicted_first():
    answers, span = KeptAnswers(), Span(1, b"p", FIRST_BOUND, FIRST_BOUND, 0, 0, None)
    questions = [question_of(asked(limit=1 + number)(), 1 << 20) for number in range(200)]

    def answer(size):
        return KeptAnswer(NAME, Look(FIRST_BOUND), span, 1, None, False, b"x" * size, "a/b", (), 0, None)

    for question in questions:
        answers.keep(question, answer(20_000))
        assert answers.bytes <= MAX_BYTES
    assert MAX_BYTES // 25_000 < len(answers) < MAX_BYTES // 20_000
    assert answers.find(questions[0]) is None
    assert answers.find(questions[-1]) is not None
    before = answers.bytes
    answers.keep(questions[-1], answer(10_000))
    assert answers.bytes == before - 10_000, "it replaces the previous one"
    count = len(answers)
    answers.keep(questions[0], answer(MAX_ANSWER_BYTES + 1))
    assert len(answers) == count, "one that is too large drives no other out"
    assert not answers.is_asked_again(questions[5])
    assert answers.is_asked_again(questions[5])


#: Events in a topic's life; after each one, two or three polls are repeated.
ACTIONS = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 3)),
    st.tuples(st.just("publish for a while"), st.integers(1, 5)),
    st.tuples(st.just("publish under"), st.integers(0, 1)),
    st.tuples(st.just("decide"), st.integers(0, 1), st.sampled_from(["commit", "abort"])),
    st.tuples(st.just("later"), st.sampled_from([1, 900, 4_000])),
    st.tuples(st.just("live"), st.sampled_from([3, 5, 1000])),
    st.tuples(st.just("again")),
    st.tuples(st.just("cold")),
)
QUESTIONS = st.lists(
    st.tuples(
        st.sampled_from([JSON_TYPE, AVRO_TYPE, JSON_TYPE | FRAMES, JSON_TYPE | POINTERS]),
        st.fixed_dictionaries(
            {
                "limit": st.sampled_from([None, 1, 2, 5]),
                "isolation": st.sampled_from([None, "committed"]),
                "start_from": st.sampled_from([None, FIRST_BOUND, "first"]),
                "wait_ms": st.sampled_from([None, 1]),
            }
        ),
    ),
    min_size=2,
    max_size=3,
)


@given(QUESTIONS, st.lists(ACTIONS, max_size=30))
def test_repeated_polls_return_the_current_messages_whatever_happens_to_the_topic(questions, actions):
    async def run():
        async with in_process() as daemon:
            await daemon.create(ttl=5)
            first, _ = await daemon.publish("m0")
            first, begun, number = bytes.fromhex(first), {}, 0

            async def act(action, given):
                nonlocal number
                number += 1
                if action == "publish":
                    await daemon.publish(*[f"m{number}"] * given[0])
                elif action == "publish for a while":
                    await daemon.publish(f"w{number}", ttlSeconds=given[0])
                elif action == "publish under":
                    at = given[0]
                    if at not in begun:
                        begun[at] = await begin(daemon)
                    under = {"transactionWritePointer": begun[at]["writePointer"], "messages": [f"t{number}"]}
                    await daemon.call("POST", f"{TOPICS}/t/publish", json=under)
                elif action == "decide":
                    at, how = given
                    if at in begun:
                        transaction = begun.pop(at)["id"]
                        for verb in ("prepare", "commit") if how == "commit" else ("abort",):
                            await daemon.call("POST", f"/v1/transactions/{transaction}/{verb}")
                elif action == "later":
                    daemon.clock.ms += given[0]
                elif action == "live":
                    await daemon.call("PUT", f"{TOPICS}/t/properties", json={"ttl": given[0]})
                elif action == "again":
                    await daemon.call("DELETE", f"{TOPICS}/t")
                    await daemon.create(ttl=5)
                    begun.clear()  # these transactions cannot write to the recreated topic
                else:
                    daemon.service.directory.cache(NAME).start_over()

            for action, *given in actions:
                await act(action, given)
                for headers, wanted in questions:
                    wanted = wanted | {"start_from": first if wanted["start_from"] == "first" else wanted["start_from"]}
                    make = asked(headers, **wanted)
                    for _ in range(3):
                        found = started(daemon, make)
                        if found is not None:
                            assert found == await answered(daemon, make)

    trio.run(run)
