"""Polls started by the listener without a task, and the same polls run in a task."""

from __future__ import annotations

from broker.http.messages import Request
from plainsong.protocol.codec import AVRO, JSON
from plainsong.protocol.names import TopicName
from plainsong.protocol.requests import PollRequest
from tests.handling import subject_of

JSON_TYPE = {"content-type": "application/json"}
AVRO_TYPE = {"content-type": "avro/binary"}
FRAMES = {"accept": "application/vnd.plainsong.frames"}
POINTERS = {"accept": "application/vnd.plainsong.frames;fields=pointer"}
NAME = TopicName("ns", "t")


def endpoint(daemon, name="poll"):
    return next(each for each in daemon.service.endpoints if each.route.name == name)


def asked(headers=JSON_TYPE, query="", topic="t", **wanted):
    codec = AVRO if headers["content-type"] == "avro/binary" else JSON
    content = codec.encode_poll(PollRequest(**wanted))
    return lambda: Request({"namespace": "ns", "topic": topic}, query, dict(headers), content)


def started(daemon, make):
    """Return the answer given without a task; None if it needs one."""
    answers, request = [], make()
    endpoint(daemon).handler(request, answers.append)
    if not answers:
        request.cancel()
        return None
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    return shown(answer)


async def answered(daemon, make):
    """Return the answer that a task renders."""
    polling = subject_of_polls(daemon)
    request = make()
    return shown(await polling._poll(polling._asked(request), request))


def subject_of_polls(daemon):
    (follow,) = [each for each in daemon.service.endpoints if each.route.name == "follow"]
    return subject_of(follow).polling


def shown(answer):
    body = answer.body if isinstance(answer.body, bytes) else None
    return answer.status, answer.content_type, sorted(answer.headers), body


async def same(daemon, make):
    """Poll both ways, check that the answers are equal, and return one."""
    found = started(daemon, make)
    assert found is not None
    assert found == await answered(daemon, make)
    return found
