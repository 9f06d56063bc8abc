"""What HTTP/1.1 makes of applications, and of requests, that do not keep to it: bare ones answer here."""

from __future__ import annotations

from typing import Any

from tests.broker.listeners import Reader, post, running

CHUNKED = "Transfer-Encoding: chunked"


def get(target: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    lines = [f"{method} {target} HTTP/{version}", "Host: localhost", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def answer(send: Any, body: bytes = b"", status: int = 200, headers: Any = None) -> None:
    if headers is None:
        headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def test_nothing_after_a_malformed_body_is_a_request_though_its_answer_left_first() -> None:
    paths = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await answer(send, b"early")
        await receive()

    async with running(app=app) as listener, await listener.connect() as stream:
        reader = Reader(stream)
        await stream.send_all(post("/zz", b"", CHUNKED) + b"zz\r\n")
        assert (await reader.reply()).body == b"early"
        await stream.send_all(b"0\r\n\r\n" + get("/smuggled"))
        assert await reader.at_end()
    assert paths == ["/zz"]
