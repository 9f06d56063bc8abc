"""A reader that follows a topic can be stopped, and can return one message, with a time-out."""

from __future__ import annotations

import signal
import threading

import anyio
import pytest

import plainsong
from plainsong import AsyncClient, FilePosition
from plainsong.protocol.errors import InvalidParameter
from tests.client.client_under_test import Client, only_threads
from tests.daemon.harness import eventually
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("both_clients")


@pytest.fixture
def shared_url(url_of_long_waits: str) -> str:
    return url_of_long_waits


def test_get_returns_messages_one_by_one_and_none_after_the_timeout(client: Client, topic: str):
    client.publish(topic, [b"1", b"2"])
    reader = client.read(topic, follow=True)
    assert [reader.get(timeout_s=PATIENCE_S).payload for _ in range(2)] == [b"1", b"2"]
    assert reader.get(timeout_s=0.05) is None
    assert reader.get(timeout_s=0) is None
    assert not reader.has_ended
    client.publish(topic, [b"3", b"4"])
    assert reader.get(timeout_s=PATIENCE_S).payload == b"3"
    assert next(iter(reader)).payload == b"4", "a loop continues where get stopped"
    reader.close()


def test_get_returns_none_at_the_end_of_a_reader_that_does_not_follow(client: Client, topic: str):
    client.publish(topic, b"1")
    reader = client.read(topic)
    assert reader.get().payload == b"1"
    assert reader.get() is None
    assert reader.has_ended


def test_get_keeps_the_position_of_the_messages_that_were_finished(client: Client, topic: str, tmp_path):
    client.publish(topic, [b"1", b"2", b"3"])
    with client.read(topic, follow=True, position=FilePosition(tmp_path / "position")) as reader:
        assert [reader.get(timeout_s=PATIENCE_S).payload for _ in range(2)] == [b"1", b"2"]
    with client.read(topic, follow=True, position=FilePosition(tmp_path / "position")) as reader:
        assert reader.get(timeout_s=PATIENCE_S).payload == b"3"
        assert reader.get(timeout_s=0) is None


def test_an_idle_reader_ends_after_its_time_out(client: Client, topic: str):
    client.publish(topic, [b"1", b"2"])
    reader = client.read([topic, topic + "*"], follow=True, idle_timeout_s=0.1)
    assert [message.payload for message in reader] == [b"1", b"2"]
    assert reader.get(timeout_s=PATIENCE_S) is None
    for wrong in (0, -1):
        with pytest.raises(InvalidParameter, match="idle_timeout_s"):
            client.read(topic, idle_timeout_s=wrong)


@pytest.mark.parametrize("topics", ["one", "several"])
def test_a_waiting_reader_is_stopped_from_another_thread_and_its_position_is_saved(shared_url, topic, topics, tmp_path):
    with plainsong.Client(shared_url) as client:
        client.publish(topic, [b"1", b"2"])
        position = FilePosition(tmp_path / "position")
        reader = client.read(topic if topics == "one" else [topic, topic + "*"], follow=True, position=position)
        seen = []
        waiting = threading.Event()

        def read() -> None:
            for message in reader:
                seen.append(message.payload)
                if len(seen) == 2:
                    waiting.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert waiting.wait(PATIENCE_S)
        reader.stop()
        reader.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert seen == [b"1", b"2"]
        assert list(client.read(topic, position=FilePosition(tmp_path / "position"))) == []
        assert client.publish(topic, b"3").count == 1, "the client continues"


def test_a_stop_ends_the_loop_after_the_message_at_hand(client: Client, topic: str):
    client.publish(topic, [b"%d" % number for number in range(100)])
    reader = client.read(topic, follow=True)
    seen = []
    for message in reader:
        seen.append(message.payload)
        if len(seen) == 3:
            reader.stop()
    assert seen == [b"0", b"1", b"2"]


def test_a_signal_handler_may_stop_a_reader(shared_url, topic):
    with plainsong.Client(shared_url) as client:
        reader = client.read(topic, follow=True)
        before = signal.signal(signal.SIGALRM, lambda *_: reader.stop())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            assert list(reader) == []
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def test_another_task_stops_a_reader_of_the_asynchronous_client(shared_url, topic):
    async def main() -> list[bytes]:
        async with AsyncClient(shared_url) as client:
            await client.publish(topic, b"1")
            reader = client.read(topic, follow=True)
            seen = []
            waiting = anyio.Event()

            async def read() -> None:
                async for message in reader:
                    seen.append(message.payload)
                    waiting.set()

            with anyio.fail_after(PATIENCE_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(read)
                    await waiting.wait()
                    reader.stop()
            return seen

    assert anyio.run(main) == [b"1"]


def test_a_reader_that_another_thread_closes_ends_its_loop_and_saves(client, topic, tmp_path):
    only_threads("a task that closes a reader is not within its loop")
    client.publish(topic, [b"a", b"b"])
    position = FilePosition(tmp_path / "position")
    reader = client.read(topic, follow=True, position=position)
    found, waits = [], threading.Event()

    def read() -> None:
        for message in reader:
            found.append(message.payload)
            if len(found) == 2:
                waits.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert waits.wait(PATIENCE_S)
    eventually("it waits for more", lambda: client.admin.stats(topic)["parkedPolls"] == 1)
    reader.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert list(client.read(topic, position=position)) == []
