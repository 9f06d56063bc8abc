"""HTTP/1.1: the requests that are served, their order, and those that the application answers."""

from __future__ import annotations

import gc
import json
import sys
import time

import pytest
import trio
import trio.testing

from broker.http.server import LOOP_FIRST_S
from tests.broker.listeners import Reader, ask, post, running
from tests.patience import PATIENCE_S


async def test_an_empty_publish_is_answered_with_id_date_and_length() -> None:
    async with running() as listener:
        reply = await ask(listener, post("t/publish"))
        assert (reply.status, reply.body) == (200, b"")
        assert reply.headers["content-length"] == "0"
        assert "date" in reply.headers
        assert reply.headers["x-request-id"]


async def test_a_handler_receives_path_query_headers_and_body() -> None:
    async with running() as listener:
        request = post("t%2d1/store?ttl=5", b"\x00\xff", "X-Echo-A: 1", "x-echo-a:  2 ")
        seen = json.loads((await ask(listener, request)).body)
        assert seen == {
            "namespace": "ns",
            "topic": "t-1",
            "query": "ttl=5",
            "headers": {"x-echo-a": "1, 2"},
            "body": "00ff",
        }


async def test_the_handler_of_a_transaction_receives_its_id_and_no_topic() -> None:
    async with running() as listener, await listener.connect() as stream:
        reader = Reader(stream)
        asked = {
            "/v1/transactions?longs=string": ["begin", {}, "longs=string", "6162"],
            "/v1/transactions/%317/prepare": ["prepare", {"transaction": "17"}, "", "6162"],
            "/v1/transactions/17/commit": ["commit", {"transaction": "17"}, "", "6162"],
            "/v1/transactions/17/abort": ["abort", {"transaction": "17"}, "", "6162"],
        }
        for path, seen in asked.items():
            await stream.send_all(post(path, b"ab"))
            assert json.loads((await reader.reply()).body) == seen


async def test_the_path_of_a_transaction_split_at_every_byte_is_the_same_request() -> None:
    request = post("/v1/transactions/17/commit")
    async with running() as listener, await listener.connect() as stream:
        reader = Reader(stream)
        for at in range(1, len(request)):
            await stream.send_all(request[:at])
            await trio.lowlevel.checkpoint()
            await stream.send_all(request[at:])
            assert json.loads((await reader.reply()).body)[:2] == ["commit", {"transaction": "17"}]


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async with running() as listener, await listener.connect() as stream:
        await stream.send_all(b"".join(post("t/store", b"%d" % number) for number in range(50)))
        reader = Reader(stream)
        bodies = [bytes.fromhex(json.loads((await reader.reply()).body)["body"]) for _ in range(50)]
        assert bodies == [b"%d" % number for number in range(50)]


async def test_requests_sent_while_one_is_parked_are_answered_after_it() -> None:
    async with running() as listener, await listener.connect() as stream:
        await stream.send_all(post("t/poll"))
        while not listener.toys.parked:
            await trio.lowlevel.checkpoint()
        await trio.sleep(0.03)  # long enough to start the watcher, which must keep the bytes
        await stream.send_all(post("t/store", b"next"))
        listener.toys.release.set()
        reader = Reader(stream)
        assert (await reader.reply()).body == b"\0"
        assert json.loads((await reader.reply()).body)["body"] == b"next".hex()


async def test_a_request_split_at_every_byte_is_the_same_request() -> None:
    request = post("t/store", b"hello")
    async with running() as listener, await listener.connect() as stream:
        reader = Reader(stream)
        for at in range(1, len(request)):
            await stream.send_all(request[:at])
            await trio.lowlevel.checkpoint()
            await stream.send_all(request[at:])
            assert json.loads((await reader.reply()).body)["body"] == b"hello".hex()


async def test_a_chunked_body_split_at_every_byte_is_the_same_body() -> None:
    head = post("t/store", b"", "Transfer-Encoding: chunked")
    chunks = b"3\r\nabc\r\n1;x=y\r\nd\r\n0\r\nTrailer: 1\r\n\r\n"
    async with running() as listener, await listener.connect() as stream:
        reader = Reader(stream)
        for at in range(len(chunks)):
            await stream.send_all(head + chunks[:at])
            await trio.lowlevel.checkpoint()
            await stream.send_all(chunks[at:])
            assert json.loads((await reader.reply()).body)["body"] == b"abcd".hex()


async def test_a_stream_is_sent_in_chunks_and_closed() -> None:
    async with running() as listener:
        reply = await ask(listener, post("t/rollback"))
        assert (reply.headers["transfer-encoding"], reply.body) == ("chunked", b"0;1;2;")
        assert listener.toys.closed.is_set()


async def test_http_1_0_gets_a_stream_that_ends_with_the_connection() -> None:
    async with running() as listener:
        reply = await ask(listener, post("t/rollback").replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert "transfer-encoding" not in reply.headers
        assert (reply.headers["connection"], reply.body) == ("close", b"0;1;2;")


@pytest.mark.parametrize("why", ["broken", "refused"])
async def test_a_broken_stream_is_never_ended_properly_and_only_a_bug_is_logged_as_one(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as listener, await listener.connect() as stream:
        await stream.send_all(post(f"{why}/rollback"))
        with pytest.raises((EOFError, trio.BrokenResourceError)):
            await Reader(stream).reply()
    (told,) = [record for record in caplog.records if record.getMessage() == "a streamed answer was cut off"]
    assert (told.levelname, told.exc_info is None) == (("ERROR", False) if why == "broken" else ("WARNING", True))


async def test_a_stream_that_fails_before_its_first_byte_is_answered_with_the_error() -> None:
    async with running() as listener:
        reply = await ask(listener, post("broken-at-once/rollback"))
        assert (reply.status, reply.code) == (404, "topic_not_found")


async def test_connection_close_is_honoured() -> None:
    async with running() as listener, await listener.connect() as stream:
        await stream.send_all(post("t/publish", b"", "Connection: close"))
        reader = Reader(stream)
        assert (await reader.reply()).headers["connection"] == "close"
        assert await reader.at_end()


async def test_expect_continue_is_answered_before_the_body_is_sent() -> None:
    async with running() as listener, await listener.connect() as stream:
        request = post("t/store", b"hello", "Expect: 100-continue")
        await stream.send_all(request[:-5])
        reader = Reader(stream)
        assert (await reader.reply()).status == 100
        await stream.send_all(request[-5:])
        assert json.loads((await reader.reply()).body)["body"] == b"hello".hex()


PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_hot_requests_and_others_are_answered_in_their_order_on_one_connection() -> None:
    async with running() as listener, await listener.connect() as stream:
        reader = Reader(stream)
        await stream.send_all(post("t/publish") + post("t/store", b"a") + PING + post("t/store", b"b"))
        assert (await reader.reply()).status == 200
        assert json.loads((await reader.reply()).body)["body"] == b"a".hex()
        assert (await reader.reply()).body == b"OK"
        assert json.loads((await reader.reply()).body)["body"] == b"b".hex()
        assert listener.toys.by_application == 0
        await stream.send_all(post("t/rollback"))
        assert (await reader.reply()).body == b"0;1;2;"


async def test_a_hot_request_after_one_of_the_application_is_hot() -> None:
    async with running() as listener, await listener.connect() as stream:
        reader = Reader(stream)
        for number in range(3):
            await stream.send_all(PING)
            assert (await reader.reply()).body == b"OK"
            for body in (b"%d" % number, b"x" * 100_000):
                await stream.send_all(post("t/store", body))
                assert json.loads((await reader.reply()).body)["body"] == body.hex()
        assert listener.toys.by_application == 0


async def test_the_loop_gets_the_interpreter_lock_quickly_while_the_application_is_loaded_and_normally_afterwards() -> (
    None
):
    before = sys.getswitchinterval(), gc.isenabled()
    async with running() as listener:
        assert (await ask(listener, PING)).body == b"OK"
        assert listener.toys.built_under == (pytest.approx(LOOP_FIRST_S), False)
        assert (sys.getswitchinterval(), gc.isenabled()) == before == (before[0], True)


async def test_the_application_answers_the_requests_of_a_page() -> None:
    async with running() as listener, await listener.connect() as stream:
        reader = Reader(stream)
        of_a_page = post("t/store", b"a", "Origin: http://localhost")
        found = []
        for request in (of_a_page, of_a_page, post("t/store", b"a"), of_a_page):
            await stream.send_all(request)
            await reader.reply()
            found.append(listener.toys.by_application)
        assert found == [1, 2, 2, 3]


async def test_a_hot_request_after_another_is_answered_and_its_connection_closed_while_the_server_stops() -> None:
    async with running(grace_s=PATIENCE_S) as listener, await listener.connect() as stream:
        reader = Reader(stream)
        await stream.send_all(PING)
        assert (await reader.reply()).body == b"OK"
        await stream.send_all(post("t/poll"))
        while not listener.toys.parked:
            await trio.lowlevel.checkpoint()
        listener.stop.set()
        await trio.testing.wait_all_tasks_blocked()
        listener.toys.release.set()
        assert (await reader.reply()).headers["connection"] == "close"
        assert await reader.at_end()
        assert listener.toys.by_application == 0


async def test_closed_connections_make_room_for_others() -> None:
    async with running(max_connections=1) as listener:
        for _ in range(3):
            async with await listener.connect() as stream:
                reader = Reader(stream)
                for request in (PING, post("t/publish")):
                    await stream.send_all(request)
                    assert (await reader.reply()).status == 200
                await stream.send_eof()
                assert await reader.at_end()  # so the server has noticed that it ended


async def test_a_thousand_parked_requests_cost_no_cpu_and_wake_within_milliseconds() -> None:
    async with running() as listener:
        streams = [await listener.connect() for _ in range(1000)]
        for stream in streams:
            await stream.send_all(post("t/poll"))
        while listener.toys.parked < 1000:
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked(0.05)  # until each connection has its watcher
        spent_s = []
        while len(spent_s) < 5 and (not spent_s or spent_s[-1] >= 0.1):
            used_s = time.process_time()  # a stall of the machine affects one round, a real cost every round
            await trio.sleep(0.25)
            spent_s.append(time.process_time() - used_s)
        assert min(spent_s) < 0.1, spent_s
        started = time.perf_counter()
        listener.toys.release.set()
        for stream in streams:
            assert (await Reader(stream).reply()).body == b"\0"
        assert time.perf_counter() - started < PATIENCE_S
        for stream in streams:
            await stream.aclose()


async def test_an_error_is_a_problem_with_code_hint_and_outcome() -> None:
    async with running() as listener:
        reply = await ask(listener, post("missing/publish", b"", "X-Request-Id: abc.1"))
        assert reply.status == 404
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.headers["x-request-id"] == "abc.1"
        assert json.loads(reply.body) == {
            "type": "/errors/topic_not_found",
            "title": "There is no such topic",
            "status": 404,
            "detail": "no topic 'missing'",
            "code": "topic_not_found",
            "hint": "create it",
            "outcome": "not-applied",
        }
        assert (await ask(listener, post("full/publish"))).headers["retry-after"] == "1"


async def test_a_bug_is_internal_and_reveals_nothing() -> None:
    async with running() as listener:
        reply = await ask(listener, post("bug/publish"))
        assert (reply.status, reply.code) == (500, "internal")
        assert b"secret" not in reply.body


async def test_a_header_value_of_two_lines_is_never_sent() -> None:
    async with running() as listener:
        reply = await ask(listener, post("injection/publish?x"))
        assert reply.status == 500
        assert "x-evil" not in reply.headers


@pytest.mark.parametrize("sent", ["a" * 129, "with space", ""])
async def test_a_request_id_that_is_unsafe_in_a_log_is_replaced(sent: str) -> None:
    async with running() as listener:
        reply = await ask(listener, post("t/publish", b"", f"X-Request-Id: {sent}"))
        assert reply.headers["x-request-id"] != sent
