"""Every client call that waits at the daemon returns at once when any event that ends its wait occurs."""

from __future__ import annotations

import inspect
import json
import pkgutil
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.request import Request, urlopen

import pytest

import plainsong._async
from plainsong._async.client import AsyncClient, AsyncTopic
from plainsong.errors import TopicNotFound
from tests.client.client_under_test import Client
from tests.client.conftest import LONG_WAIT_MS
from tests.daemon.harness import eventually
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("both_clients")


@pytest.fixture
def shared_url(url_of_long_waits: str) -> str:
    return url_of_long_waits


def poll(client: Any, topic: str) -> list[bytes]:
    found = client.poll(topic, isolation="committed", wait_ms=LONG_WAIT_MS)
    return [message.payload for message in found.messages]


def read(client: Any, topic: str) -> list[bytes]:
    with client.read(topic, isolation="committed", follow=True) as reader:
        return [next(reader).payload]


def read_many(client: Any, topic: str) -> list[bytes]:
    with client.read([topic, f"{topic}_quiet"], isolation="committed", follow=True) as reader:
        return [next(reader).payload]


WAITS = [poll, read, read_many]


def commit(client: Any, topic: str, transaction: Any) -> None:
    del topic
    client.transactions.commit(transaction)


def abort(client: Any, topic: str, transaction: Any) -> None:
    del topic
    client.transactions.abort(transaction)


def invalidate(client: Any, topic: str, transaction: Any) -> None:
    del topic
    client.transactions.invalidate(transaction.id)


def shorten_ttl(client: Any, topic: str, transaction: Any) -> None:
    """Expire the message that blocks the reader; the next message has a later time."""
    del transaction
    eventually("the first message is a second older", lambda: age_ms(client, topic) > 1_500)
    client.publish(topic, b"after")
    client.admin.set_properties(topic, ttl_s=1)


def age_ms(client: Any, topic: str) -> int:
    return int(client.admin.stats(topic)["oldestAgeMs"])


class Waiting:
    """A call in a thread."""

    def __init__(self, call: Callable[[], list[bytes]]) -> None:
        self._outcome: SimpleQueue[list[bytes] | Exception] = SimpleQueue()
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[], list[bytes]]) -> None:
        try:
            self._outcome.put(call())
        except Exception as error:  # noqa: BLE001 - it is the outcome
            self._outcome.put(error)

    def outcome(self) -> list[bytes] | Exception:
        try:
            return self._outcome.get(timeout=PATIENCE_S)
        except Empty:
            raise AssertionError("the call still waits") from None


def held(url: str, transaction: Any) -> bool:
    """True if this transaction blocks a reader."""
    asked = Request(f"{url}/v1/transactions/{transaction.id}/abort?dryRun=true", method="POST")
    with urlopen(asked, timeout=PATIENCE_S) as answer:
        return bool(json.load(answer)["effect"]["releases"]["heldPolls"])


def parked(client: Any, topic: str) -> bool:
    return bool(client.admin.stats(topic)["parkedPolls"])


@pytest.mark.parametrize("end", [commit, abort, invalidate, shorten_ttl])
@pytest.mark.parametrize("wait", WAITS)
def test_the_end_of_a_hold_ends_a_call_that_waits(wait: Any, end: Any, shared_url: str, topic: str, client: Any):
    client.create_topic(f"{topic}_quiet")
    transaction = client.transactions.begin(timeout_s=600)
    client.publish(topic, b"undecided", transaction=transaction)
    if end is not shorten_ttl:
        client.publish(topic, b"after")
    with Client(shared_url) as other:
        waiting = Waiting(lambda: wait(other, topic))
        eventually("the call waits", lambda: held(shared_url, transaction))
        end(client, topic, transaction)
        expected = b"undecided" if end is commit else b"after"
        found = waiting.outcome()
        assert isinstance(found, list), found
        assert found[0] == expected


@pytest.mark.parametrize("wait", WAITS)
def test_a_publish_ends_a_call_that_waits_at_the_end(wait: Any, shared_url: str, topic: str, client: Any):
    client.create_topic(f"{topic}_quiet")
    with Client(shared_url) as other:
        waiting = Waiting(lambda: wait(other, topic))
        eventually("the call waits", lambda: parked(client, topic))
        client.publish(topic, b"news")
        assert waiting.outcome() == [b"news"]


@pytest.mark.parametrize("wait", WAITS)
def test_a_deletion_ends_a_call_that_waits(wait: Any, shared_url: str, topic: str, client: Any):
    client.create_topic(f"{topic}_quiet")
    with Client(shared_url) as other:
        waiting = Waiting(lambda: wait(other, topic))
        eventually("the call waits", lambda: parked(client, topic))
        client.admin.delete_topic(topic)
        assert isinstance(waiting.outcome(), TopicNotFound)


# --- the list of waits -----------------------------------------------------------------------------

#: The rows of the calls that wait at the daemon.
ROWS = {"poll": [poll], "read": [read, read_many]}
#: Calls that wait for the program's own requests: each ends with its answer, its deadline, or a close.
OWN_WAITS = {
    "events": "test_service_events.py: what happens, stop, the end of the daemon",
    "stream": "test_streams.py: the answers of its publishes",
    "publisher": "test_publisher.py: the answers of its publishes",
    "producer": "test_producer_waiting.py: the answers of its publishes",
    "transaction": "test_transaction_course.py: the decision",
}


def waiting_calls() -> set[str]:
    """Return the public calls that take a waiting time, or that return an object with its own lifetime."""
    parts = [AsyncClient, AsyncTopic]
    parts += [value for each in (AsyncClient, AsyncTopic) for value in properties_of(each)]
    found = set()
    for part in parts:
        for name, call in inspect.getmembers(part, inspect.isfunction):
            if name.startswith("_"):
                continue
            signature = inspect.signature(call)
            parameters = set(signature.parameters)
            returned = named(call, signature.return_annotation)
            lives = any(hasattr(returned, each) for each in ("__anext__", "__aenter__", "__aiter__"))
            if lives or parameters & {"wait_ms", "follow"}:
                found.add(name)
    return found


def properties_of(part: type) -> list[type]:
    """Return the classes of the client's properties."""
    found = [each.fget for _, each in inspect.getmembers(part, lambda each: isinstance(each, property))]
    classes = [named(each, inspect.signature(each).return_annotation) for each in found]
    return [each for each in classes if inspect.isclass(each) and each.__module__.startswith("plainsong")]


def named(call: Any, annotation: Any) -> Any:
    """Return the class that an annotation names in the module of ``call``, or in one of the client's."""
    name = str(annotation).partition("[")[0]
    for module in (call.__module__, *CLIENT_MODULES):
        if (found := getattr(import_module(module), name, None)) is not None:
            return found
    return None


CLIENT_MODULES = [f"plainsong._async.{each.name}" for each in pkgutil.iter_modules(plainsong._async.__path__)]


def test_each_call_of_the_client_that_waits_has_a_row():
    assert waiting_calls() == ROWS.keys() | OWN_WAITS.keys()
    assert [row for rows in ROWS.values() for row in rows] == WAITS
    for where in OWN_WAITS.values():
        assert Path(__file__).with_name(where.partition(":")[0]).exists()
