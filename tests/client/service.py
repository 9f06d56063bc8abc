"""A transaction service and its topics in memory, as a client sees them; tests can make it fail."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from plainsong.calls import Answer, Failure, Send
from plainsong.protocol.codec import AVRO, AVRO_2
from plainsong.protocol.requests import PublishResponse
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS
from tests.client.simulation import problem, said

#: A replacement for an answer; a function may carry out the request first.
Instead = Answer | Failure | Callable[[Callable[[], Answer]], Answer | Failure]


class Service:
    """``carry`` acts as the wire; ``events`` are the calls that arrived; ``instead`` (by verb) replaces answers."""

    def __init__(self, events: list[str] | None = None, timeout_s: int = 30) -> None:
        self.events: list[str] = [] if events is None else events
        self.instead: dict[str, list[Instead]] = defaultdict(list)
        self.timeout_s = timeout_s
        self.states: dict[int, str] = {}
        self.changes: dict[int, list[bytes]] = {}
        #: Payloads by topic and pointer, and stored ones also by segment.
        self.stored: dict[tuple[str, int], dict[str, list[bytes]]] = defaultdict(dict)
        self.published: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        self.rolled_back: list[tuple[str, int]] = []
        self.requests: list[tuple[str, Any]] = []
        self._parents: dict[int, int] = {}
        self._last = 1_700_000_000_000 * POINTERS_PER_MS
        self._position = 0

    def carry(self, send: Send) -> Answer | Failure:
        verb, happen = self._understood(send)
        self.events.append(f"service.{verb}")
        instead = self.instead[verb].pop(0) if self.instead[verb] else None
        if instead is None:
            return happen()
        return instead(happen) if callable(instead) else instead

    def _understood(self, send: Send) -> tuple[str, Callable[[], Answer]]:
        path, _, _ = send.request.path.partition("?")
        if path == "/v1/transactions":
            return "begin", lambda: self._begin(json.loads(send.request.body or b"{}"))
        if found := re.fullmatch(r"/v1/transactions/(\d+)(?:/(\w+))?", path):
            transaction_id, verb = int(found[1]), found[2] or "get"
            return verb, lambda: self._decision(transaction_id, verb, send.request.body)
        found = re.fullmatch(r"/v1/namespaces/\w+/topics/([\w-]+)/(\w+)", path)
        assert found is not None, path
        topic, verb = found[1], found[2]
        return verb, lambda: self._topic(topic, verb, send)

    # --- the service -----------------------------------------------------------------------------

    def _begin(self, body: dict[str, Any]) -> Answer:
        self.requests.append(("begin", body))
        self._last += 1
        self.states[self._last] = "in_progress"
        return said(self._told(self._last, self._last))

    def _told(self, transaction_id: int, pointer: int) -> dict[str, Any]:
        expires_ms = transaction_id // POINTERS_PER_MS + self.timeout_s * 1000
        snapshot = {"id": transaction_id, "writePointer": pointer, "readPointer": transaction_id - 1}
        return {**snapshot, "snapshot": "AA==", "expires": expires_ms}

    def _decision(self, transaction_id: int, verb: str, body: bytes) -> Answer:
        state = self.states.get(transaction_id, "unknown")
        if verb == "get":
            return said({"id": transaction_id, "state": state})
        if state == "unknown":
            return problem(404, "transaction_not_found")
        if verb == "commit" and state == "committed":
            return said({"id": transaction_id, "state": state})
        if verb in ("abort", "invalidate") and state != "committed":
            self.states[transaction_id] = "aborted" if verb == "abort" else "invalid"
            return said({"id": transaction_id, "state": self.states[transaction_id]})
        if state != "in_progress":
            return problem(409, "transaction_not_in_progress")
        if verb == "commit":
            self.states[transaction_id] = "committed"
            return said({"id": transaction_id, "state": "committed"})
        if verb == "prepare":
            self.changes[transaction_id] = [b64decode(each) for each in json.loads(body)["changes"]]
            return said({})
        assert verb == "checkpoint"
        self._last += 1
        self._parents[self._last] = transaction_id
        return said(self._told(transaction_id, self._last))

    # --- topics ----------------------------------------------------------------------------------

    def _topic(self, topic: str, verb: str, send: Send) -> Answer:
        if topic == "missing":
            return problem(404, "topic_not_found")
        if verb == "rollback":
            pointer = json.loads(send.request.body)["transactionWritePointer"]
            self.rolled_back.append((topic, pointer))
            self.published.pop((topic, pointer), None)
            self.stored.pop((topic, pointer), None)
            return Answer(200, {}, b"")
        codec = AVRO if dict(send.request.headers)["Content-Type"] == "avro/binary" else AVRO_2
        request = codec.decode_publish(send.request.body)
        self.requests.append((verb, request))
        pointer = request.write_pointer
        assert pointer is not None
        if self.states[self._parents.get(pointer, pointer)] != "in_progress":
            return problem(409, "transaction_not_in_progress")
        if verb == "store":
            assert request.segment is not None
            assert (topic, pointer) not in self.published, "already published"
            self.stored[topic, pointer].setdefault(request.segment, []).extend(request.messages)
            return Answer(200, {}, b"")
        start = self._position
        stored = self.stored.pop((topic, pointer), {})
        self._position += len(request.messages) + bool(stored)
        for name, payloads in stored.items():
            self.published[topic, pointer] += payloads if name in (request.segments or stored) else []
        self.published[topic, pointer] += request.messages
        response = PublishResponse(pointer, 1, start, 1, max(start, self._position - 1))
        return Answer(200, {"content-type": codec.content_type}, codec.encode_publish_response(response))


def then_lost(happen: Callable[[], Answer]) -> Failure:
    """Carry out the request, and lose the answer."""
    happen()
    return Failure("lost", "reset")
