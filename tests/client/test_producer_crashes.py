"""Producers when client or daemon are killed with kill -9: at the end every message is present once, in order."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from test_processes import program, result_of

from plainsong import Client
from plainsong.errors import ProducerStopped
from tests.client.conftest import url_of
from tests.daemon.harness import Daemon, eventually
from tests.patience import PATIENCE_S
from tests.ports import free_address

#: Publishes the lines of a file, each under its offset; a second run continues where the topic ends.
FROM_A_FILE = """
    import sys
    from plainsong import Client
    url, topic, path, batch = sys.argv[1:]
    with Client(url) as client, open(path, "rb") as lines:
        with client.producer(topic, "file", max_batch_messages=int(batch)) as producer:
            if producer.last_sequence_id >= 0:
                lines.seek(producer.last_sequence_id)
                lines.readline()
            offset = lines.tell()
            for line in lines:
                producer.send(line.rstrip(b"\\n"), sequence_id=offset)
                offset += len(line)
"""


def test_a_file_is_published_once_whichever_process_is_killed(daemon: Callable[..., Daemon], tmp_path: Path):
    lines = [f"line {n} {'x' * (n % 50)}" for n in range(4000)]
    (tmp_path / "input").write_text("\n".join(lines) + "\n")
    one = daemon(bind=free_address())
    url = url_of(one)
    with Client(url, deadline_s=PATIENCE_S) as client:
        client.create_topic("t")

        def count() -> int:
            return int(client.admin.stats("t")["messages"])

        for _ in range(3):
            before = count()
            process = program(FROM_A_FILE, url, "t", str(tmp_path / "input"), "20")
            # All may be published before the next poll of the count.
            eventually(
                "a part is stored",
                lambda before=before, process=process: count() > before + 100 or process.poll() is not None,
            )
            process.kill()
            process.communicate()
        process = program(FROM_A_FILE, url, "t", str(tmp_path / "input"), "20")
        before = count()
        eventually("a part is stored", lambda: count() > before + 100 or process.poll() is not None)
        one.kill()
        one.start()
        code, _, err = result_of(process)
        assert (code, err) == (0, "")
        assert [message.payload.decode() for message in client.read("t")] == lines


def test_a_producer_survives_its_daemon(daemon: Callable[..., Daemon]):
    one = daemon(bind=free_address())
    with Client(url_of(one), deadline_s=PATIENCE_S) as client:
        client.create_topic("t")
        with client.producer("t", "p", max_batch_messages=10) as producer:
            stop = threading.Event()
            sents = []

            def work() -> None:
                while not stop.is_set() or len(sents) < 1000:
                    if len(sents) % 50 == 0:
                        producer.publish_atomic("key", [b"a%d" % len(sents), b"b%d" % len(sents)])
                    sents.append(producer.send(b"%d" % len(sents)))
                    sents[-1].result(PATIENCE_S)

            thread = threading.Thread(target=work)
            thread.start()
            for _ in range(3):
                before = len(sents)
                eventually("it continues", lambda before=before: len(sents) > before + 20)
                one.kill()
                one.start()
            stop.set()
            thread.join()
        found = [message.payload.decode() for message in client.read("t")]
    expected = []
    for n in range(len(sents)):
        expected += [f"a{n}", f"b{n}"] if n % 50 == 0 else []
        expected.append(str(n))
    assert found == expected
    assert all(not sent.result().duplicate for sent in sents)


def test_a_transaction_that_died_with_its_program_is_stored_once_or_not_at_all(
    client: Client, topic: str, shared_url: str
):
    text = """
        import os, sys, threading
        from plainsong import Client
        url, topic = sys.argv[1:]
        with Client(url) as client, client.producer(topic, "p") as producer:
            n = (producer.last_sequence_id + 1) // 3
            while True:
                with producer.begin("key") as tx:
                    for part in range(3):
                        tx.write(b"%d.%d" % (n, part))
                    tx.commit()
                n += 1
    """
    for _ in range(3):
        before = client.admin.stats(topic)["messages"]
        process = program(text, shared_url, topic)
        eventually("some are stored", lambda before=before: client.admin.stats(topic)["messages"] > before + 30)
        process.kill()
        process.communicate()
    found = [message.payload for message in client.read(topic)]
    assert found == [b"%d.%d" % (n, part) for n in range(len(found) // 3) for part in range(3)]


def test_in_a_forked_child_the_name_stays_with_the_parent(shared_url: str, client: Client, topic: str):
    text = """
        import os, sys
        from plainsong import Client
        from plainsong.errors import Closed, MessageDropped
        client = Client(sys.argv[1])
        producer = client.producer(sys.argv[2], "p", linger_ms=60_000)
        sent = producer.send(b"parent's")
        pid = os.fork()
        if pid == 0:
            try:
                assert isinstance(sent.exception(0), MessageDropped)
                try:
                    producer.send(b"child's")
                except Closed:
                    os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        producer.close()
        print(sent.result().sequence_id)
    """
    assert result_of(program(text, shared_url, topic)) == (0, "0\n", "")
    assert [message.payload for message in client.read(topic)] == [b"parent's"]


def test_a_daemon_that_stays_unavailable_is_reported_and_nothing_is_stored_afterwards(daemon: Callable[..., Daemon]):
    one = daemon(bind=free_address())
    with Client(url_of(one), deadline_s=PATIENCE_S) as client:
        client.create_topic("t")
        producer = client.producer("t", "p", delivery_timeout_s=0.5, linger_ms=0)
        one.kill()
        first = producer.send(b"1", sequence_id=1)
        error = first.exception(PATIENCE_S)
        assert getattr(error, "outcome", None) == "not-applied"
        one.start()
        eventually("it has stopped", lambda: producer._queue.stopped is not None)
        try:
            producer.send(b"2", sequence_id=2)
        except ProducerStopped as stopped:
            assert stopped.__cause__ is error
        producer.close()
        with client.producer("t", "p") as again:
            assert again.last_sequence_id == -1


#: Adds up the messages and stores the last id with the sum; a second run continues there.
INTO_A_DATABASE = """
    import sqlite3, sys
    from plainsong import Client
    url, topic, path = sys.argv[1:]
    database = sqlite3.connect(path, isolation_level=None, timeout=200)
    database.execute("CREATE TABLE IF NOT EXISTS totals (topic TEXT PRIMARY KEY, total INTEGER, last_id TEXT)")
    total, last_id = database.execute("SELECT total, last_id FROM totals").fetchone() or (0, "oldest")
    with Client(url) as client:
        for message in client.read(topic, last_id, follow=True):
            total += int(message.payload)
            database.execute("REPLACE INTO totals VALUES (?, ?, ?)", (topic, total, str(message.id)))
"""


def test_effects_kept_with_the_message_id_count_each_message_once(
    client: Client, topic: str, shared_url: str, tmp_path: Path
):
    path = tmp_path / "totals.db"

    def total() -> int:
        try:
            with closing(sqlite3.connect(path, timeout=PATIENCE_S)) as database:
                return int((database.execute("SELECT total FROM totals").fetchone() or (0,))[0])
        except sqlite3.OperationalError:
            return 0  # the table does not exist yet

    sent = 0
    for _ in range(3):
        before = total()
        client.publish(topic, [b"1"] * 1000)
        sent += 1000
        process = program(INTO_A_DATABASE, shared_url, topic, str(path))
        eventually("a part is added up", lambda before=before: total() > before + 20)
        process.kill()
        process.communicate()
    process = program(INTO_A_DATABASE, shared_url, topic, str(path))
    eventually("all amounts are added up", lambda sent=sent: total() >= sent)
    process.kill()
    process.communicate()
    assert total() == sent
