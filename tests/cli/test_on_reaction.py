"""The loop around an effect: order, retries, dead letters, saved positions, and the end of the loop."""

from __future__ import annotations

import os
import signal
import time
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong import Client
from plainsong.errors import ConnectFailed, PositionNotSaved
from plainsong.messages import Message, Origin
from plainsong.protocol.errors import PositionChanged
from plainsong.protocol.requests import MAX_ATTRIBUTE_BYTES
from plainsong.react.reaction import (
    DEADLINE_S,
    MAX_ERROR_BYTES,
    DeadLetters,
    Done,
    Reaction,
    Reject,
    Retry,
    RetryPolicy,
    Stuck,
    attributes_of,
    size_of,
)
from plainsong.react.stopping import Stop, Stopped
from tests.cli.conftest import url_of
from tests.patience import PATIENCE_S


def message(number, attributes=None):
    message_id = bytes.fromhex(f"0000018bcfe56805{number:04x}00000000000000000000")
    return Message(Origin("orders"), message_id, b"%d" % number, attributes=attributes or {})


class Reading:
    """Reads from a list, and records saved positions in a common log."""

    def __init__(self, log, count, failures=()):
        self.log = log
        self.at_hand = None
        self.failures = list(failures)
        self._left = iter([message(number) for number in range(count)])

    def __iter__(self):
        return self

    def __next__(self):
        self.at_hand = next(self._left)
        return self.at_hand

    def save(self):
        if self.failures:
            raise self.failures.pop(0)
        self.log.append(f"saved {self.at_hand.payload.decode()}")


@pytest.fixture
def log():
    return []


@pytest.fixture
def stop():
    stop = Stop(grace_s=60)
    yield stop
    stop.close()


@pytest.fixture
def reaction(log, stop):
    """Return a scripted reaction: verdicts in the order of attempts, then Done."""

    def make(*script, retries=2, dead_letters=None, waits=True):
        verdicts = list(script)

        def effect(message, attempt):
            log.append(f"{message.payload.decode()} attempt {attempt}")
            return verdicts.pop(0) if verdicts else Done()

        retry_policy = RetryPolicy(retries, 0.001, 0.002)
        return Reaction(effect, stop, retry_policy, dead_letters, lambda event: log.append(event.kind), waits=waits)

    return make


class Letters:
    """Records dead letters."""

    def __init__(self, log, failures=()):
        self.log = log
        self.failures = list(failures)

    def put(self, message, why, attempts):
        if self.failures:
            raise self.failures.pop(0)
        self.log.append(f"put {message.payload.decode()}: {why}, {attempts}")

    def forget(self, message):
        self.log.append(f"forgot {message.payload.decode()}")


# --- order -------------------------------------------------------------------------------------------


def test_each_message_is_saved_when_it_is_finished_and_before_the_next(reaction, log):
    work = reaction(Retry("no"), Done())
    work.run(Reading(log, 2))
    assert log == ["0 attempt 1", "again", "0 attempt 2", "done", "saved 0", "1 attempt 1", "done", "saved 1"]
    assert (work.done, work.dead) == (2, 0)


def test_a_permanent_failure_without_dead_letters_ends_it_and_is_not_skipped(reaction, log):
    with pytest.raises(Stuck) as raised:
        reaction(Done(), Reject("bad")).run(Reading(log, 3))
    assert (raised.value.message.payload, raised.value.why, raised.value.attempts) == (b"1", "bad", 1)
    assert log[-2:] == ["saved 0", "1 attempt 1"]


def test_a_failure_after_the_last_retry_ends_it_too(reaction, log):
    with pytest.raises(Stuck) as raised:
        reaction(*[Retry("no")] * 3, retries=2).run(Reading(log, 1))
    assert raised.value.attempts == 3
    with pytest.raises(Stuck):
        reaction(Retry("no"), retries=0).run(Reading(log, 1))


def test_forever_never_stops_retrying(reaction, log):
    work = reaction(*[Retry("no")] * 50, retries=None)
    work.run(Reading(log, 1))
    assert work.done == 1
    assert log.count("again") == 50


def test_a_dead_letter_is_stored_before_the_position_moves_past_its_message(reaction, log):
    work = reaction(Reject("bad"), dead_letters=Letters(log))
    work.run(Reading(log, 2))
    assert log == [
        *("0 attempt 1", "put 0: bad, 1", "dead-letter", "saved 0", "forgot 0"),
        *("1 attempt 1", "done", "saved 1"),
    ]
    assert (work.done, work.dead) == (1, 1)


# --- an unreachable daemon ---------------------------------------------------------------------------


def test_a_position_that_cannot_be_saved_now_is_saved_later_without_repeating_the_effect(reaction, log):
    reading = Reading(log, 1, [ConnectFailed("away"), ConnectFailed("away")])
    reaction().run(reading)
    assert log == ["0 attempt 1", "done", "unsaved", "unsaved", "saved 0"]


def test_a_dead_letter_that_cannot_be_published_now_is_published_later(reaction, log):
    letters = Letters(log, [ConnectFailed("away")])
    reaction(Reject("bad"), dead_letters=letters).run(Reading(log, 1))
    assert log == ["0 attempt 1", "unsent", "put 0: bad, 1", "dead-letter", "saved 0", "forgot 0"]


def test_without_waiting_an_unreachable_daemon_is_reported_at_once(reaction, log):
    with pytest.raises(ConnectFailed):
        reaction(waits=False).run(Reading(log, 1, [ConnectFailed("away")]))


@pytest.mark.parametrize("error", [PositionChanged("somebody"), PositionNotSaved("disk full")])
def test_a_position_that_can_never_be_saved_ends_it(reaction, log, error):
    with pytest.raises(type(error)):
        reaction().run(Reading(log, 2, [error]))
    assert "1 attempt 1" not in log


def test_an_end_while_a_position_cannot_be_saved_reports_it(reaction, log, stop):
    work = reaction()
    work.report = lambda event: stop.ask() if event.kind == "unsaved" else None
    with pytest.raises(ConnectFailed):
        work.run(Reading(log, 1, [ConnectFailed("away")]))


# --- stopping ----------------------------------------------------------------------------------------


def test_a_pause_ends_at_once_and_the_message_is_returned(reaction, log, stop):
    work = reaction(Retry("no", pause_s=1000))
    work.retry_policy = RetryPolicy(None, 500, 1000)
    work.report = lambda event: stop.ask()
    began_s = time.monotonic()
    with pytest.raises(Stopped):
        work.run(Reading(log, 1))
    assert time.monotonic() - began_s < PATIENCE_S  # instead of a thousand seconds
    assert log == ["0 attempt 1"]


def test_work_finished_at_the_end_is_saved(reaction, log, stop):
    work = reaction()
    work.report = lambda event: stop.ask()
    with pytest.raises(Stopped):
        work.run(Reading(log, 2))
    assert log == ["0 attempt 1", "saved 0"]


def test_a_signal_ends_a_wait_for_the_next_message(reaction, log, stop):
    class Waiting(Reading):
        def __next__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    with stop.listening(), pytest.raises(Stopped):
        reaction().run(Waiting(log, 1))
    assert stop.signal == signal.SIGTERM


def test_a_signal_does_not_end_work_that_is_not_waiting(stop):
    before = signal.getsignal(signal.SIGINT)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        assert stop.until_s > time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.until_s < 0
    assert stop.signal == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(Stopped), stop.interrupting():
        raise AssertionError("it was asked to stop before")


# --- retry_policy ----------------------------------------------------------------------------------------


@given(chance=st.floats(0, 1), asked_s=st.floats(0, 1e9), longest_s=st.floats(0.001, 1e6))
def test_pauses_grow_and_are_bounded_whatever_the_server_asks(chance, asked_s, longest_s):
    retry_policy = RetryPolicy(8, 0.5, longest_s)
    backoff = retry_policy.backoff(lambda: chance)
    pauses_s = [backoff.failed() for _ in range(40)]
    assert pauses_s == sorted(pauses_s)
    assert 0 < pauses_s[0] <= pauses_s[-1] == longest_s * (1 - chance / 2)
    for pause_s in pauses_s:
        assert min(longest_s, asked_s) <= retry_policy.at_most(pause_s, asked_s) <= longest_s


# --- dead letters ------------------------------------------------------------------------------------


@given(
    attributes=st.dictionaries(st.text(max_size=50), st.text(max_size=2_000), max_size=4),
    why=st.text(max_size=6_000),
)
def test_attributes_of_a_dead_letter_stay_within_their_bound(attributes, why):
    dead = message(1, {name: value for name, value in attributes.items() if "\ud800" not in name + value})
    told = attributes_of(dead, why, 9)
    assert size_of(told) <= MAX_ATTRIBUTE_BYTES
    assert len(told["error"].encode()) <= MAX_ERROR_BYTES
    assert (told["originalTopic"], told["originalId"], told["attempts"]) == ("orders", str(dead.id), "9")


def test_a_dead_letter_keeps_its_own_attributes_where_there_is_room():
    told = attributes_of(message(1, {"routingKey": "k", "error": "old"}), "exit 3", 1)
    assert (told["routingKey"], told["error"]) == ("k", "exit 3")
    full = attributes_of(message(1, {"a": "x" * 4_000}), "y" * 2_000, 1)
    assert "a" not in full
    assert full["error"] == "y" * MAX_ERROR_BYTES


def test_a_dead_letter_is_stored_once_until_it_is_forgotten(cli, running, monkeypatch):
    cli("topic", "create", "dead")
    with Client(url_of(running), namespace=os.environ["PLAINSONG_NAMESPACE"]) as client:
        letters = DeadLetters(client, "dead", "reader:a")
        for _ in range(3):
            letters.put(message(7), "exit 65", 1)
        DeadLetters(client, "dead", "reader:b").put(message(7), "exit 65", 1)
        letters.put(message(8), "exit 65", 1)
        assert [each.payload for each in client.read("dead")] == [b"7", b"7", b"8"]
        assert len(client.admin.producers("dead")["producers"]) == 3
        letters.forget(message(7))
        letters.forget(message(7))
        assert len(client.admin.producers("dead")["producers"]) == 2


def test_a_large_dead_letter_has_a_second_more_for_each_16_kib():
    producer = MagicMock()
    client = MagicMock(namespace="n")
    client.producer.return_value.__enter__.return_value = producer
    for size in (1_000, 1 << 20):
        large = message(7)
        large.payload = bytes(size)
        DeadLetters(client, "dead", "reader:a").put(large, "exit 65", 1)
    assert [call.kwargs["deadline_s"] for call in producer.publish.call_args_list] == [DEADLINE_S, DEADLINE_S + 64]


def test_dead_letters_need_no_deduplication(cli, running):
    cli("topic", "create", "dead", "deduplication=disabled")
    with Client(url_of(running), namespace=os.environ["PLAINSONG_NAMESPACE"]) as client:
        letters = DeadLetters(client, "dead", "reader:a")
        letters.put(message(7), "exit 65", 1)
        letters.forget(message(7))
        assert [each.attributes["error"] for each in client.read("dead")] == ["exit 65"]
