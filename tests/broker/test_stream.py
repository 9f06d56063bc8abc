"""A stream gives the same verdicts as publish, answers in order, and ends with a reason."""

from __future__ import annotations

import msgpack
import pytest
from broker_in_process import TOPICS, in_process
from stream_talk import knock, open_stream, request
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, RejectConnection, RejectData, TextMessage


@pytest.fixture(params=["hot", "application"])
async def daemon(request):
    async with in_process(listener=request.param) as running:
        await running.create()
        yield running


async def test_each_request_is_answered_with_its_own_receipt_in_order(daemon):
    async with open_stream(daemon) as stream:
        await stream.send(*[request(n, b"m%d" % n) for n in range(500)])
        answers = await stream.answers(500)
    assert [answer[:2] for answer in answers] == [[n, 200] for n in range(500)]
    found = await daemon.poll()
    assert [message["payload"] for message in found] == [f"m{n}" for n in range(500)]
    assert [answer[2]["firstId"].hex() for answer in answers] == [message["id"] for message in found]
    assert {answer[2]["generation"] for answer in answers} == {1}


async def test_a_message_may_hold_one_or_many_requests_and_come_in_frames(daemon):
    async with open_stream(daemon) as stream:
        await stream.send(request(1, b"a"), request(2, b"b"))
        await stream.send(request(3, b"c"))
        whole = request(4, b"d" * 70_000)
        await stream.say(*[BytesMessage(whole[at : at + 999], message_finished=False) for at in range(0, 70_000, 999)])
        await stream.say(BytesMessage(whole[70_929:]))
        assert [answer[:2] for answer in await stream.answers(4)] == [[n, 200] for n in (1, 2, 3, 4)]
    assert [message["payload"] for message in await daemon.poll()] == ["a", "b", "c", "d" * 70_000]


async def test_a_request_of_many_messages_has_the_ids_of_its_first_and_last(daemon):
    async with open_stream(daemon) as stream:
        await stream.send(request(1, b"a", b"b", b"c"), request(2, b"d", ttlSeconds=60))
        (_, _, three), (_, status, one) = await stream.answers(2)
    found = await daemon.poll()
    assert (three["firstId"].hex(), three["lastId"].hex()) == (found[0]["id"], found[2]["id"])
    assert status == 200
    assert one == {"firstId": bytes.fromhex(found[3]["id"]), "generation": 1}


async def test_a_pointer_that_was_never_issued_is_refused_and_holds_no_reader(daemon):
    async with open_stream(daemon) as stream:
        await stream.send(request(1, b"a", transactionWritePointer=(1 << 63) - 1), request(2, b"b"))
        (_, refused, problem), (_, published, _) = await stream.answers(2)
    assert (refused, problem["code"], published) == (409, "transaction_not_in_progress", 200)
    assert [each["payload"] for each in await daemon.poll(isolation="committed")] == ["b"]


async def test_a_request_under_a_write_pointer_is_answered_with_its_publish_response(daemon):
    pointer = (await daemon.call("POST", "/v1/transactions", json={})).json()["writePointer"]
    async with open_stream(daemon) as stream:
        await stream.send(request(1, b"a"), request(2, b"b", transactionWritePointer=pointer), request(3, b"c"))
        (_, _, before), (_, status, response), (_, _, after) = await stream.answers(3)
    assert (status, response["transactionWritePointer"]) == (200, pointer)
    place = response["startTimestamp"].to_bytes(8, "big") + response["startSequenceId"].to_bytes(2, "big")
    assert before["firstId"] < place < after["firstId"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": []}, "no_messages"),
        ({"messages": [b"x"], "ttlSeconds": 0}, "invalid_parameter"),
        ({"messages": [b"x"], "generation": 7}, "generation_changed"),
        ({"messages": ["text"]}, "malformed_body"),
        ({"messages": [b"x"], "ttl": 1}, "unknown_field"),
        ({}, "no_messages"),
    ],
)
async def test_a_refused_request_has_its_problem_and_its_neighbours_are_stored(daemon, fields, code):
    async with open_stream(daemon) as stream:
        bad = request(2)[:2] + msgpack.packb(fields)
        await stream.send(request(1, b"a"), bad, request(3, b"b"))
        first, refused, last = await stream.answers(3)
    assert [first[:2], last[:2]] == [[1, 200], [3, 200]]
    number, status, problem = refused
    assert (number, problem["code"], problem["status"], problem["outcome"]) == (2, code, status, "not-applied")
    assert [message["payload"] for message in await daemon.poll()] == ["a", "b"]


async def test_a_refusal_has_the_same_problem_as_that_of_a_publish(daemon):
    async with open_stream(daemon, "missing") as stream:
        await stream.send(request(1, b"a"), request(2, b"b"))
        answers = await stream.answers(2)
    plain = await daemon.call("POST", f"{TOPICS}/missing/publish", status=404, json={"messages": ["a"]})
    assert answers == [[1, 404, plain.json()], [2, 404, plain.json()]]


async def test_a_message_too_large_is_refused_alone_in_the_middle_of_a_run():
    async with in_process(listener="hot", topic__max_message_bytes=1024) as daemon:
        await daemon.create()
        async with open_stream(daemon) as stream:
            await stream.send(request(1, b"a"), request(2, b"x" * 1025), request(3, b"b"))
            answers = await stream.answers(3)
        assert [(number, status) for number, status, _ in answers] == [(1, 200), (2, 413), (3, 200)]
        assert answers[1][2]["code"] == "message_too_large"
        assert [message["payload"] for message in await daemon.poll()] == ["a", "b"]


async def test_a_full_topic_accepts_the_part_of_a_run_that_fits(daemon):
    await daemon.create("small", max_bytes=500)
    async with open_stream(daemon, "small") as stream:
        await stream.send(*[request(n, b"x" * 100) for n in range(10)])
        answers = await stream.answers(10)
    codes = [fields.get("code", "stored") for _, _, fields in answers]
    taken = codes.count("stored")
    assert 1 < taken < 10
    assert codes == ["stored"] * taken + ["topic_full"] * (10 - taken)
    assert answers[-1][2]["retryAfter"] == 5
    assert len(await daemon.poll("small")) == taken


async def test_a_failing_store_leaves_the_outcome_of_each_request_open(daemon):
    async with open_stream(daemon) as stream:
        await stream.send(request(1, b"a"))
        await stream.answers(1)
        daemon.store.fail_next("write")
        await stream.send(request(2, b"b"), request(3, b"c"))
        answers = await stream.answers(2)
        assert [(number, fields["outcome"]) for number, _, fields in answers] == [(2, "unknown"), (3, "unknown")]
        await stream.send(request(4, b"d"))
        assert (await stream.answers(1))[0][:2] == [4, 200]


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (b"\xc1", "invalid msgpack"),
        (b"\x92\x05\x81", "ends within"),
        (b"\x05", "array"),
        (b"\x92\x05\xc0", "map of fields"),
    ],
)
async def test_after_malformed_input_earlier_requests_are_answered_and_the_stream_closes(daemon, tail, words):
    async with open_stream(daemon) as stream:
        await stream.send(request(1, b"a"), request(2, b"b"), tail)
        assert [answer[:2] for answer in await stream.answers(2)] == [[1, 200], [2, 200]]
        code, reason = await stream.closed()
    assert code == 1007
    assert words in reason
    assert len(await daemon.poll()) == 2


async def test_text_closes_with_1003_and_anything_but_a_websocket_with_1002(daemon):
    async with open_stream(daemon) as stream:
        await stream.say(TextMessage("[1, {}]"))
        assert (await stream.closed())[0] == 1003
    async with open_stream(daemon) as stream:
        await stream.socket.send_all(b"\xff\xff\xff\xff\xff\xff")
        assert (await stream.closed())[0] == 1002


async def test_a_message_over_the_bound_of_bodies_closes_with_1009():
    async with in_process(listener="hot", http__max_body_bytes=2048) as daemon:
        await daemon.create()
        async with open_stream(daemon) as stream:
            await stream.send(request(1, b"x" * 2100))
            assert (await stream.closed())[0] == 1009


async def test_a_client_that_closes_gets_its_last_answers_first(daemon):
    async with open_stream(daemon) as stream:
        data = stream.ws.send(BytesMessage(request(1, b"a"))) + stream.ws.send(CloseConnection(1000))
        await stream.socket.send_all(data)
        assert (await stream.answers(1))[0][:2] == [1, 200]
        assert await stream.closed() == (1000, "")
        assert await stream.event() is None


async def test_pings_are_answered(daemon):
    async with open_stream(daemon) as stream:
        await stream.say(Ping(b"here"))
        assert await stream.event() == Pong(b"here")


@pytest.mark.parametrize(
    ("more", "status", "code"),
    [
        ({"topic": "a%20b"}, 400, "invalid_name"),
        ({"target": "/v1/namespaces/ns/topics/t/poll"}, 404, "not_found"),
        ({"extra_headers": [(b"Origin", b"http://elsewhere.example")]}, 403, "forbidden"),
        ({"extra_headers": [(b"Origin", b"http://[")]}, 403, "forbidden"),
        ({"extra_headers": [(b"Origin", b"null")]}, 403, "forbidden"),
    ],
)
async def test_a_refused_handshake_is_answered_with_a_problem(daemon, more, status, code):
    async with knock(daemon, **more) as (stream, answer):
        assert isinstance(answer, RejectConnection)
        assert answer.status_code == status
        body = await stream.event()
        assert isinstance(body, RejectData)
        assert code.encode() in body.data


async def test_accepted_messages_are_counted_by_requests(daemon):
    async with open_stream(daemon) as stream:
        await stream.send(*[request(n, b"x") for n in range(50)], request(50, b"a", b"b"), request(51))
        await stream.answers(52)
    text = (await daemon.call("GET", "/metrics")).text
    assert 'plainsong_requests_total{route="stream",status="200"} 51.0' in text
    assert 'plainsong_requests_total{route="stream",status="400"} 1.0' in text
    assert "plainsong_published_messages_total 52.0" in text
