"""The server behind both listeners: addresses, compression, errors of all routes, HTTP/2, TLS, and real clients."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import httpx
import pytest
import trio

from broker.http.sockets import address_of, listen_on, split_bind
from broker.http.wire import accepts_gzip
from broker.security.peer import Peer
from tests.broker.listeners import Reader, ask, post, running
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    pass

BOTH_WAYS = pytest.mark.parametrize("hot", [True, False], ids=["hot", "application"])


@BOTH_WAYS
async def test_answers_are_compressed_for_clients_that_accept_gzip(hot: bool) -> None:
    async with running(hot=hot) as listener:
        body = bytes(5000)
        packed = await ask(listener, post("t/store", body, "Accept-Encoding: deflate, gzip;q=0.5"))
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.headers["vary"] == "Accept-Encoding"
        assert bytes.fromhex(json.loads(gzip.decompress(packed.body))["body"]) == body
        plain = await ask(listener, post("t/store", body, "Accept-Encoding: deflate"))
        assert "content-encoding" not in plain.headers
        assert plain.headers["vary"] == "Accept-Encoding"
        short = await ask(listener, post("t/store", b"x", "Accept-Encoding: gzip"))
        assert "content-encoding" not in short.headers
        streamed = await ask(listener, post("t/rollback", b"", "Accept-Encoding: gzip"))
        assert gzip.decompress(streamed.body) == b"0;1;2;"


@BOTH_WAYS
async def test_a_request_has_the_address_of_its_peer(hot: bool) -> None:
    async with running(hot=hot) as listener, await listener.connect() as stream:
        await stream.send_all(post("t/store", b"x"))
        assert (await Reader(stream).reply()).status == 200
        host, port = stream.socket.getsockname()
        assert listener.toys.peers == [Peer(f"{host}:{port}")]


async def test_the_framework_is_loaded_by_the_first_requests_that_need_it_and_once_for_all_of_them() -> None:
    async with running() as listener:
        assert (await ask(listener, post("t/store", b"x"))).status == 200
        assert listener.toys.built == 0
        statuses = []

        async def ping() -> None:
            statuses.append((await ask(listener, b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")).status)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ping)
        assert statuses == [200] * 5
        assert listener.toys.built == 1


@pytest.mark.parametrize(
    ("header", "taken"),
    [
        ("gzip", True),
        ("GZIP;q=0.1", True),
        ("gzip;q=0", False),
        ("gzip;q=0, *", False),
        ("*", True),
        ("*;q=0", False),
        ("x-gzip", True),
        ("deflate", False),
        ("gzip;q=nonsense", False),
        ("", False),
    ],
)
def test_weights_decide_whether_gzip_is_used(header: str, taken: bool) -> None:
    assert accepts_gzip(header) is taken


@BOTH_WAYS
async def test_unknown_paths_and_methods_are_problems_whatever_is_accepted(hot: bool) -> None:
    async with running(hot=hot) as listener:
        reply = await ask(listener, b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n\r\n")
        assert (reply.status, reply.code) == (404, "not_found")
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.headers["x-request-id"]
        for method in (b"GET", b"OPTIONS", b"DELETE"):
            reply = await ask(
                listener, method + b" /v1/namespaces/n/topics/t/publish HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
            assert (reply.status, reply.code, reply.headers["allow"]) == (405, "method_not_allowed", "POST")


@BOTH_WAYS
async def test_doubled_slashes_are_never_redirected(hot: bool) -> None:
    async with running(hot=hot) as listener:
        assert (await ask(listener, post("//t/publish"))).status == 404
        assert (await ask(listener, post("t/publish/"))).status == 200


@BOTH_WAYS
async def test_garbage_is_refused_as_a_problem(hot: bool) -> None:
    async with running(hot=hot) as listener:
        reply = await ask(listener, b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
        assert reply.status == 400
        assert reply.headers["content-type"] == "application/problem+json"


@pytest.mark.usefixtures("long_linger")
@BOTH_WAYS
async def test_http_2_with_prior_knowledge_reaches_the_same_handlers(hot: bool) -> None:
    async with (
        running(hot=hot) as listener,
        httpx.AsyncClient(http1=False, http2=True, trust_env=False, verify=False, timeout=PATIENCE_S) as client,
    ):
        base = f"http://127.0.0.1:{listener.port}/v1/namespaces/ns/topics"
        reply = await client.post(f"{base}/t/store", content=b"hello")
        assert (reply.http_version, bytes.fromhex(reply.json()["body"])) == ("HTTP/2", b"hello")
        assert reply.headers["x-request-id"]
        assert (await client.post(f"{base}/missing/publish")).json()["code"] == "topic_not_found"
        assert (await client.post(f"{base}/t/rollback")).content == b"0;1;2;"
        large = await client.post(f"{base}/t/store", content=bytes(3 << 20))
        assert (large.status_code, large.json()["code"]) == (413, "body_too_large")
        assert (await client.post(f"{base}/t/publish")).status_code == 200


@BOTH_WAYS
async def test_curl_waits_for_100_continue(hot: bool) -> None:
    async with running(hot=hot) as listener:
        url = f"http://127.0.0.1:{listener.port}/v1/namespaces/ns/topics/t/store"
        command = [
            "curl",
            "-sS",
            "--noproxy",
            "*",
            "-H",
            "Expect: 100-continue",
            "--expect100-timeout",
            str(PATIENCE_S),
        ]
        command += ["-v", "--data-binary", "hello", url]
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True)
        assert b"< HTTP/1.1 100" in done.stderr
        assert bytes.fromhex(json.loads(done.stdout)["body"]) == b"hello"


async def test_an_ipv6_address_can_be_listened_on() -> None:
    async with running(bind="[::1]:0") as listener, await trio.open_tcp_stream("::1", listener.port) as stream:
        await stream.send_all(post("t/publish"))
        assert (await Reader(stream).reply()).status == 200


async def test_an_address_in_use_is_reported_clearly() -> None:
    async with running() as listener:
        with pytest.raises(OSError, match=f"127.0.0.1:{listener.port} is in use by another process"):
            listen_on(f"127.0.0.1:{listener.port}")


def test_an_invalid_address_is_refused() -> None:
    for bind in ("7420", "host:", "host:http", "::1:80", "host:65536"):
        with pytest.raises(ValueError, match="host:port"):
            split_bind(bind)
    for listener in listen_on("localhost:0"):
        assert address_of(listener).rpartition(":")[2] != "0"
        listener.close()


async def test_a_failing_connection_leaves_the_others_alone() -> None:
    # An HTTP/2 frame that belongs to no stream makes hypercorn fail.
    async with running() as listener:
        async with await listener.connect() as stream:
            await stream.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 0, 0, 0, 0, 0, 9]))
            reader = Reader(stream)
            with trio.fail_after(PATIENCE_S):
                while await reader.stream.receive_some():
                    pass
        assert (await ask(listener, post("t/publish"))).status == 200
