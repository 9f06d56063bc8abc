"""Producers of an event loop, on asyncio and on trio, against the real daemon."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
import pytest

from plainsong import AsyncClient, Client
from plainsong.errors import Closed, DeadlineExceeded, NotSent, TransactionInProgress, TransactionTimedOut
from plainsong.protocol.errors import GenerationChanged, ProducerFenced
from tests.client.proxy import Proxy


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Any:
    """Runs a coroutine function on the one or the other."""

    def running(function: Any, *arguments: Any) -> Any:
        return anyio.run(function, *arguments, backend=request.param)

    return running


def payloads(client: Client, topic: str) -> list[bytes]:
    return [message.payload for message in client.read(topic)]


def test_the_course_of_a_producer_on_an_event_loop(run: Any, client: Client, topic: str, shared_url: str):
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
            assert (await far.producers(topic))["count"] == 1
            assert far.namespace in await far.namespaces.list()

    run(work)
    assert [int(payload) for payload in payloads(client, topic)] == list(range(306))


@pytest.mark.parametrize("mode", ["lose", "swallow"])
def test_answers_that_are_lost_are_found_out_on_an_event_loop(
    run: Any, client: Client, topic: str, shared_address: tuple[str, int], mode: Any
):
    async def work(url: str, proxy: Proxy) -> None:
        async with AsyncClient(url, request_timeout_s=0.5) as far, far.producer(topic, "p") as producer:
            for n in range(6):
                proxy.then = [mode] if n % 2 else []
                if n % 3:
                    assert (await (await producer.send(b"%d" % n))).sequence_id == n
                else:
                    await producer.publish_atomic("key", b"%d" % n)

    with Proxy(shared_address) as proxy:
        run(work, proxy.url, proxy)
        assert proxy.lost >= 3
    assert [int(payload) for payload in payloads(client, topic)] == list(range(6))


def test_a_deadline_of_ones_own_is_kept_behind_an_unanswered_request_on_an_event_loop(
    run: Any, client: Client, topic: str, shared_address: tuple[str, int]
):
    async def work(url: str, proxy: Proxy) -> None:
        async with AsyncClient(url, request_timeout_s=3) as far, far.producer(topic, "p") as producer:
            proxy.mode = "swallow"
            stuck = await producer.send(b"0")
            with pytest.raises(DeadlineExceeded):
                await producer.publish(b"1", deadline_s=0.1)
            proxy.mode = "pass"
            assert not stuck.done()
            assert (await stuck).sequence_id == 0

    with Proxy(shared_address) as proxy:
        run(work, proxy.url, proxy)
    assert payloads(client, topic) == [b"0"]


def test_the_end_of_a_session_on_an_event_loop(run: Any, client: Client, topic: str, shared_url: str):
    async def work() -> None:
        async with AsyncClient(shared_url) as far:
            async with far.producer(topic, "p") as old, far.producer(topic, "p") as new:
                await new.publish(b"new")
                with pytest.raises(ProducerFenced):
                    await old.publish(b"old")
                with pytest.raises(ProducerFenced):
                    await old.send(b"older")
            producer = far.producer(topic, "q")
            await producer.__aenter__()
            await far.delete_topic(topic)
            await far.create_topic(topic)
            await producer.send(b"history")
            with pytest.raises(NotSent):
                await producer.__aexit__(None, None, None)
            async with far.producer(topic, "r") as producer:
                await far.delete_topic(topic)
                await far.create_topic(topic)
                with pytest.raises(GenerationChanged):
                    await producer.publish(b"history")

    run(work)
    assert payloads(client, topic) == []


def test_in_a_block_of_an_event_loop_a_producer_takes_part(run: Any, client: Client, topic: str, shared_url: str):
    async def work() -> None:
        async with AsyncClient(shared_url) as far, far.producer(topic, "p") as producer:
            async with far.transaction():
                await producer.publish(b"committed")
            with suppress(KeyError):
                async with far.transaction():
                    await producer.publish(b"undone")
                    raise KeyError
            tx = producer.begin("key", timeout_s=0.01)
            tx.write(b"x")
            while tx._held.state == "open":  # noqa: ASYNC110 - nobody tells when a buffer is free
                await anyio.sleep(0.001)
            with pytest.raises(TransactionTimedOut):
                await tx.commit()

    run(work)
    assert [message.payload for message in client.read(topic, isolation="committed")] == [b"committed"]


def test_a_cancelled_block_tells_those_who_wait(run: Any, shared_address: tuple[str, int], topic: str):
    async def work(url: str, proxy: Proxy) -> None:
        async with AsyncClient(url) as far:
            with anyio.move_on_after(0.5) as scope:
                async with far.producer(topic, "p") as producer:
                    proxy.mode = "swallow"
                    sent = await producer.send(b"x")
                    await anyio.sleep_forever()
            assert scope.cancelled_caught
            assert sent.done()
            with pytest.raises(Exception, match="cancelled"):
                await sent

    with Proxy(shared_address) as proxy:
        run(work, proxy.url, proxy)
