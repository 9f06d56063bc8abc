"""Clients and more than one process: kills, forks, and programs that end without closing anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from plainsong import Client, FilePosition
from plainsong.errors import BufferFull, ConnectFailed, MessageDropped
from plainsong.protocol.errors import PlainsongError
from tests.client.proxy import Proxy
from tests.daemon.harness import eventually
from tests.patience import PATIENCE_S


def program(text: str, *arguments: str) -> subprocess.Popen[str]:
    """Run a Python program of a few lines."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def result_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


READS_AND_NOTES = """
    import sys
    from plainsong import Client, FilePosition, ServerPosition
    url, topic, kind, directory, done = sys.argv[1:]
    position = FilePosition(directory + "/position") if kind == "file" else ServerPosition("killed")
    with Client(url) as client, open(done, "a", buffering=1) as notes:
        for message in client.read(topic, follow=True, position=position, save_every=7):
            notes.write(message.payload.decode() + "\\n")
"""


@pytest.mark.parametrize("kind", ["file", "server"])
def test_a_reader_that_is_killed_again_and_again_skips_nothing(
    client: Client, topic: str, shared_url: str, tmp_path: Path, kind: str
):
    notes = tmp_path / "done"
    notes.touch()
    count = 0
    for _ in range(3):
        client.publish(topic, [b"%d" % n for n in range(count, count + 100)])
        before = len(notes.read_text().splitlines())
        process = program(READS_AND_NOTES, shared_url, topic, kind, str(tmp_path), str(notes))
        eventually("it has read a part", lambda before=before: len(notes.read_text().splitlines()) > before + 20)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)
        count += 100
    process = program(READS_AND_NOTES, shared_url, topic, kind, str(tmp_path), str(notes))
    eventually("it has read all", lambda: str(count - 1) in notes.read_text().splitlines())
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    done = [int(line) for line in notes.read_text().splitlines()]
    assert list(dict.fromkeys(done)) == list(range(count)), "nothing skipped, and what comes again comes in order"


def test_a_program_that_ends_without_closing_sends_its_messages(client: Client, topic: str, shared_url: str):
    text = """
        import sys
        from plainsong import Client
        publisher = Client(sys.argv[1]).publisher(sys.argv[2], linger_ms=60_000)
        for n in range(1000):
            publisher.send(b"%d" % n)
    """
    assert result_of(program(text, shared_url, topic)) == (0, "", "")
    assert [int(message.payload) for message in client.read(topic)] == list(range(1000))


def test_a_program_that_ends_without_a_daemon_reports_unsent_messages_and_ends_in_time():
    text = """
        from plainsong import Client
        publisher = Client("http://127.0.0.1:1").publisher("t", exit_timeout_s=2)
        for n in range(5):
            publisher.send(b"x")
    """
    code, _, err = result_of(program(text))
    assert code == 0
    assert "5 messages not sent: " in err
    assert "no daemon answers at http://127.0.0.1:1: " in err, "whether its last attempt was over or not"


def test_a_failing_program_still_sends_its_messages(client: Client, topic: str, shared_url: str):
    text = """
        import sys
        from plainsong import Client
        with Client(sys.argv[1]) as client, client.publisher(sys.argv[2]) as publisher:
            publisher.send(b"last words")
            raise SystemExit("on purpose")
    """
    code, _, err = result_of(program(text, shared_url, topic))
    assert (code, err) == (1, "on purpose\n")
    assert [message.payload for message in client.read(topic)] == [b"last words"]


def in_a_child(work) -> int:
    """Fork, run ``work`` in the child, and wait; return 0 on success."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing of the test may continue in the child
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_client_can_be_used_by_parent_and_child_after_a_fork(client: Client, topic: str):
    client.publish(topic, b"before")

    def child() -> None:
        for n in range(20):
            client.publish(topic, b"child %d" % n)
        assert len(client.poll(topic)) >= 21

    assert in_a_child(child) == 0
    for n in range(20):
        client.publish(topic, b"parent %d" % n)
    assert len(client.poll(topic)) == 41


def test_a_publisher_starts_empty_in_a_child_and_the_parent_keeps_its_messages(client: Client, topic: str):
    with client.publisher(topic, linger_ms=60_000) as publisher:
        waiting = publisher.send(b"parent's")

        def child() -> None:
            assert publisher.counts.pending == 0
            error = waiting.exception(0)
            assert isinstance(error, MessageDropped), "the parent will send it"
            sent = publisher.send(b"child's")
            publisher.close()
            assert sent.result(0)

        assert in_a_child(child) == 0
        assert not waiting.done()
    assert waiting.result(0)
    assert sorted(message.payload for message in client.read(topic)) == [b"child's", b"parent's"]


def test_messages_in_progress_at_a_fork_are_completed_in_the_child_too(topic: str, shared_address: tuple[str, int]):
    with Proxy(shared_address) as proxy, Client(proxy.url, request_timeout_s=20) as through:
        proxy.mode = "swallow"
        publisher = through.publisher(topic)
        sent = publisher.send(b"x")
        eventually("the answer is swallowed", lambda: proxy.lost)

        def child() -> None:
            assert isinstance(sent.exception(1), MessageDropped)
            os._exit(0)

        assert in_a_child(child) == 0
        assert not sent.done()
        proxy.close_all()
        assert sent.exception(PATIENCE_S).outcome == "unknown"
        publisher.close()


def test_a_fork_in_the_middle_of_sending_disturbs_neither(client: Client, topic: str):
    with client.publisher(topic) as publisher:
        for n in range(2000):
            publisher.send(b"p%d" % n)
            if n % 500 == 250:

                def child(n: int = n) -> None:
                    with publisher:
                        publisher.send(b"c%d" % n)

                assert in_a_child(child) == 0
    found = [message.payload for message in client.read(topic)]
    assert [payload for payload in found if payload.startswith(b"p")] == [b"p%d" % n for n in range(2000)]
    assert [payload for payload in found if payload.startswith(b"c")] == [b"c%d" % n for n in (250, 750, 1250, 1750)]


def test_importing_the_client_loads_nothing_of_the_daemon():
    text = """
        import sys, plainsong
        plainsong.Client("http://127.0.0.1:1")
        print([name for name in ("asyncio", "quart", "plyvel", "broker") if name in sys.modules])
    """
    assert result_of(program(text)) == (0, "[]\n", "")


def test_a_position_file_is_never_half_written(tmp_path: Path, client: Client, topic: str, shared_url: str):
    client.publish(topic, [b"%d" % n for n in range(2000)])
    text = """
        import sys
        from plainsong import Client, FilePosition
        with Client(sys.argv[1]) as client:
            for message in client.read(sys.argv[2], position=FilePosition(sys.argv[3]), save_every=1):
                pass
    """
    file = tmp_path / "position"
    for _ in range(3):
        process = program(text, shared_url, topic, str(file))
        eventually("it has begun", file.exists)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)
        try:
            next(client.read(topic, position=FilePosition(file)), None)
        except PlainsongError as error:
            pytest.fail(str(error))


# --- a system that refuses threads -----------------------------------------------------------------

#: Python 3.12.0 to 3.12.2 starts no thread once the main thread has ended: the program's last hook, which runs first,
#: makes this Python do the same.
REFUSES_THREADS_AT_EXIT = """
        import atexit, sys, threading
        from plainsong import Client

        def refuse(*_):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        client = Client(sys.argv[1])
        topic = sys.argv[2]
        atexit.register(lambda: setattr(threading.Thread, "start", refuse))
"""


@pytest.mark.parametrize(
    "sender",
    [
        "client.publisher(topic, linger_ms=60_000)",
        "client.producer(topic, 'p', linger_ms=60_000)",
        "client.stream(topic)",
    ],
)
def test_a_program_that_ends_without_closing_sends_its_messages_where_no_thread_starts_at_its_end(
    client: Client, topic: str, shared_url: str, sender: str
):
    text = f"""{REFUSES_THREADS_AT_EXIT}
        sender = {sender}
        send = getattr(sender, "send") if hasattr(sender, "counts") else sender.publish
        for n in range(1000):
            send(b"%d" % n)
    """
    assert result_of(program(text, shared_url, topic)) == (0, "", "")
    assert [int(message.payload) for message in client.read(topic)] == list(range(1000))


def test_one_sender_that_cannot_be_closed_keeps_no_other_from_sending_at_the_end(
    client: Client, topic: str, shared_url: str
):
    text = f"""{REFUSES_THREADS_AT_EXIT}
        publishers = [client.publisher(topic, linger_ms=60_000) for _ in range(3)]
        for publisher in publishers:
            publisher.send(b"x")
        publishers[1]._at_exit = lambda: 1 / 0
    """
    code, _, err = result_of(program(text, shared_url, topic))
    assert code == 0
    assert "ZeroDivisionError" in err
    assert len(client.poll(topic)) == 2


class Threads:
    """Lets threads start or not, since a limit on processes does not hold for root."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.are_refused = False
        start = threading.Thread.start

        def start_unless_refused(thread: threading.Thread) -> None:
            if self.are_refused and thread.name.startswith("plainsong-"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_unless_refused)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


@pytest.mark.parametrize("kind", ["publisher", "producer"])
def test_a_message_is_refused_while_no_thread_can_be_started_and_the_next_one_is_sent(
    client: Client, topic: str, threads: Threads, kind: str
):
    sender = getattr(client, kind)(topic, delivery_timeout_s=PATIENCE_S)
    threads.are_refused = True
    for _ in range(3):
        with pytest.raises(BufferFull, match="no thread could be started") as refused:
            sender.send(b"refused")
        assert refused.value.outcome == "not-applied"
    assert sender.counts.pending == 0
    sender.flush(PATIENCE_S)
    threads.are_refused = False
    assert sender.send(b"sent").result(PATIENCE_S)
    sender.close(PATIENCE_S)
    assert [message.payload for message in client.poll(topic)] == [b"sent"]


@pytest.mark.parametrize("kind", ["publisher", "producer"])
def test_a_sender_that_never_got_a_thread_can_be_closed(client: Client, topic: str, threads: Threads, kind: str):
    threads.are_refused = True
    sender = getattr(client, kind)(topic)
    with pytest.raises(BufferFull):
        sender.send(b"refused")
    sender.close()


def test_best_effort_drops_a_message_while_no_thread_can_be_started(client: Client, topic: str, threads: Threads):
    dropped = []
    with client.publisher(topic, mode="best_effort", on_drop=dropped.append) as publisher:
        threads.are_refused = True
        assert isinstance(publisher.send(b"dropped").exception(0), MessageDropped)
        threads.are_refused = False
        assert publisher.send(b"sent").result(PATIENCE_S)
    assert [message.payload for message in dropped] == [b"dropped"]
    assert publisher.counts.dropped == 1


def test_a_publisher_with_one_thread_sends_when_no_second_one_can_be_started(
    client: Client, topic: str, threads: Threads
):
    other = client.create_topic(topic + "-other").name
    with client.publisher(linger_ms=60_000) as publisher:
        publisher.send(b"a", topic=topic)
        threads.are_refused = True
        publisher.send(b"b", topic=other)
        publisher.flush(PATIENCE_S)
    assert [len(client.poll(each)) for each in (topic, other)] == [1, 1]


def test_a_stream_is_not_opened_where_no_thread_can_be_started_and_the_next_one_is(
    client: Client, topic: str, threads: Threads
):
    threads.are_refused = True
    with pytest.raises(ConnectFailed, match="no thread could be started"):
        client.stream(topic)
    threads.are_refused = False
    with client.stream(topic) as stream:
        threads.are_refused = True
        with pytest.raises(BufferFull, match="no thread could be started"):
            stream.publish(b"refused")
        threads.are_refused = False
        stream.publish(b"sent")
    assert [message.payload for message in client.poll(topic)] == [b"sent"]


def test_a_forked_child_closes_the_sockets_of_its_parent_without_a_warning(client: Client, topic: str, shared_url: str):
    text = """
        import gc, os, sys, warnings
        from plainsong import Client
        with Client(sys.argv[1]) as client:
            client.poll(sys.argv[2])
            pid = os.fork()
            client.publish(sys.argv[2], b"x")
            gc.collect()
            if not pid:
                client.close()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            client.publish(sys.argv[2], b"x")
    """
    options = [sys.executable, "-X", "dev", "-c", textwrap.dedent(text), shared_url, topic]
    done = subprocess.run(
        options, capture_output=True, text=True, timeout=PATIENCE_S, cwd=Path(__file__).parents[2], check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(client.poll(topic)) == 3
