"""Producers on an event loop, asyncio and trio, against the real daemon."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from plainsong import AsyncClient, Client
from plainsong.errors import Closed, TransactionInProgress
from tests.client.proxy import Proxy


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Any:
    """Run a coroutine function on one of the two loops."""

    def running(function: Any, *arguments: Any) -> Any:
        return anyio.run(function, *arguments, backend=request.param)

    return running


def payloads(client: Client, topic: str) -> list[bytes]:
    return [message.payload for message in client.read(topic)]


def test_a_producer_works_on_an_event_loop(run: Any, client: Client, topic: str, shared_url: str):
    async def work() -> None:
        async with AsyncClient(shared_url) as far:
            async with far.producer(topic, "p") as producer:
                sents = [await producer.send(b"%d" % n) for n in range(300)]
                assert (await producer.publish([b"300", b"301"], routing_key="k")).last_sequence_id == 301
                receipts = [await sent for sent in sents]
                assert [receipt.sequence_id for receipt in receipts] == list(range(300))
                async with producer.begin("key") as tx:
                    tx.write(b"302")
                    with pytest.raises(TransactionInProgress):
                        producer.begin("key")
                    first = await tx.commit()
                    assert await tx.commit() == first
                async with producer.begin("key") as left:
                    left.write(b"nowhere")
                assert left.state == "aborted"
                await producer.publish_atomic("key", [b"303", b"304"])
                assert producer.last_sequence_id == 304
            with pytest.raises(Closed):
                await producer.send(b"late")
            async with far.producer(topic, "p", initial_sequence_id=304) as again:
                assert [(await (await again.send(b"%d" % n))).duplicate for n in (304, 305)] == [True, False]
            assert (await far.admin.producers(topic))["count"] == 1
            assert far.namespace in await far.admin.namespaces.list()

    run(work)
    assert [int(payload) for payload in payloads(client, topic)] == list(range(306))


def test_a_cancelled_block_notifies_its_waiters(run: Any, shared_address: tuple[str, int], topic: str):
    async def work(url: str, proxy: Proxy) -> None:
        async with AsyncClient(url) as far:
            with anyio.CancelScope() as scope:
                async with far.producer(topic, "p") as producer:
                    proxy.mode = "swallow"
                    sent = await producer.send(b"x")
                    while not proxy.lost:  # noqa: ASYNC110 - a thread sets it
                        await anyio.sleep(0.01)
                    scope.cancel()
                    await anyio.sleep_forever()
            assert scope.cancelled_caught
            assert sent.done()
            with pytest.raises(Exception, match="cancelled"):
                await sent

    with Proxy(shared_address) as proxy:
        run(work, proxy.url, proxy)
