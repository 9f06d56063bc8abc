"""CloudEvents at a real daemon, alone and with front ends: on the hot path, and through the listener."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable

import pytest

from plainsong.protocol.codec.cloud_events import BATCH_TYPE, EVENT_TYPE
from tests.daemon.harness import Daemon
from tests.daemon.talk import create, topic_path
from tests.patience import PATIENCE_S

EVENT = {"specversion": "1.0", "id": "A-1", "source": "/shop", "type": "sold"}
HEADERS = {f"CE-{name}": value for name, value in EVENT.items()}
PLAIN = {"Content-Type": "application/json"}


class Talk:
    """One connection. With ``lane=False`` its requests have an Origin, which keeps them off the hot path."""

    def __init__(self, address: tuple[str, int], *, lane: bool) -> None:
        self._connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
        self._more = {} if lane else {"Origin": f"http://{address[0]}:{address[1]}"}

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        self._connection.request("POST", topic_path("t", path), body, headers | self._more)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("lane", [True, False])
def test_events_of_each_mode_are_read_among_other_messages(
    daemon: Callable[..., Daemon], processes: int, lane: bool
) -> None:
    running = daemon(f"http.processes={processes}")
    create(running.address, "t")
    talk = Talk(running.address, lane=lane)
    event = EVENT | {"data": [1, "ä"]}
    plain = (200, b"")
    for _ in range(2):  # the second time, the hot path has the head cached
        assert talk.post("/publish", b'{"messages": ["hello"]}', PLAIN) == plain
        assert talk.post("/publish", b"<x/>", HEADERS | {"Content-Type": "application/xml"}) == plain
        assert talk.post("/publish", b'{"messages": []}', HEADERS | PLAIN) == plain
        assert talk.post("/publish", json.dumps(event).encode(), {"Content-Type": EVENT_TYPE}) == plain
        assert talk.post("/publish", json.dumps([event]).encode(), {"Content-Type": BATCH_TYPE.upper()}) == plain
        status, problem = talk.post("/publish", b"", {"ce-id": "alone"})
        assert (status, json.loads(problem)["code"]) == (400, "invalid_parameter")
        status, problem = talk.post("/publish", b"{}", {"Content-Type": "text/plain"})
        assert (status, json.loads(problem)["code"]) == (415, "unsupported_media_type")
    status, body = talk.post("/poll", b"{}", PLAIN | {"Accept": BATCH_TYPE})
    talk.close()
    assert status == 200
    found = json.loads(body)
    assert len({each.pop("plainsongid") for each in found}) == 10
    assert found[5:] != found[:5]  # messages that are not events have their own ids and times
    for at in (0, 5):
        hello, *events = found[at : at + 5]
        assert (hello["type"], hello["data"]) == ("plainsong.message", "hello")
        assert events == [
            EVENT | {"datacontenttype": "application/xml", "data": "<x/>"},
            EVENT | {"datacontenttype": "application/json", "data": {"messages": []}},
            event,
            event,
        ]
