"""Sending from signal handlers and finalizers, which can interrupt a thread anywhere, even inside the client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from plainsong import Client
from plainsong._sync import _backend
from plainsong.errors import BufferFull, Closed
from plainsong.producer_queue import ProducerQueue
from plainsong.publisher_queue import PublisherQueue
from plainsong.stream_queue import StreamQueue
from tests.patience import PATIENCE_S

Handler = Callable[[], object]


@pytest.fixture
def client(shared_url: str) -> Iterator[Any]:
    """A client whose senders are never closed, because after a failure a thread may hold their locks forever."""
    client = Client(shared_url, deadline_s=PATIENCE_S)
    yield client
    client._channel.pool.close()


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str, Handler], threading.Event]:
    """Run a handler inside the next call of a method that is called with a sender's lock held."""

    def at(kind: type, name: str, handler: Handler) -> threading.Event:
        original, interrupted = getattr(kind, name), threading.Event()

        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            if not interrupted.is_set():
                interrupted.set()
                handler()
            return original(self, *arguments, **options)

        monkeypatch.setattr(kind, name, method)
        return interrupted

    return at


def in_time(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns, or raise what it raises; TimeoutError if it hangs."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the test raises it
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(PATIENCE_S)


PLACES = {
    "publisher": (PublisherQueue, ("put", "wants_sender", "take", "settled")),
    "producer": (ProducerQueue, ("put", "wants_sender", "work", "settled")),
    "stream": (StreamQueue, ("put_single", "take", "take_answers")),
}


@pytest.mark.parametrize(
    ("kind", "queue", "place"), [(kind, queue, each) for kind, (queue, places) in PLACES.items() for each in places]
)
def test_a_message_sent_by_a_handler_that_interrupts_a_sender_anywhere_is_sent(
    client: Any, topic: str, interrupt, kind: str, queue: type, place: str
):
    def work() -> None:
        sender = getattr(client, kind)(topic)
        send = sender.publish if kind == "stream" else sender.send
        sents = []
        interrupted = interrupt(queue, place, lambda: sents.append(send(b"from the handler")))
        sents += [send(b"%d" % n) for n in range(10)]
        assert interrupted.wait(PATIENCE_S)
        sents.append(send(b"last"))
        sender.flush(PATIENCE_S)
        for sent in list(sents):
            assert sent.result(PATIENCE_S)
        sender.close(PATIENCE_S)

    in_time(work)
    payloads = [message.payload for message in client.read(topic)]
    assert sorted(payloads) == sorted([b"from the handler", b"last", *(b"%d" % n for n in range(10))])
    assert [each for each in payloads if each.isdigit()] == [b"%d" % n for n in range(10)]


@pytest.mark.parametrize("kind", ["publisher", "producer", "stream"])
def test_messages_after_the_one_of_a_handler_are_stored_after_it(client: Any, topic: str, interrupt, kind: str):
    queue, places = PLACES[kind]

    def work() -> None:
        options = {} if kind == "stream" else {"linger_ms": 60_000}
        sender = getattr(client, kind)(topic, **options)
        send = sender.publish if kind == "stream" else sender.send
        send(b"before")
        interrupt(queue, places[0], lambda: [send(b"handler 1"), send(b"handler 2")])
        send(b"interrupted")
        send(b"after")
        sender.close(PATIENCE_S)

    in_time(work)
    payloads = [message.payload for message in client.read(topic)]
    assert payloads == [b"before", b"interrupted", b"handler 1", b"handler 2", b"after"]


def test_a_finalizer_in_a_thread_that_has_just_been_started_sends(
    client: Any, topic: str, monkeypatch: pytest.MonkeyPatch
):
    """The garbage collector runs the finalizer before the thread's own code, while the caller is still in ``send``."""
    sent: Future[Any] = Future()
    publisher = client.publisher(topic)
    begin = _backend._Worker._bootstrap_inner
    turn = threading.Semaphore(1)

    def send_and_begin(self: Any) -> None:
        if turn.acquire(blocking=False):  # only the first thread: the message may start another thread
            try:
                sent.set_result(publisher.send(b"from the finalizer"))
            except BaseException as error:  # noqa: BLE001 - the test raises it
                sent.set_exception(error)
        begin(self)

    monkeypatch.setattr(_backend._Worker, "_bootstrap_inner", send_and_begin)
    in_time(lambda: publisher.send(b"first"))
    assert sent.result(PATIENCE_S).result(PATIENCE_S)
    in_time(lambda: publisher.close(PATIENCE_S))
    assert {message.payload for message in client.read(topic)} == {b"first", b"from the finalizer"}


def test_a_handler_is_refused_what_would_wait_for_the_thread_that_it_interrupts(client: Any, topic: str, interrupt):
    refused = []

    def publish() -> None:
        with pytest.raises(BufferFull, match="a finalizer has interrupted") as error:
            producer.publish(b"from the handler")
        refused.append(error.value.outcome)

    producer = client.producer(topic, "p")
    interrupt(ProducerQueue, "put", publish)
    in_time(lambda: producer.send(b"first").result(PATIENCE_S))
    assert refused == ["not-applied"]
    producer.close(PATIENCE_S)


def test_a_handler_is_refused_a_message_without_room_and_one_after_the_close(client: Any, topic: str, interrupt):
    refused = []

    def send() -> None:
        for size in (300, 1 << 20):
            try:
                publisher.send(bytes(size))
            except (BufferFull, Closed) as error:
                refused.append(type(error))

    publisher = client.publisher(topic, max_pending_bytes=2000, linger_ms=60_000)
    interrupt(PublisherQueue, "put", send)
    in_time(lambda: publisher.send(b"first"))
    assert refused == [BufferFull]
    in_time(lambda: publisher.close(PATIENCE_S))
    assert [len(message.payload) for message in client.read(topic)] == [5, 300]
    interrupt(PublisherQueue, "clear", send)
    publisher = client.publisher(topic)
    in_time(lambda: publisher.close(PATIENCE_S))
    assert refused == [BufferFull, Closed, Closed]
