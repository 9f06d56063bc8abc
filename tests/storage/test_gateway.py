"""A connection to a gateway accepts only the response to its own request."""

from __future__ import annotations

import struct

import pytest
import trio
from trio.testing import memory_stream_pair

from storage.hbase.gateway import AnswerTooLarge, Gateway, OutOfStep
from tests.patience import PATIENCE_S

REPLY, EXCEPTION = 2, 3


def answer(sequence: int, *, kind: int = REPLY, name: bytes = b"isTableEnabled") -> bytes:
    """Return a frame: the response ``true`` to that call."""
    success = b"\x02\x00\x00\x01"
    body = struct.pack("!HBBi", 0x8001, 0, kind, len(name)) + name + struct.pack("!i", sequence) + success + b"\x00"
    return struct.pack("!i", len(body)) + body


async def asked(*answers: bytes) -> object:
    """Return the result of a call whose gateway sends these bytes."""
    ours, theirs = memory_stream_pair()
    await theirs.send_all(b"".join(answers))
    await theirs.send_eof()
    with trio.fail_after(PATIENCE_S):
        return await Gateway(ours).call("isTableEnabled", b"table")


async def test_a_call_returns_the_answer_to_its_request():
    assert await asked(answer(1)) is True


@pytest.mark.parametrize("sequence", [0, 2])
async def test_the_answer_to_another_request_ends_the_connection(sequence):
    with pytest.raises(OutOfStep, match=f"answer {sequence} to request 1"):
        await asked(answer(sequence))


@pytest.mark.parametrize("size", [0, -1, (256 << 20) + 1])
async def test_a_frame_of_an_impossible_size_is_not_waited_for(size):
    with pytest.raises(OutOfStep, match=f"an answer of {size} bytes"):
        await asked(struct.pack("!i", size))


@pytest.mark.parametrize("said", [b"HTTP/1.1 400", b"\xff" * 40])
async def test_a_malformed_answer_ends_the_connection(said):
    with pytest.raises(OutOfStep, match="an unreadable answer"):
        await asked(struct.pack("!i", len(said)) + said)


async def test_a_truncated_answer_is_not_an_answer():
    with pytest.raises(OSError, match="closed the connection"):
        await asked(answer(1)[:-3])


async def test_an_oversized_answer_after_a_good_one_is_too_large_and_not_a_framing_mismatch():
    ours, theirs = memory_stream_pair()
    gateway = Gateway(ours)
    await theirs.send_all(answer(1) + struct.pack("!i", (256 << 20) + 1))
    with trio.fail_after(PATIENCE_S):
        assert await gateway.call("isTableEnabled", b"table") is True
        with pytest.raises(AnswerTooLarge, match=r"an answer of 268435457 bytes exceeds the limit of 256 MiB$"):
            await gateway.call("isTableEnabled", b"table")


async def test_an_oversized_first_answer_asks_whether_the_gateway_is_framed():
    with pytest.raises(OutOfStep, match=r"framed \(-f\)"):
        await asked(struct.pack("!i", (256 << 20) + 1))
