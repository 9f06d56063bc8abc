"""The lane and hypercorn give the same answers to any bytes."""

from __future__ import annotations

import gzip

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.broker.differential import difference, meaning
from tests.broker.listeners import Reader, post, running

#: A few seconds of examples; for longer hunts, call ``difference``.
MAX_EXAMPLES = 100

TOPICS = st.sampled_from(
    [*["t"] * 12, "missing", "bug", "full", "broken-at-once", "a%20b", "%74", "a%2Fb", "ü", "a//b", "", "x" * 300]
)
VERBS = st.sampled_from([*["publish", "store", "store", "rollback"] * 3, "publish/", "Publish", "peek"])
TRANSACTIONS = st.sampled_from(
    [
        "/v1/transactions",
        "/v1/transactions/17/prepare",
        "/v1/transactions/17/commit",
        "/v1/transactions/%31%37/abort",
        "/v1/transactions/x/commit",
        "/v1/transactions/a%2Fb/commit",
        "/v1/transactions/\u00fc/abort",
        "/v1/transactions//commit",
        "/v1/transactions/17/commit/",
        "/v1/transactions/17/checkpoint",
        "/v1/transactions/",
        "/v1/transactionsx",
        "/v1//transactions",
    ]
)
ABOUT_TOPICS = st.sampled_from(
    [
        *["t"] * 4,
        "t/properties",
        "a%20b",
        "a%2Fb",
        "\u00fc",
        "t/",
        "t/properties/",
        "t/stats",
        "/v1/namespaces/ns/topics",
        "/v1/namespaces/ns/topics/",
        "/v1/namespaces//topics",
    ]
)
ABOUT_TOPICS_METHODS = st.sampled_from(["GET", "PUT", "DELETE"] * 6 + ["POST", "get", "OPTIONS", "BREW"])
QUERIES = st.sampled_from(["", "?", "?ttl=5", "?a=%20&b", "?#f"])
METHODS = st.sampled_from(["POST"] * 20 + ["GET", "PUT", "post", "OPTIONS", "BREW"])
VERSIONS = st.sampled_from(["HTTP/1.1"] * 20 + ["HTTP/1.0", "HTTP/1.2", "HTTP/2.0", "http/1.1"])
HEADERS = st.lists(
    st.sampled_from(
        [
            "X-Echo-A: 1",
            "x-echo-a: 2",
            "X-Echo-B:\t b \t",
            "X-Echo-C: \xe9",
            "X-Echo-D: a\x01b",
            "X-Echo-E:",
            "X Echo: 1",
            "X-Folded: a\r\n b",
            "X-Request-Id: mine.1",
            "X-Request-Id: no good",
            "Accept-Encoding: gzip",
            "Accept-Encoding: gzip;q=0, *",
            "Accept-Encoding: deflate",
            "Accept: text/html",
            "Connection: close",
            "Connection: keep-alive, x",
            "Host: other",
            "Expect: 100-continue",
            "Expect: something",
            "Content-Encoding: gzip",
            "Content-Encoding: identity",
            "Content-Encoding: br",
            "Transfer-Encoding: identity",
            "Content-Length: 3",
            "Content-Length: x",
            "Content-Length: 99999999",
        ]
    ),
    max_size=4,
)
BODIES = st.sampled_from([b"", b"abc", b"x" * 5000, gzip.compress(b"abc" * 1000), gzip.compress(b"abc")[:-4]])
BODIES_ABOUT_TOPICS = st.sampled_from([b""] * 4 + [b"{}", b"x" * 65536, b"x" * 65537, gzip.compress(b"{}")])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(["transactions", "messages", "messages", "about topics"]))
    body = draw(BODIES_ABOUT_TOPICS if kind == "about topics" else BODIES)
    if kind == "transactions":
        path, methods = draw(TRANSACTIONS), METHODS
    elif kind == "messages":
        path, methods = f"{draw(TOPICS)}/{draw(VERBS)}", METHODS
    else:
        path, methods = draw(ABOUT_TOPICS), ABOUT_TOPICS_METHODS
    request = post(f"{path}{draw(QUERIES)}", b"", *draw(HEADERS), "X-Last: 1")
    line, _, rest = request.partition(b"\r\n")
    target = line.split(b" ")[1]
    head = draw(methods).encode() + b" " + target + b" " + draw(VERSIONS).encode() + b"\r\n" + rest
    if b"content-length: 0\r\n" in head.lower():
        framed = draw(st.booleans())
        length = b"Content-Length: %d\r\n" % len(body) if framed else b"Transfer-Encoding: chunked\r\n"
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:2], body[2:]) if part) + b"0\r\n\r\n"
        head = head.replace(b"Content-Length: 0\r\n", length)
        return head + (body if framed else chunks)
    return head + body


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[bytes], int]:
    """Draw the bytes of some requests, split anywhere, and the number of requests."""
    asked = draw(st.lists(requests(), min_size=1, max_size=3))
    whole = b"".join(asked)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=3)))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)], len(asked)


def test_both_listeners_give_the_same_answers_to_the_same_bytes() -> None:
    async def main() -> None:
        quick = {"header_timeout_s": 0.05, "body_timeout_s": 0.05, "keep_alive_s": 0.05}
        async with running(hot=True, **quick) as one, running(hot=False, **quick) as other:

            async def both_asked(pieces: list[bytes], answers: int) -> str | None:
                return await difference(("127.0.0.1", one.port), ("127.0.0.1", other.port), pieces, answers)

            @settings(max_examples=MAX_EXAMPLES, derandomize=True, database=None)
            @given(conversations())
            def fuzz(conversation: tuple[list[bytes], int]) -> None:
                problem = trio.from_thread.run(both_asked, *conversation)
                assert problem is None, f"{conversation!r}\n{problem}"

            await trio.to_thread.run_sync(fuzz)

    # The clock advances only while every task is blocked, so that no request times out on a slow machine.
    trio.run(main, clock=MockClock(autojump_threshold=0.01))


#: Well-formed requests to hot and other routes, some of which the lane hands to hypercorn.
ASKED_IN_TURN = st.sampled_from(
    [
        post("t/store", b"abc"),
        post("t/store", b"abc", "Transfer-Encoding: chunked").removesuffix(b"abc") + b"3\r\nabc\r\n0\r\n\r\n",
        post("t/store", b"x" * 300_000),
        post("t/rollback"),
        post("missing/publish"),
        post("t/store", gzip.compress(b"abc"), "Content-Encoding: gzip"),
        post("t/store", b"abc", "Origin: http://localhost"),
        post("t/peek"),
        post("/v1/transactions/17/commit"),
        post("/v1/transactions/17/checkpoint"),
        post("t").replace(b"POST", b"PUT", 1),
        post("t", b"{}").replace(b"POST", b"PUT", 1),
        post("t/properties", b"{}").replace(b"POST", b"PUT", 1),
        post("t", b"{}", "Content-Encoding: gzip").replace(b"POST", b"PUT", 1),
        b"GET /v1/namespaces/ns/topics/t HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"DELETE /v1/namespaces/ns/topics/t HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/namespaces/ns/topics HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"OPTIONS /ping HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
)


async def answered_in_turn(port: int, requests: list[tuple[bytes, int]]) -> list[object]:
    """Return the answers to requests on one connection, each sent in two pieces, after the previous answer."""
    said: list[object] = []
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        reader = Reader(stream)
        for request, at in requests:
            await stream.send_all(request[:at])
            await trio.lowlevel.checkpoint()
            await stream.send_all(request[at:])
            said.append(meaning(await reader.reply()))
    return said


def test_a_connection_that_changes_listeners_with_its_requests_gets_the_same_answers() -> None:
    async def main() -> None:
        async with running(hot=True) as one, running(hot=False) as other:

            async def both_asked(requests: list[tuple[bytes, int]]) -> None:
                assert await answered_in_turn(one.port, requests) == await answered_in_turn(other.port, requests)

            @settings(max_examples=MAX_EXAMPLES, derandomize=True, database=None)
            @given(st.lists(st.tuples(ASKED_IN_TURN, st.integers(0, 200)), min_size=1, max_size=8))
            def fuzz(requests: list[tuple[bytes, int]]) -> None:
                trio.from_thread.run(both_asked, requests)

            await trio.to_thread.run_sync(fuzz)

    trio.run(main)
