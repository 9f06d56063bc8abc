"""Behaviour specific to the asynchronous client, and a sample of everything on both asyncio and trio."""

from __future__ import annotations

import asyncio
import gc
import inspect
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

from plainsong import JSON, AsyncClient, Client
from plainsong.errors import BufferFull, Closed, ConnectionLost, DeadlineExceeded, MessageDropped
from plainsong.publisher_queue import ITEM_BYTES
from tests.client.proxy import Proxy
from tests.daemon.harness import eventually
from tests.patience import PATIENCE_S


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Turn an asynchronous test into two synchronous ones, one for each loop, with the same fixtures."""

    def run(loop: str, **fixtures: object) -> None:
        async def main() -> None:
            await test(**fixtures)

        anyio.run(main, backend=loop)

    own = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = own.replace(parameters=[loop, *own.parameters.values()])  # type: ignore[attr-defined]
    run.__name__ = test.__name__
    return pytest.mark.parametrize("loop", ["asyncio", "trio"])(run)


async def is_parked(client: AsyncClient, topic: str) -> None:
    while not (await client.admin.stats(topic))["parkedPolls"]:  # noqa: ASYNC110 - the daemon sends no notification
        await anyio.sleep(0.01)


@on_both_loops
async def test_publish_poll_and_read_work(shared_url: str, topic: str):
    async with AsyncClient(shared_url) as client:
        receipt = await client.publish(topic, [{"n": n} for n in range(25)], serializer=JSON)
        page = await client.poll(topic, limit=10, serializer=JSON)
        assert [message.value["n"] for message in page] == list(range(10))
        rest = [
            message.value["n"] async for message in client.read(topic, page.last_id, serializer=JSON, page_messages=4)
        ]
        assert rest == list(range(10, 25))
        assert receipt.count == 25


@on_both_loops
async def test_a_publisher_keeps_the_order_of_each_topic(shared_url: str, topic: str):
    async with AsyncClient(shared_url) as client:
        other = (await client.create_topic(topic + "-other", if_not_exists=True)).name
        async with client.publisher(max_batch_messages=70) as publisher:
            sents = [await publisher.send(b"%d" % n, topic=name) for n in range(500) for name in (topic, other)]
            await publisher.flush()
            assert all(sent.done() for sent in sents)
        ids = [await sent for sent in sents]
        assert ids[::2] == [message.id async for message in client.read(topic)]
        read = [int(message.payload) async for message in client.read(other)]
        assert read[-500:] == list(range(500))
        await client.admin.delete_topic(other)


@on_both_loops
async def test_the_outcome_of_a_message_can_be_awaited_by_many(shared_url: str, topic: str):
    async with AsyncClient(shared_url) as client, client.publisher(topic, linger_ms=20) as publisher:
        sent = await publisher.send(b"x")
        found = []

        async def wait() -> None:
            found.append(await sent)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(wait)
        assert len(set(found)) == 1


@on_both_loops
async def test_a_full_buffer_waits_raises_or_drops(shared_url: str, topic: str):
    room = 2 * (ITEM_BYTES + 1)
    async with AsyncClient(shared_url) as client:
        async with client.publisher(topic, max_pending_bytes=room) as publisher:
            for _ in range(20):
                await publisher.send(b"x")
                assert publisher.counts.pending_bytes <= room
        assert publisher.counts.delivered == 20
        async with client.publisher(topic, max_pending_bytes=room, overflow="raise") as publisher:
            publisher.send_nowait(b"x"), publisher.send_nowait(b"x")
            with pytest.raises(BufferFull):
                publisher.send_nowait(b"x")
        dropped = []
        async with client.publisher(
            topic, max_pending_bytes=room, overflow="drop", on_drop=dropped.append
        ) as publisher:
            sents = [publisher.send_nowait(b"%d" % n) for n in range(3)]
            with pytest.raises(MessageDropped):
                await sents[2]
        assert [each.payload for each in dropped] == [b"2"]


@on_both_loops
async def test_a_cancelled_block_gives_up_its_messages_at_once(caplog: pytest.LogCaptureFixture):
    async with AsyncClient("http://127.0.0.1:1") as client:
        with anyio.CancelScope() as scope:
            async with client.publisher("t") as publisher:
                sent = await publisher.send(b"x")
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        with pytest.raises(MessageDropped):
            await sent


@on_both_loops
async def test_lost_answers_are_unknown_and_deadlines_report_the_outcome(shared_address: tuple[str, int], topic: str):
    with Proxy(shared_address) as proxy:
        async with AsyncClient(proxy.url) as client:
            proxy.then = ["lose"]
            with pytest.raises(ConnectionLost) as lost:
                await client.publish(topic, b"x")
            assert lost.value.outcome == "unknown"
        proxy.mode = "swallow"
        # On a slow machine an attempt may time out before its request is sent, and be retried: hence the long deadline.
        async with AsyncClient(proxy.url, request_timeout_s=1, deadline_s=PATIENCE_S) as client:
            with pytest.raises(DeadlineExceeded, match="no answer within 1 s") as late:
                await client.publish(topic, b"x")
            assert late.value.outcome == "unknown"
        async with AsyncClient(proxy.url, request_timeout_s=1, deadline_s=2) as client:
            with pytest.raises(DeadlineExceeded) as read:
                await client.poll(topic)
            assert read.value.outcome == "not-applied"
        proxy.mode = "pass"


@on_both_loops
async def test_several_topics_are_followed(shared_url: str, topic: str):
    async with AsyncClient(shared_url) as client:
        other = (await client.create_topic(topic + "-too", if_not_exists=True)).name
        found: list[str] = []

        async def publish_when_parked() -> None:
            for name in (topic, other):
                await is_parked(client, name)
                await client.publish(name, b"x")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish_when_parked)
            async with client.read([topic, other], "newest", follow=True, limit=2) as reader:
                found.extend([message.topic async for message in reader])
        assert found == [topic, other]


def test_a_reader_that_is_cancelled_leaves_the_client_usable(shared_url: str, client: Client, topic: str):
    async def main() -> None:
        async with AsyncClient(shared_url) as waiting:
            with anyio.move_on_after(0.1):
                async for _ in waiting.read(topic, follow=True):
                    raise AssertionError("there is nothing to read")
            assert topic in await waiting.topics()

    for loop in ("asyncio", "trio"):
        anyio.run(main, backend=loop)
    eventually("the daemon has freed what it held", lambda: not client.admin.stats(topic)["parkedPolls"])


# --- blocks that one task enters and another leaves ------------------------------------------------


async def in_a_task_of_its_own(work: Callable[[], Awaitable[Any]]) -> Any:
    """Run ``work`` in its own task, like fixtures and test methods, and return its result."""
    returned = []

    async def run() -> None:
        returned.append(await work())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
    return returned[0]


SENDERS = ["publisher", "producer", "stream"]


async def sent_by(sender: Any, payload: bytes) -> Any:
    return await (sender.send(payload) if hasattr(sender, "counts") else sender.publish(payload))


@pytest.mark.parametrize("kind", SENDERS)
@on_both_loops
async def test_one_task_enters_a_block_and_another_leaves_it(shared_url: str, topic: str, kind: str):
    client = AsyncClient(shared_url)
    await in_a_task_of_its_own(client.__aenter__)
    sender = await in_a_task_of_its_own(getattr(client, kind)(topic).__aenter__)
    sent = await in_a_task_of_its_own(partial(sent_by, sender, b"x"))
    await in_a_task_of_its_own(partial(sender.__aexit__, None, None, None))
    assert sent.done()
    assert [message.payload for message in await in_a_task_of_its_own(partial(client.poll, topic))] == [b"x"]
    await in_a_task_of_its_own(partial(client.__aexit__, None, None, None))


@pytest.mark.parametrize("kind", SENDERS)
@on_both_loops
async def test_blocks_are_left_in_the_order_in_which_they_were_entered(shared_url: str, topic: str, kind: str):
    async with AsyncClient(shared_url) as client:
        senders = [getattr(client, kind)(topic) for _ in range(2)]
        for sender in senders:
            await sender.__aenter__()
            await sent_by(sender, b"x")
        for sender in senders:
            await sender.__aexit__(None, None, None)
        assert len(await client.poll(topic)) == 2


@pytest.mark.parametrize("kind", SENDERS)
@on_both_loops
async def test_a_client_closed_before_its_senders_sends_their_messages(shared_url: str, topic: str, kind: str):
    options = {} if kind == "stream" else {"linger_ms": 60_000}
    client = AsyncClient(shared_url)
    sender = getattr(client, kind)(topic, **options)
    never_entered = getattr(client, kind)(topic)
    await client.__aenter__()
    await sender.__aenter__()
    sent = await sent_by(sender, b"x")
    await client.__aexit__(None, None, None)
    assert sent.done()
    with pytest.raises(Closed):
        await sent_by(sender, b"y")
    await sender.__aexit__(None, None, None)
    del never_entered
    async with AsyncClient(shared_url) as client:
        assert [message.payload for message in await client.poll(topic)] == [b"x"]


@pytest.mark.parametrize("kind", SENDERS)
def test_a_test_case_of_unittest_enters_a_block_before_its_test(shared_url: str, topic: str, kind: str):
    class Case(unittest.IsolatedAsyncioTestCase):
        async def asyncSetUp(self) -> None:
            client = await self.enterAsyncContext(AsyncClient(shared_url))
            self.sender = await self.enterAsyncContext(getattr(client, kind)(topic))

        async def test_send(self) -> None:
            await (await sent_by(self.sender, b"x"))

    result = unittest.TestResult()
    Case("test_send").run(result)
    assert (result.testsRun, result.errors, result.failures) == (1, [], [])


@pytest.mark.parametrize("kind", SENDERS)
def test_an_abandoned_generator_with_a_block_does_not_cancel_its_task(shared_url: str, topic: str, kind: str):
    async def main() -> None:
        async with AsyncClient(shared_url) as client:
            left = anyio.Event()

            async def entered() -> AsyncIterator[Any]:
                try:
                    async with getattr(client, kind)(topic) as sender:
                        yield sender
                finally:
                    left.set()

            async for sender in entered():
                await (await sent_by(sender, b"x"))
                break
            gc.collect()
            await left.wait()
            assert len(await client.poll(topic)) == 1

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore")  # each loop ends while connections are open
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_client_serves_one_event_loop_after_another(shared_url: str, topic: str, loop: str):
    client = AsyncClient(shared_url)

    async def publish() -> None:
        await client.publish(topic, b"x")

    for _ in range(4):
        anyio.run(publish, backend=loop)

    async def count() -> int:
        async with client:
            return len(await client.poll(topic))

    assert anyio.run(count, backend=loop) == 4
    gc.collect()
