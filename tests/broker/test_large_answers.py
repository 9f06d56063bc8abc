"""Large answers are rendered one at a time, a piece in each turn of the event loop; small ones do not wait for them."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest
import trio

from broker.api.answers import JOINED_BYTES, LARGE_BYTES, LOOP_BYTES, body_of, in_steps
from broker.http.budgets import AnswerBudget
from broker.http.messages import Answer, BodyPieces
from broker.http.wire import GzippedStream, admitted, compress
from tests.broker.broker_in_process import in_process

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
MEDIUM = LARGE_BYTES
LARGE = LARGE_BYTES + 1
PIECES = 5
ASKERS = 100


class TurnCounter(trio.abc.Instrument):
    """Counts the pieces that are rendered in each turn of the event loop."""

    def __init__(self) -> None:
        self.made = 0
        self.most = 0
        self._before = 0

    def before_io_wait(self, timeout: float) -> None:
        self.most = max(self.most, self.made - self._before)
        self._before = self.made

    def pieces(self, count: int = PIECES) -> Iterator[bytes]:
        for _ in range(count):
            self.made += 1
            yield b"x"


@pytest.mark.parametrize(("sizes", "most"), [([LARGE], 1), ([MEDIUM], 1), ([LARGE, MEDIUM], 2)])
async def test_a_turn_makes_one_piece_of_each_size_however_many_requests_there_are(sizes: list[int], most: int) -> None:
    turns = TurnCounter()
    trio.lowlevel.add_instrument(turns)
    async with trio.open_nursery() as nursery:
        for _ in range(ASKERS):
            for size in sizes:
                nursery.start_soon(in_steps, size, turns.pieces())
    trio.lowlevel.remove_instrument(turns)
    assert turns.made == ASKERS * len(sizes) * PIECES
    assert turns.most == most


async def two_turns() -> None:
    """Let every started task run: trio runs the tasks of one turn in no particular order."""
    await trio.lowlevel.checkpoint()
    await trio.lowlevel.checkpoint()


async def test_large_answers_are_made_in_the_order_of_their_requests() -> None:
    order: list[int] = []

    def pieces(number: int) -> Iterator[bytes]:
        for _ in range(PIECES):
            order.append(number)
            yield b"x"

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(in_steps, LARGE, pieces(number))
            await two_turns()
    assert order == [number for number in range(4) for _ in range(PIECES)]


async def test_a_small_answer_is_made_at_once_while_large_ones_wait() -> None:
    turns = TurnCounter()
    async with trio.open_nursery() as nursery:
        for _ in range(ASKERS):
            nursery.start_soon(in_steps, LARGE, turns.pieces(10_000))
        await two_turns()
        before = turns.made
        assert await in_steps(LOOP_BYTES, iter([b"small"])) == [b"small"]
        assert turns.made == before  # in the same turn
        nursery.cancel_scope.cancel()


async def test_an_answer_of_a_few_mib_does_not_wait_for_larger_ones() -> None:
    turns = TurnCounter()
    async with trio.open_nursery() as nursery:
        for _ in range(ASKERS):
            nursery.start_soon(in_steps, LARGE, turns.pieces(10_000))
        await two_turns()
        assert len(await in_steps(MEDIUM, TurnCounter().pieces())) == PIECES
        assert turns.made <= 2 * PIECES + 10  # one piece of a large answer in each turn, and a few at the start
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("when", ["while it waits", "while it is made"])
async def test_an_answer_whose_reader_leaves_makes_room_for_the_next(when: str) -> None:
    turns = TurnCounter()
    leaves, made = trio.CancelScope(), []

    async def ask_and_leave() -> None:
        with leaves:
            await in_steps(LARGE, turns.pieces(10_000))

    async def ask() -> None:
        made.extend(await in_steps(LARGE, turns.pieces()))

    async with trio.open_nursery() as nursery:
        if when == "while it waits":
            nursery.start_soon(in_steps, LARGE, turns.pieces())
            await two_turns()
        nursery.start_soon(ask_and_leave)
        await two_turns()
        nursery.start_soon(ask)
        await two_turns()
        leaves.cancel()
    assert len(made) == PIECES
    assert turns.made < 10_000


async def test_a_large_body_is_freed_while_it_is_sent_and_a_small_one_is_joined() -> None:
    assert body_of([b"a", b"b"]) == b"ab"
    body = body_of([bytes(JOINED_BYTES), b"b"])
    assert isinstance(body, BodyPieces)
    assert (len(body), [len(piece) async for piece in body]) == (JOINED_BYTES + 1, [JOINED_BYTES, 1])
    assert [piece async for piece in body] == []
    closed = BodyPieces([b"x"])
    await closed.aclose()
    assert [piece async for piece in closed] == []


async def test_a_large_body_holds_its_reservation_and_is_refused_without_one() -> None:
    budget = AnswerBudget(4 * MIB, patience_s=0)
    room = budget.room()
    assert room.has(2 * MIB)
    answer = Answer(200, BodyPieces([bytes(MIB)]), length=MIB)
    assert await admitted(answer, room, only_looks=True) is answer
    assert budget.reserved_bytes == MIB
    refused = await admitted(Answer(200, BodyPieces([bytes(8 * MIB)]), length=8 * MIB), budget.room(), only_looks=True)
    assert refused.status == 503


async def test_a_large_body_is_compressed_as_it_is_sent() -> None:
    answer = Answer(200, BodyPieces([b"x" * MIB, b"y"]), length=MIB + 1)
    await compress(answer, "gzip")
    assert isinstance(answer.body, GzippedStream)
    assert answer.length is None
    assert gzip.decompress(b"".join([piece async for piece in answer.body])) == b"x" * MIB + b"y"


@pytest.mark.parametrize("listener", ["hot", "application"])
@pytest.mark.parametrize("accept", ["application/json", "application/vnd.plainsong.frames"])
async def test_a_large_page_is_complete_at_either_listener(listener: str, accept: str) -> None:
    path = "/v1/namespaces/ns/topics/t/poll"
    payloads = ["\N{EURO SIGN}" * (MIB // 3), "short", "z" * MIB] * 3
    async with in_process(listener=listener) as daemon:
        await daemon.create()
        for payload in payloads:
            await daemon.publish(payload)
        answers = [
            await daemon.call("POST", path, json={}, headers={"Accept": accept, "Accept-Encoding": coding})
            for coding in ("identity", "gzip")
        ]
    plain, packed = answers
    assert plain.content == packed.content
    assert int(plain.headers["content-length"]) == len(plain.content)
    assert packed.headers["content-encoding"] == "gzip"
    if accept == "application/json":
        assert [message["payload"] for message in json.loads(plain.content)] == payloads
