"""Transactions of the asynchronous client: each test runs on asyncio and trio, against the real daemon."""

# ruff: noqa: PT012 - what is tested is a block

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from test_async import on_both_loops
from test_transactions import Rows

from plainsong import AsyncClient, Client, FilePosition
from plainsong.errors import NoTransaction
from tests.client.proxy import Proxy


class AsyncRows:
    """The rows of ``test_transactions``, awaited; ``pause`` is awaited while they are made durable."""

    def __init__(self, changes: list[bytes] | None = None, pause: Any = anyio.lowlevel.checkpoint) -> None:
        self.rows = Rows(changes)
        self.name = "rows"
        self.pause = pause

    async def start_tx(self, transaction: Any) -> None:
        self.rows.start_tx(transaction)

    async def update_tx(self, transaction: Any) -> None:
        self.rows.update_tx(transaction)

    async def tx_changes(self) -> list[bytes]:
        return self.rows.tx_changes()

    async def commit_tx(self) -> bool:
        await self.pause()
        return self.rows.commit_tx()

    async def post_tx_commit(self) -> None:
        self.rows.post_tx_commit()

    async def rollback_tx(self) -> bool:
        return self.rows.rollback_tx()


async def committed(client: AsyncClient, topic: str) -> list[bytes]:
    return [message.payload async for message in client.read(topic, isolation="committed", direct=True)]


@on_both_loops
async def test_a_topic_is_read_and_another_written_together_with_the_position(
    shared_url: str, topic: str, tmp_path: Path
):
    position = FilePosition(tmp_path / "position")
    async with AsyncClient(shared_url) as client:
        out = f"{topic}-{tmp_path.name}"
        await client.create_topic(out)
        await client.publish(topic, [b"1", b"2", b"3"])
        with pytest.raises(KeyError):
            async with client.transaction():
                async for message in client.read(topic, position=position):
                    await client.publish(out, message.payload)
                raise KeyError
        async with client.transaction() as tx, tx.read(topic, position=position, limit=2) as reader:
            async for message in reader:
                await client.publish(out, message.payload)
            assert not reader.is_time_up
            assert not reader.held
        assert await committed(client, out) == [b"1", b"2"]
        assert [message.payload async for message in client.read(topic, position=position)] == [b"3"]


@on_both_loops
async def test_tasks_started_inside_take_part_and_are_refused_when_it_has_ended(shared_url: str, topic: str):
    async with AsyncClient(shared_url) as client:
        ended = anyio.Event()
        refused = []

        async def outlives() -> None:
            await ended.wait()
            with pytest.raises(NoTransaction, match="committed"):
                await client.publish(topic, b"too late")
            refused.append(True)

        async def publish(who: int) -> None:
            for n in range(100):
                await client.publish(topic, b"%d:%d" % (who, n))

        async with anyio.create_task_group() as tasks:
            async with client.transaction(buffer_messages=10) as tx:
                async with anyio.create_task_group() as inside:
                    for who in range(4):
                        inside.start_soon(publish, who)
                tasks.start_soon(outlives)
                assert tx._messages.waiting_bytes < 10_000
            ended.set()
        assert refused
        found = [payload.split(b":") for payload in await committed(client, topic)]
        for who in range(4):
            assert [int(n) for each, n in found if int(each) == who] == list(range(100))


@on_both_loops
async def test_a_task_cancelled_in_the_block_rolls_it_back(shared_url: str, topic: str):
    async with AsyncClient(shared_url) as client:
        rows = AsyncRows()
        with anyio.CancelScope() as scope:
            async with client.transaction([rows], buffer_messages=1) as tx:
                await client.publish(topic, [b"stored", b"stored"])
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        assert (tx.state, rows.rows.calls) == ("aborted", ["start", "rollback"])
        assert await committed(client, topic) == []


@on_both_loops
async def test_a_task_cancelled_while_participants_persist_rolls_it_back(shared_url: str, topic: str):
    async with AsyncClient(shared_url) as client:
        with anyio.CancelScope() as scope:

            async def cancel() -> None:
                scope.cancel()
                await anyio.lowlevel.checkpoint()

            async with client.transaction([AsyncRows(pause=cancel)]) as tx:
                await client.publish(topic, b"m")
        assert tx.state == "aborted"
        assert await committed(client, topic) == []


@on_both_loops
async def test_a_task_cancelled_in_the_middle_of_the_commit_completes_it(
    shared_address: tuple[str, int], client: Client, topic: str
):
    with Proxy(shared_address) as proxy:
        async with AsyncClient(proxy.url, deadline_s=10, request_timeout_s=5) as through:
            rows = AsyncRows()
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:

                    async def cancel_when_swallowed() -> None:
                        while not proxy.lost:  # noqa: ASYNC110 - a thread sets it
                            await anyio.sleep(0.01)
                        scope.cancel()

                    tasks.start_soon(cancel_when_swallowed)
                    async with through.transaction([rows]) as tx:
                        await through.publish(topic, b"m")
                        proxy.after = {b"/commit": "swallow"}
            assert scope.cancelled_caught
            assert tx.state == "committed"
            assert rows.rows.calls == ["start", "commit", "post"]
    assert [message.payload for message in client.read(topic, isolation="committed")] == [b"m"]


async def state_of(client: AsyncClient, tx: Any) -> str:
    return (await client.transactions.get(tx.transaction)).state
