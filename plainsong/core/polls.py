"""Polls: of one topic in frames, of many in JSON; and looking at messages without consuming them."""

from __future__ import annotations

import json
from base64 import b64decode
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from plainsong.core.answers import problem_error
from plainsong.core.attempts import Call
from plainsong.core.calls import as_json, json_of, namespace_path, topic_path
from plainsong.core.effects import Request
from plainsong.ids import MessageId
from plainsong.messages import BatchPlace, Held, Message, Origin, Page, Seen
from plainsong.protocol.codec import AVRO_2, JSON
from plainsong.protocol.errors import MalformedBody, PlainsongError
from plainsong.protocol.frames import FRAMES_TYPE, decode_frames

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plainsong.core.effects import Answer
    from plainsong.protocol.requests import Isolation, PollRequest

_HEADERS = (("Content-Type", AVRO_2.content_type), ("Accept", FRAMES_TYPE + "; version=2"))
_JSON = (("Content-Type", "application/json"),)
_ENDS = ("end", "more", "held")


def poll(namespace: str, origin: Origin, request: PollRequest) -> Call[Page]:
    """``POST /{t}/poll``, answered with frames."""
    body = AVRO_2.encode_poll(request)
    path = topic_path(namespace, origin.topic, "/poll")
    return Call(
        Request("POST", path, _HEADERS, body), partial(_read_page, origin), wait_s=(request.wait_ms or 0) / 1000
    )


def _read_page(origin: Origin, answer: Answer) -> Page:
    content_type = answer.headers.get("content-type", "")
    if not content_type.startswith(FRAMES_TYPE):
        raise MalformedBody(f"frames were asked for, {content_type[:80]!r} came")
    messages = decode_frames(answer.body, partial(Message, origin), attributes="version=2" in content_type)
    end = answer.headers.get("plainsong-end", "end")
    if end not in _ENDS:
        raise MalformedBody(f"Plainsong-End is {end[:20]!r}")
    last_id = answer.headers.get("plainsong-last-id")
    held = _held(answer.headers) if end == "held" else None
    return Page(messages, None if last_id is None else MessageId(last_id), end, held)  # type: ignore[arg-type] # checked


def _held(headers: Mapping[str, str]) -> Held | None:
    """What the answer's headers say of whom it is held by."""
    if "plainsong-held-by" not in headers:
        return None
    return _held_by(
        headers["plainsong-held-by"], headers.get("plainsong-held-since"), headers.get("plainsong-hidden-messages")
    )


def _held_by(pointer: int | str, since_ms: int | str | None, hidden: int | str | None) -> Held:
    counted = None if hidden is None else str(hidden)
    return Held(
        int(pointer),
        None if since_ms is None else int(since_ms),
        None if counted is None else int(counted.rstrip("+")),
        counted is not None and counted.endswith("+"),
    )


def poll_many(
    namespace: str,
    origins: Mapping[str, Origin],
    topics: Mapping[str, PollRequest],
    *,
    wait_ms: int,
    limit: int,
    isolation: Isolation | None = None,
) -> Call[dict[str, Page | PlainsongError]]:
    """``POST /poll`` of a namespace: of each topic its page, or what is wrong with it."""
    asked = {topic: json.loads(JSON.encode_poll(_without_isolation(request))) for topic, request in topics.items()}
    body = as_json(
        {"topics": asked, "waitMs": wait_ms, "limit": limit} | ({"isolation": isolation} if isolation else {})
    )

    def read(answer: Answer) -> dict[str, Page | PlainsongError]:
        told = json_of(answer)["topics"]
        return {topic: _one_of_many(origins[topic], told[topic]) for topic in topics}

    path = namespace_path(namespace) + "/poll?payload=base64"
    return Call(Request("POST", path, _JSON, body), read, wait_s=wait_ms / 1000)


def _without_isolation(request: PollRequest) -> PollRequest:
    """It is said once, for all topics."""
    request.isolation = None
    return request


def _one_of_many(origin: Origin, told: Mapping[str, Any]) -> Page | PlainsongError:
    if "error" in told:
        return problem_error(told["error"])
    if told["end"] not in _ENDS:
        raise MalformedBody("a page that ends in no known way")
    messages = [
        Message(origin, bytes.fromhex(each["id"]), _payload(each["payload"]), 0, each.get("attributes") or {})
        for each in told["messages"]
    ]
    held = None
    if "heldBy" in told:
        held = _held_by(told["heldBy"], told.get("heldSince"), told.get("hiddenMessages"))
    return Page(messages, None if told["lastId"] is None else MessageId(told["lastId"]), told["end"], held)


def _payload(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else b64decode(value["base64"], validate=True)


def look(
    namespace: str, topic: str, start: bytes | int | None, until: bytes | int | None, limit: int | None
) -> Call[Sequence[Seen]]:
    """``GET /{t}/messages``."""
    query: dict[str, Any] = {"payload": "base64"}
    for name, bound in (("from", start), ("to", until)):
        if bound is not None:
            query[name] = bound.hex() if isinstance(bound, bytes) else bound
    if limit is not None:
        query["limit"] = limit

    def read(answer: Answer) -> Sequence[Seen]:
        return [_seen(each) for each in json_of(answer)]

    return Call(Request("GET", topic_path(namespace, topic, "/messages?" + urlencode(query))), read)


def _seen(told: Mapping[str, Any]) -> Seen:
    message_id = MessageId(told["id"])
    payload = _payload(told["payload"]) if "payload" in told else b""
    batch = told.get("batch")
    return Seen(
        id=message_id,
        state=told["state"],
        payload=payload,
        publish_time_ms=message_id.publish_time_ms,
        expires_ms=told.get("expiresMs"),
        size=told.get("size", len(payload)),
        write_pointer=told.get("writePointer"),
        attributes=told.get("attributes") or {},
        producer=told.get("producer"),
        sequence_id=told.get("sequenceId"),
        batch=None if batch is None else BatchPlace(batch["index"], batch["count"]),
        detail=told.get("detail", ""),
    )
