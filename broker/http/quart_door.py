"""The hot routes as Quart sees them, for clients the lane hands over; and errors of all routes as problems."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from quart import Response, request
from quart.wrappers.response import DataBody
from werkzeug.exceptions import HTTPException

from broker.http.answers import admitted
from broker.http.bodies import BodyBudget, decoded_body, needs_decoding
from broker.http.compression import compress
from broker.http.exchange import HOT_PATHS, HotHandler, HotRequest, HttpAnswer, Verb
from broker.http.gate import PASSAGE, Passage
from broker.http.respond import answer_to, respond
from broker.http.status import answer_for
from protocol.errors import (
    BadRequest,
    BodyTooLarge,
    Internal,
    MethodNotAllowed,
    NotFound,
    PlainsongError,
    UnsupportedMediaType,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from quart import Quart

    from broker.http.settings import HttpSettings

log = logging.getLogger("plainsong.http")


def passage() -> Passage:
    """The current request's way through the gate: its id, its joined headers, what its body holds."""
    scope: Any = request.scope
    found = scope.get("extensions", {}).get(PASSAGE)
    return found if found is not None else Passage(scope, BodyBudget(1 << 62))  # an application without a server


def hot_rule(verb: Verb) -> str:
    """The path of a hot route as the framework writes it."""
    return HOT_PATHS[verb].replace("{", "<").replace("}", ">")


def hot_view(verb: Verb, handler: HotHandler, settings: HttpSettings) -> Callable[..., Awaitable[Response]]:
    """A view for ``hot_rule(verb)`` that answers as the lane does, byte for byte."""

    async def view(namespace: str = "", topic: str = "", transaction: str = "") -> Response:
        through = passage()
        body = await read_body(settings)
        query = request.query_string.decode("latin-1")
        asked = (verb, namespace, topic, query, through.headers, body, through.request_id, transaction)
        answer = await respond(handler, HotRequest(*asked, room=through.room), settings.gzip_min_bytes)
        return as_response(await admitted(answer, through.room, only_looks=verb == "poll"))

    return view


async def read_body(settings: HttpSettings) -> bytes:
    """The current request's body, decompressed; the gate has seen to its size as sent.

    Raises:
      UnsupportedMediaType, MalformedBody, BodyTooLarge, Overloaded: as ``decoded_body`` does.
    """
    body: bytes = await request.body
    through = passage()
    if needs_decoding(through.headers):
        return await decoded_body(body, through.headers, settings.max_body_bytes, through.held)
    return body


def as_response(answer: HttpAnswer) -> Response:
    """``answer`` for Quart."""
    response = Response(answer.body, answer.status)
    response.headers.clear()
    if answer.content_type is not None:
        response.headers["Content-Type"] = answer.content_type
    if isinstance(answer.body, bytes):
        response.headers["Content-Length"] = str(len(answer.body))
    elif answer.length is not None:
        response.headers["Content-Length"] = str(answer.length)
    for name, value in answer.headers:
        response.headers.add(name, value)
    response.timeout = None  # sends have their own deadlines, and a stream may be long
    return response


def install_errors(app: Quart, settings: HttpSettings) -> None:
    """Makes ``app`` answer every error as a problem, never redirect, and compress what its other routes answer."""
    # Bounds and time-outs are the gate's.
    app.config.update(
        MAX_CONTENT_LENGTH=None, BODY_TIMEOUT=None, RESPONSE_TIMEOUT=None, PROVIDE_AUTOMATIC_OPTIONS=False
    )
    app.url_map.merge_slashes = False
    app.url_map.strict_slashes = False

    async def on_error(error: Exception) -> Response:
        allow = getattr(error, "valid_methods", None) or ()
        if isinstance(error, HTTPException):
            return as_response(answer_for(_plain(error), allow=allow))
        return as_response(answer_to(error, passage().request_id))

    async def compressed(response: Response) -> Response:
        if isinstance(response.response, DataBody) and "Vary" not in response.headers and request.method != "HEAD":
            answer = HttpAnswer(response.status_code, await response.get_data(as_text=False))
            await compress(answer, passage().headers.get("accept-encoding"), settings.gzip_min_bytes)
            for name, value in answer.headers:
                response.headers[name] = value
            response.set_data(answer.body)  # type: ignore[arg-type]
        return response

    app.register_error_handler(Exception, on_error)
    app.register_error_handler(HTTPException, on_error)
    app.after_request(compressed)


def _plain(error: HTTPException) -> PlainsongError:
    """Our word for an error that the framework found."""
    match error.code:
        case 404:
            return NotFound(f"there is nothing at {request.path}")
        case 405:
            return MethodNotAllowed(f"{request.method} is not allowed at {request.path}")
        case 413:
            return BodyTooLarge()
        case 415:
            return UnsupportedMediaType()
        case int(code) if 400 <= code < 500:
            return BadRequest(error.description or "")
    log.error("the framework failed", exc_info=error)
    return Internal()
