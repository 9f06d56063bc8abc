"""Producers with the real daemon and SIGKILL at every step: each message once, sessions and switches kept."""

from __future__ import annotations

import threading
from itertools import count

from tests.daemon.talk import Answer, ask, create, json_body, read_all, topic_path
from tests.patience import PATIENCE_S
from tests.ports import free_address

HEADERS = {"Content-Type": "application/json"}
KILLS = 3


def send(address, ids, **more) -> Answer:
    body = {"messages": [str(number) for number in ids], "producer": "p", "sequenceIds": list(ids), **more}
    return ask(address, "POST", topic_path("t", "/publish"), json_body(body), HEADERS)


def open_session(address):
    return ask(address, "PUT", topic_path("t", "/producers/p")).json()


def test_messages_acknowledged_before_a_kill_are_duplicates_after_it(daemon):
    running = daemon()
    create(running.address, "t")
    first = send(running.address, [0, 1, 2])
    session = open_session(running.address)
    running.kill()
    running.start()
    again = send(running.address, [0, 1, 2])
    assert again.json() == first.json() | {"duplicate": True}
    assert again.headers["plainsong-duplicate"] == "true"
    newer = open_session(running.address)
    assert (newer["lastSequenceId"], newer["epoch"] > session["epoch"]) == (2, True)
    assert send(running.address, [3], producerEpoch=session["epoch"]).code == "producer_fenced"
    assert len(read_all(running.address, "t")) == 3


def test_properties_of_a_namespace_survive_a_kill(daemon):
    running = daemon()
    path = "/v1/namespaces/ring/properties"
    ask(running.address, "PUT", path, json_body({"deduplication": "disabled"}))
    running.kill()
    running.start()
    told = ask(running.address, "GET", path).json()
    assert told["deduplication"] == {"enabled": False, "level": "namespace"}


def test_a_producer_that_asks_after_each_lost_answer_stores_each_message_once(daemon):
    """The producer sends without pauses while the daemon is killed; after a lost answer it reopens its session."""
    running = daemon("deduplication.snapshot_entries=7", bind=free_address())
    create(running.address, "t")
    acknowledged = threading.Semaphore(0)
    wanted = 60 * KILLS
    failures = []

    def produce():
        try:
            _produce()
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            for _ in range(wanted):
                acknowledged.release()

    def _produce():
        session, following = None, 0
        for _ in count():
            if following >= wanted:
                return
            try:
                if session is None:
                    session = open_session(running.address)
                    following = session["lastSequenceId"] + 1
                ids = range(following, following + 1 + following % 3)
                answer = send(running.address, ids, producerEpoch=session["epoch"], atomic=following % 2 == 0)
            except (OSError, ValueError, KeyError):
                session = None
                continue
            except Exception as error:
                if type(error).__module__ != "http.client":
                    raise
                session = None
                continue
            if answer.status != 200:
                assert answer.status == 503, answer
                session = None
                continue
            assert answer.json()["duplicate"] is False
            following = ids[-1] + 1
            acknowledged.release()

    producer = threading.Thread(target=produce)
    producer.start()
    for _ in range(KILLS):
        for _ in range(15):
            acknowledged.acquire()
        running.kill()
        running.start()
    producer.join(PATIENCE_S)
    assert not producer.is_alive()
    assert not failures
    stored = [int(payload) for _, payload in read_all(running.address, "t")]
    assert stored == list(range(len(stored)))
    assert len(stored) >= wanted
