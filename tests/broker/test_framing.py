"""Status lines, and requests with chunked bodies: both HTTP listeners behave the same, byte for byte."""

from __future__ import annotations

import pytest
import trio

from tests.broker.listeners import Listener, Reader, post, running
from tests.patience import PATIENCE_S

BOTH_WAYS = pytest.mark.parametrize("hot", [True, False], ids=["hot", "application"])
CHUNKED = "Transfer-Encoding: chunked"


async def first_line(listener: Listener, request: bytes) -> bytes:
    """Return the first line of the answer."""
    async with await listener.connect() as stream:
        await stream.send_all(request)
        with trio.fail_after(PATIENCE_S):
            received = b""
            while b"\r\n" not in received:
                received += await stream.receive_some()
    return received.partition(b"\r\n")[0]


@BOTH_WAYS
async def test_reason_phrases_are_those_of_the_standard(hot: bool) -> None:
    wanted = {
        post("t/publish"): b"HTTP/1.1 200 OK",
        post("missing/publish"): b"HTTP/1.1 404 Not Found",
        post("t/publish").replace(b"POST", b"GET"): b"HTTP/1.1 405 Method Not Allowed",
        post("t/store", b"", "Content-Length: 99999999"): b"HTTP/1.1 413 Request Entity Too Large",
        post("t/store", b"x", "Content-Encoding: br", "Content-Type: avro/binary"): (
            b"HTTP/1.1 415 Unsupported Media Type"
        ),
        post("bug/publish"): b"HTTP/1.1 500 Internal Server Error",
        post("full/publish"): b"HTTP/1.1 503 Service Unavailable",
        post("t/store", b"", "Content-Length: 1", "Expect: 100-continue"): b"HTTP/1.1 100 Continue",
        b"no request\r\n\r\n": b"HTTP/1.1 400 Bad Request",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000: (b"HTTP/1.1 431 Request Header Fields Too Large"),
    }
    async with running(hot=hot) as listener:
        for request, line in wanted.items():
            assert await first_line(listener, request) == line


@BOTH_WAYS
@pytest.mark.parametrize(
    "chunks",
    [
        b"3\nabc\r\n0\r\n\r\n",
        b"3\r\nabc\n0\r\n\r\n",
        b"3\r\nabc\r\n0\n\r\n",
        b"3\nabc\n0\n\n",
        b"3;x\nabc\r\n0\r\n\r\n",
        b"3;x=\n0\r\n\r\n",
        b"\n3\r\nabc\r\n0\r\n\r\n",
        b"3\r\nabc\r\n0\r\nTrailer: 1\n\r\n",
        b"3\r\nabc\r\n0\r\nTrailer: 1\r\nOther: 2\n\r\n",
        b"3\r\nabc\r\n0\r\n\n",
        b"3;" + b"x" * 5000,
        b"3\r\nabcd\r\n",
        b"x\r\n",
        b"-3\r\nabc\r\n",
    ],
)
async def test_a_line_of_a_chunked_body_that_ends_in_a_bare_lf_or_not_at_all_is_refused_at_once(
    hot: bool, chunks: bytes
) -> None:
    async with running(hot=hot, body_timeout_s=60) as listener, await listener.connect() as stream:
        await stream.send_all(post("t/store", b"", CHUNKED) + chunks)
        reader = Reader(stream)
        reply = await reader.reply()
        assert (reply.status, reply.code, reply.headers["connection"]) == (400, "malformed_body", "close")


@BOTH_WAYS
async def test_a_refused_request_whose_body_is_malformed_too_has_one_whole_answer(hot: bool) -> None:
    async with running(hot=hot, body_timeout_s=60) as listener, await listener.connect() as stream:
        await stream.send_all(post("t/store", b"", CHUNKED, "Content-Length: 3") + b"0x3\r\nabc\r\n0\r\n\r\n")
        reply = await Reader(stream).reply()
        assert (reply.status, reply.code) == (400, "malformed_body")


@BOTH_WAYS
async def test_chunks_with_extensions_and_trailers_are_read_however_they_are_split(hot: bool) -> None:
    chunks = b"3;a=b\r\nabc\r\n1 \r\nd\r\n0\r\nTrailer: 1\r\nOther: 2\r\n\r\n"
    async with running(hot=hot) as listener, await listener.connect() as stream:
        reader = Reader(stream)
        for at in range(len(chunks)):
            await stream.send_all(post("t/store", b"", CHUNKED) + chunks[:at])
            await trio.lowlevel.checkpoint()
            await stream.send_all(chunks[at:])
            assert b"61626364" in (await reader.reply()).body
