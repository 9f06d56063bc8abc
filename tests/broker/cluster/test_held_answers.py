"""Answers on a link are sent in pieces, whatever they contain, and count against the budget until they are sent."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import trio
import trio.testing

from broker.http.budgets import FREE_BYTES, AnswerBudget
from broker.http.messages import Answer, Answered, Request
from broker.link.http_codec import BudgetedBody, answer_request, budgeted, collect
from broker.link.server import Call, PendingReply
from broker.link.wire import INLINE_BYTES, PIECE_BYTES
from plainsong.protocol.errors import TopicNotFound
from tests.peering.linked import linked_callbacks

BLOCKS = [b"a", b"", b"b" * (3 * PIECE_BYTES + 1), b"c" * PIECE_BYTES, b""]


async def blocks() -> AsyncGenerator[bytes, None]:
    for block in BLOCKS:
        yield block


@pytest.mark.parametrize("whole", [True, False])
async def test_an_answer_leaves_in_pieces_however_large_its_blocks(whole: bool) -> None:
    pieces = [piece async for piece in BudgetedBody(b"".join(BLOCKS) if whole else blocks(), None)]
    assert b"".join(pieces) == b"".join(BLOCKS)
    assert max(map(len, pieces)) == PIECE_BYTES


@pytest.mark.parametrize("whole", [True, False])
async def test_held_memory_is_freed_when_the_answer_was_sent_or_abandoned(whole: bool) -> None:
    budget = AnswerBudget(1 << 20)
    for is_read in (True, False):
        room = budget.room()
        assert room.has(INLINE_BYTES + 1)
        body = budgeted(bytes(INLINE_BYTES + 1) if whole else blocks(), room)
        assert not isinstance(body, bytes)
        assert budget.reserved_bytes == INLINE_BYTES + 1
        if is_read:
            await collect(body)
        await body.aclose()
        assert budget.reserved_bytes == 0


@pytest.mark.parametrize("fails", ["the handler", "the stream"])
async def test_an_answer_that_fails_after_its_reservation_holds_nothing(fails: str) -> None:
    budget = AnswerBudget(1000)

    async def stream() -> AsyncGenerator[bytes, None]:
        raise TopicNotFound("there is none")
        yield b""

    def handler(request: Request, answered: Answered) -> None:
        assert request.room is not None
        assert request.room.has(500)
        answered(TopicNotFound("there is none") if fails == "the handler" else Answer(200, stream()))

    def answer(call: Call, reply: PendingReply) -> None:
        request = Request({}, "", {})
        answer_request(handler, request, budget.room(), call, reply, only_looks=True, refused=lambda error: error)

    async with linked_callbacks(answer) as pair:
        with pytest.raises(TopicNotFound):
            await pair.link.call("request", None)
    assert budget.reserved_bytes == 0


@pytest.mark.parametrize("size", [0, FREE_BYTES, INLINE_BYTES, INLINE_BYTES + 1])
async def test_an_answer_given_after_its_caller_has_left_holds_nothing(size: int) -> None:
    budget, given = AnswerBudget(10 * INLINE_BYTES), []

    def handler(request: Request, answered: Answered) -> None:
        assert request.room is not None
        assert request.room.has(size)
        given.append(answered)

    def answer(call: Call, reply: PendingReply) -> None:
        request = Request({}, "", {})
        answer_request(handler, request, budget.room(), call, reply, only_looks=True, refused=lambda error: error)

    async with linked_callbacks(answer) as pair:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair.link.call, "request", None)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        given[0](Answer(200, bytes(size)))
        assert budget.reserved_bytes == 0
