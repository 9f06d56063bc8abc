"""An in-memory topic with producers, as a client sees it; a test can make it fail or forget."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

from plainsong.calls import Answer, Failure, Send
from plainsong.protocol.codec import AVRO_2
from plainsong.protocol.ids import pack_id
from plainsong.protocol.requests import PublishRequest, PublishResponse, Receipt
from tests.client.simulation import LOST, problem, said

#: A replacement for an answer; a function may carry out the request first.
Instead = Answer | Failure | Callable[[Callable[[], Answer]], Answer | Failure]


@dataclass
class Remembered:
    """A producer as the topic remembers it."""

    epoch: int = 0
    last: int = -1
    recent: list[tuple[int, int, bytes, bytes, int | None]] = field(default_factory=list)


class Topic:
    """``carry`` acts as the wire; ``instead`` (by verb, in order) replaces answers; ``verbs`` are those received."""

    def __init__(self) -> None:
        self.generation = 1
        self.deleted = False
        self.enabled = True
        self.messages: list[tuple[str | None, int | None, bytes]] = []
        self.requests: list[PublishRequest] = []
        self.verbs: list[str] = []
        self.instead: dict[str, list[Instead]] = defaultdict(list)
        self.generations: dict[int, dict[str, Remembered]] = {1: {}}
        self._position = 0

    @property
    def producers(self) -> dict[str, Remembered]:
        return self.generations[self.generation]

    def recreate(self, *, forget: bool = False) -> None:
        self.generation += 1
        self.generations[self.generation] = {}
        self.deleted = False
        self.messages = []
        if forget:
            del self.generations[self.generation - 1]

    def carry(self, send: Send) -> Answer | Failure:
        path, _, query = send.request.path.partition("?")
        found = re.fullmatch(r"/v1/namespaces/default/topics/t/(publish|producers)(?:/(.*))?", path)
        assert found is not None, path
        name = unquote(found[2]) if found[2] else None
        verb = "publish" if found[1] == "publish" else "ask" if send.request.method == "GET" else "open"
        self.verbs.append(verb)
        happen = {
            "publish": lambda: self._publish(AVRO_2.decode_publish(send.request.body)),
            "open": lambda: self._open(name or f"made-{len(self.verbs)}", json.loads(send.request.body)),
            "ask": lambda: self._ask(name or "", int(parse_qs(query)["generation"][0])),
        }[verb]
        instead = self.instead[verb].pop(0) if self.instead[verb] else None
        if instead is None:
            return happen()
        return instead(happen) if callable(instead) else instead

    # --- requests --------------------------------------------------------------------------------

    def _open(self, name: str, given: dict[str, Any]) -> Answer:
        if self.deleted:
            return problem(404, "topic_not_found")
        if not self.enabled:
            return problem(409, "deduplication_disabled")
        if given.get("generation") not in (None, self.generation):
            return problem(409, "generation_changed")
        one = self.producers.setdefault(name, Remembered())
        one.epoch += 1
        return self._told(name, one, self.generation)

    def _ask(self, name: str, generation: int) -> Answer:
        of_it = self.generations.get(generation)
        if of_it is None:
            return problem(410, "producer_expired")
        if name not in of_it:
            return problem(404, "producer_not_found")
        return self._told(name, of_it[name], generation)

    def _told(self, name: str, one: Remembered, generation: int) -> Answer:
        recent = [
            {
                "first": lo,
                "last": hi,
                "firstId": first.hex(),
                "lastId": last.hex(),
                "response": None if pointer is None else {"transactionWritePointer": str(pointer)},
            }
            for lo, hi, first, last, pointer in one.recent
        ]
        about = {"producer": name, "epoch": one.epoch, "lastSequenceId": one.last, "generation": generation}
        return said({**about, "enabledFrom": None, "recent": recent})

    def _publish(self, request: PublishRequest) -> Answer:
        self.requests.append(request)
        refused = self._refused(request)
        if refused is not None:
            return refused
        ids = list(request.sequence_ids or [])
        one = self.producers.get(request.producer or "")
        if one is None or not self.enabled:
            first, last = self._stored(request, ids or [None] * len(request.messages))
            return self._receipt(request, Receipt(first, last, self.generation))
        new = [number for number in ids if number > one.last]
        if any(
            lo <= ids[-1] and ids[0] <= hi and pointer != request.write_pointer for lo, hi, *_, pointer in one.recent
        ):
            return problem(409, "sequence_consumed")
        if not new:
            known = next((each for each in one.recent if each[:2] == (ids[0], ids[-1])), (0, 0, None, None, None))
            return self._receipt(request, Receipt(known[2], known[3], self.generation, True, True, one.last))
        if len(new) < len(ids) and request.atomic:
            return problem(409, "partial_duplicate")
        dropped = ids[: -len(new)] if len(new) < len(ids) else []
        request.messages = request.messages[len(dropped) :]
        first, last = self._stored(request, new)
        one.last = new[-1]
        one.recent = [*one.recent[-4:], (new[0], new[-1], first, last, request.write_pointer)]
        receipt = Receipt(first, last, self.generation, False, True, one.last)
        if dropped:
            receipt.stored, receipt.dropped = new, dropped
        return self._receipt(request, receipt)

    def _refused(self, request: PublishRequest) -> Answer | None:
        if self.deleted:
            return problem(404, "topic_not_found")
        if request.generation not in (None, self.generation):
            return problem(409, "generation_changed")
        if any(message == b"too large" for message in request.messages):
            return problem(413, "message_too_large")
        one = self.producers.get(request.producer or "")
        if request.producer_epoch is None or not self.enabled:
            return None
        if one is None or request.producer_epoch > one.epoch:
            return problem(410, "producer_expired")
        return problem(409, "producer_fenced") if request.producer_epoch < one.epoch else None

    def _stored(self, request: PublishRequest, ids: list[Any]) -> tuple[bytes, bytes]:
        first = self._position
        self._position += len(request.messages)
        self.messages += [
            (request.producer, number, payload) for number, payload in zip(ids, request.messages, strict=True)
        ]
        return pack_id(1_700_000_000_000, first), pack_id(1_700_000_000_000, self._position - 1)

    def _receipt(self, request: PublishRequest, receipt: Receipt) -> Answer:
        if request.write_pointer is None:
            return Answer(200, {"content-type": AVRO_2.content_type}, AVRO_2.encode_receipt(receipt))
        at = 1_700_000_000_000
        response = PublishResponse(request.write_pointer, at, 0, at, len(request.messages) - 1, receipt.duplicate)
        headers = {"plainsong-last-sequence-id": str(receipt.last_sequence_id)}
        return Answer(200, headers, AVRO_2.encode_publish_response(response))

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, _, payload in self.messages]


def then_lost(happen: Callable[[], Answer]) -> Failure:
    """Carry out the request, and lose the answer."""
    happen()
    return LOST
