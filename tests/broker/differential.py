"""Sends the same request bytes to any two servers, and compares the parts of their answers that must be equal.

problem = await difference(("127.0.0.1", 7420), ("127.0.0.1", 7421), request_bytes)
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import trio

from tests.broker.listeners import Reader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.broker.listeners import Reply

#: Headers about the connection, the time or the framing.
IGNORED_HEADERS = {"connection", "date", "server", "transfer-encoding", "content-length", "keep-alive"}
#: Problems whose detail comes from a parser.
WORDED_BY_PARSER = {"malformed_body", "invalid_parameter"}

Address = tuple[str, int]


async def difference(one: Address, other: Address, pieces: Sequence[bytes], answers: int) -> str | None:
    """Send ``pieces`` to both and read up to ``answers`` answers; return the difference, or None."""
    seen = [[meaning(reply) for reply in await exchanged(listener, pieces, answers)] for listener in (one, other)]
    return None if seen[0] == seen[1] else f"{seen[0]!r}\n  is not\n{seen[1]!r}"


async def exchanged(listener: Address, pieces: Sequence[bytes], answers: int) -> list[Reply]:
    """Return the answers of ``listener`` that arrive before it closes the connection."""
    replies: list[Reply] = []
    async with await trio.open_tcp_stream(*listener) as stream:
        reader = Reader(stream)
        try:
            for piece in pieces:
                await stream.send_all(piece)
                await trio.lowlevel.checkpoint()
            while len(replies) < answers:
                reply = await reader.reply()
                if reply.status >= 200:
                    replies.append(reply)
                if reply.headers.get("connection") == "close":
                    break
        except (EOFError, trio.BrokenResourceError):
            pass
    return replies


def meaning(reply: Reply) -> tuple[int, object, list[tuple[str, str]]]:
    """Return an answer's status, body and headers, without parts in which two correct servers may differ."""
    headers = sorted((name, value) for name, value in reply.headers.items() if name not in IGNORED_HEADERS)
    made = [(name, "made") if name == "x-request-id" and "-" in value else (name, value) for name, value in headers]
    body: object = reply.body
    if reply.headers.get("content-type") == "application/problem+json":
        problem = json.loads(reply.body)
        if problem["code"] in WORDED_BY_PARSER:
            problem["detail"] = problem["hint"] = ""
        body = problem
    return reply.status, body, made
