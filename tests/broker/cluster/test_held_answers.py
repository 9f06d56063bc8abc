"""Answers on a link are sent in pieces, whatever they consist of, and are counted until they are sent."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from broker.http.budgets import AnswerBudget
from broker.http.messages import Answer
from broker.link.http_codec import BudgetedBody, budgeted, collect, encode_admitted
from broker.link.wire import INLINE_BYTES, PIECE_BYTES
from plainsong.protocol.errors import TopicNotFound

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


async def test_an_answer_that_fails_after_its_reservation_holds_nothing() -> None:
    budget = AnswerBudget(1000)
    room = budget.room()

    async def fails() -> Answer:
        await room.take(500, 500)
        raise TopicNotFound("there is none")

    with pytest.raises(TopicNotFound):
        await encode_admitted(fails(), room, only_looks=True)
    assert budget.reserved_bytes == 0
