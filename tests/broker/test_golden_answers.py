"""Requests of any bytes get the same answers as from the two servers of version 0.1, which agreed on them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.broker.differential import exchanged, meaning
from tests.broker.listeners import running

#: Conversations and their answers, one per line.
GOLDEN = Path(__file__).parent / "golden_answers.jsonl"
LONGEST = 300


def brief(found: tuple[int, object, list[tuple[str, str]]]) -> list[object]:
    """Return an answer in the file's form."""
    status, body, headers = found
    if isinstance(body, bytes):
        body = body.decode("latin-1")
        if len(body) > LONGEST:
            body = "sha256:" + hashlib.sha256(body.encode("latin-1")).hexdigest()
    return [status, body, [list(header) for header in headers]]


@pytest.mark.parametrize("hot", [True, False], ids=["hot", "application"])
def test_conversations_are_answered_as_recorded(hot: bool) -> None:
    async def main() -> None:
        quick = {"header_timeout_s": 0.05, "body_timeout_s": 0.05, "keep_alive_s": 0.05}
        async with running(hot=hot, **quick) as listener:
            for line in GOLDEN.read_text("ascii").splitlines():
                golden = json.loads(line)
                pieces = [piece.encode("latin-1") for piece in golden["pieces"]]
                found = await exchanged(("127.0.0.1", listener.port), pieces, golden["requests"])
                assert [brief(meaning(reply)) for reply in found] == golden["answers"], pieces

    # The clock advances only while every task is blocked, so that no request times out on a slow machine.
    trio.run(main, clock=MockClock(autojump_threshold=0.01))
