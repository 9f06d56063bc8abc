"""Requests and answers as they travel between instances: what of them counts, as plain values; bodies as they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from broker.cluster.held_answers import COLLECTED_BYTES, collected, held
from broker.http.answers import admitted
from broker.http.exchange import OWNER_HEADER, HotRequest, HttpAnswer
from broker.http.respond import begun
from broker.peering.answers import Reply
from broker.views.route import ViewRequest
from protocol.errors import MalformedBody
from protocol.page import Page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from actors.ownership import Instance
    from broker.http.answers import AnswerRoom
    from broker.http.exchange import BodyStream

#: What any handler reads. Bodies travel decompressed, and answers are compressed where the client is.
_HEADERS = ("content-type", "accept", "prefer")


def told_hot(request: HotRequest, waited_ms: int) -> list[Any]:
    """A request of a hot route, without its body."""
    where = [request.verb, request.namespace, request.topic, request.transaction, request.query]
    return [*where, _kept(request.headers), request.request_id, request.waited_ms + waited_ms]


def heard_hot(value: list[Any], body: bytes) -> HotRequest:
    """The request that ``told_hot`` told. Raises ValueError."""
    verb, namespace, topic, transaction, query, headers, request_id, waited_ms = value
    return HotRequest(verb, namespace, topic, query, headers, body, request_id, transaction, waited_ms)


def told_view(route: str, request: ViewRequest, waited_ms: int) -> list[Any]:
    """A request of any other route, without its body."""
    waited_ms += request.waited_ms
    return [route, dict(request.path), request.query, _kept(request.headers), request.request_id, waited_ms]


def heard_view(value: list[Any], body: bytes) -> tuple[str, ViewRequest]:
    """The route's name and the request that ``told_view`` told. Raises ValueError."""
    route, path, query, headers, request_id, waited_ms = value
    return route, ViewRequest(path, query, headers, body, request_id, waited_ms)


def told_answer(answer: HttpAnswer, room: AnswerRoom | None = None) -> Reply:
    """An answer, whole or as a stream, with the length of that if it is known; ``room`` holds it until it has left."""
    length = len(answer.body) if isinstance(answer.body, bytes) else answer.length
    headers = [list(each) for each in answer.headers]
    return Reply([answer.status, answer.content_type, headers, length], held(answer.body, room))


async def answered(answering: Awaitable[HttpAnswer], room: AnswerRoom, *, only_looks: bool) -> Reply:
    """An answer to be told, held in ``room``, its stream begun: what fails before its first byte is an error of its own.

    Args:
      only_looks: as ``admitted`` has it.
    Raises whatever ``answering`` does; nothing is held then.
    """
    try:
        answer = await answering
        if not isinstance(answer.body, bytes):
            answer.body = await begun(answer.body)
        return told_answer(await admitted(answer, room, only_looks=only_looks), room)
    except BaseException:
        room.release()
        raise


async def heard_answer(reply: Reply, owner: Instance | None) -> HttpAnswer:
    """The answer that ``told_answer`` told, with its owner's name on it, if any; a stream's first piece has come.

    Raises:
      ValueError: it is none. LinkBroken: before the first piece, or before the last one of an answer that is short.
    """
    status, content_type, headers, length = reply.value
    told = [(name, value) for name, value in headers]
    if isinstance(reply.body, bytes) or (length is not None and length <= COLLECTED_BYTES):
        body: bytes | BodyStream = await collected(reply.body)
    else:
        body = await begun(reply.body)
    if owner is not None:
        told.append((OWNER_HEADER, owner.address))
    return HttpAnswer(status, body, content_type, told, None if isinstance(body, bytes) else length)


def told_page(page: Page, room: AnswerRoom | None = None) -> Reply:
    """A page, whose messages are the body."""
    sizes = [len(part) for part in page.parts]
    return Reply([replace(page, parts=()), sizes], held(b"".join(page.parts), room))


async def heard_page(reply: Reply) -> Page:
    """The page that ``told_page`` told. Raises MalformedBody."""
    page, sizes = reply.value
    body = await collected(reply.body)
    if not isinstance(page, Page) or sum(sizes) != len(body):
        raise MalformedBody("this is no page")
    ends = list(accumulate(sizes))
    page.parts = [body[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return page


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _HEADERS if name in headers}
