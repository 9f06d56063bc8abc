"""Staging with the real daemon, and SIGKILL before, between and during stores and publishes: each batch once."""

from __future__ import annotations

import http.client
import threading

from tests.daemon.talk import Answer, ask, create, json_body, read_all, topic_path
from tests.patience import PATIENCE_S
from tests.ports import free_address

HEADERS = {"Content-Type": "application/json"}
KILLS = 3
TASKS = 3


def store(address, segment, ids, payloads, producer="job") -> Answer:
    body = {"producer": producer, "segment": segment, "sequenceIds": ids, "messages": payloads}
    return ask(address, "POST", topic_path("t", "/store"), json_body(body), HEADERS)


def publish(address, sequence_id, segments, producer="job", **more) -> Answer:
    body = {"producer": producer, "sequenceIds": [sequence_id], "segments": segments, "messages": [], **more}
    return ask(address, "POST", topic_path("t", "/publish"), json_body(body), HEADERS)


def texts(address) -> list[str]:
    return [payload.decode() for _, payload in read_all(address, "t")]


def test_messages_staged_before_a_kill_are_published_after_it_and_only_once(daemon):
    running = daemon()
    create(running.address, "t")
    assert store(running.address, "a", [0, 1], ["one", "two"]).status == 200
    assert store(running.address, "lost", [0], ["x"]).status == 200
    running.kill()
    running.start()
    assert texts(running.address) == []
    assert store(running.address, "a", [0, 1], ["one", "two"]).status == 200
    assert store(running.address, "a", [2], ["three"]).status == 200
    first = publish(running.address, 0, ["a"])
    assert first.status == 200
    running.kill()
    running.start()
    assert publish(running.address, 0, ["a"]).json() == first.json() | {"duplicate": True}
    assert publish(running.address, 1, ["lost"]).code == "invalid_parameter"
    assert texts(running.address) == ["one", "two", "three"]


def test_a_job_that_repeats_lost_requests_publishes_each_batch_once(daemon):
    """The job stores and publishes without pauses while the daemon is killed, and repeats each unanswered request."""
    running = daemon("deduplication.snapshot_entries=7", bind=free_address())
    create(running.address, "t")
    acknowledged = threading.Semaphore(0)
    batches = 12 * KILLS
    failures = []

    def certainly(request) -> Answer:
        while True:
            try:
                answer = request()
            except (OSError, http.client.HTTPException):
                continue
            if answer.status == 503:
                continue
            assert answer.status == 200, answer
            acknowledged.release()
            return answer

    def work():
        try:
            for batch in range(batches):
                segments = []
                for task in range(TASKS):
                    segments.append(f"{batch}.{task}")
                    payloads = [f"{batch}/{task}/{each}" for each in range(2)]
                    certainly(lambda: store(running.address, segments[-1], [0, 1], payloads))  # noqa: B023 - asked at once
                certainly(lambda: store(running.address, f"{batch}.zombie", [0], ["lost"]))  # noqa: B023
                certainly(lambda: publish(running.address, batch, segments))  # noqa: B023
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            for _ in range(batches * (TASKS + 2)):
                acknowledged.release()

    worker = threading.Thread(target=work)
    worker.start()
    for kill in range(KILLS):
        for _ in range(17 + kill):  # each kill hits a different step
            acknowledged.acquire()
        running.kill()
        running.start()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()
    assert not failures
    expected = [f"{batch}/{task}/{each}" for batch in range(batches) for task in range(TASKS) for each in range(2)]
    assert texts(running.address) == expected
