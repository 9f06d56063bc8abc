"""What is true of the client on event loops alone, and a little of everything on asyncio and on trio alike."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

import anyio
import pytest

from plainsong import JSON, AsyncClient, Client
from plainsong.errors import BufferFull, ConnectionLost, DeadlineExceeded, MessageDropped
from plainsong.publisher_queue import ITEM_BYTES
from tests.client.proxy import Proxy
from tests.daemon.harness import eventually
from tests.patience import PATIENCE_S


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Makes of an asynchronous test two ordinary ones, one for each loop, with the same fixtures."""

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
    while not (await client.stats(topic))["parkedPolls"]:  # noqa: ASYNC110 - another process knows it
        await anyio.sleep(0.01)


@on_both_loops
async def test_publish_poll_and_read(shared_url: str, topic: str):
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
        await client.delete_topic(other)


@on_both_loops
async def test_what_becomes_of_a_message_can_be_awaited_by_many(shared_url: str, topic: str):
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
async def test_a_cancelled_block_gives_up_at_once(caplog: pytest.LogCaptureFixture):
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
async def test_lost_answers_are_unknown_and_deadlines_say_what_happened(shared_address: tuple[str, int], topic: str):
    with Proxy(shared_address) as proxy:
        async with AsyncClient(proxy.url) as client:
            proxy.then = ["lose"]
            with pytest.raises(ConnectionLost) as lost:
                await client.publish(topic, b"x")
            assert lost.value.outcome == "unknown"
        proxy.mode = "swallow"
        # Of an attempt that ended before it was under way the outcome would be known: there may be more than one.
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
    eventually("the daemon has freed what it held", lambda: not client.stats(topic)["parkedPolls"])
