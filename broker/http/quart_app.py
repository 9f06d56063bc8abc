"""The application: all routes for Quart, with accounting of answers and with errors as problem+json, never HTML."""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import cache, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote_to_bytes

import trio
from quart import Response, request
from quart.routing import QuartMap, QuartRule
from quart.wrappers.response import DataBody
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import HTTPException
from werkzeug.routing import BaseConverter

from broker.http.acceptance import Acceptance
from broker.http.gate import EXCHANGE
from broker.http.handlers import WAITED_MS, answer_of
from broker.http.heads import content_length
from broker.http.messages import Answer, Request, answer_for, status_of
from broker.http.wire import admitted, answer_to, compress, may_be_refused, respond
from plainsong.protocol.errors import (
    BadRequest,
    BodyTooLarge,
    Internal,
    InvalidName,
    MethodNotAllowed,
    NotFound,
    PlainsongError,
    UnsupportedMediaType,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from quart import Quart

    from broker.config.sections import HttpConfig
    from broker.http.gate import Exchange
    from broker.http.route import Accounting, Endpoint, Route

__all__ = ["UNKNOWN_ROUTE", "Application", "build_application"]
log = logging.getLogger("plainsong.http")
#: The name under which requests to unknown paths are counted.
UNKNOWN_ROUTE = "unknown"


class _Rule(QuartRule):
    """A rule that matches paths, but cannot build them.

    Nothing here builds paths. Werkzeug's compilation of that code took most of the time to create the application, for
    which the first request has to wait.
    """

    def _compile_builder(self, append_unknown: bool = True) -> Callable[..., NoReturn]:
        return _makes_no_paths


def _makes_no_paths(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("a route cannot be turned into a path here")


class _Call(TrioASGIHTTPConnection):
    """One request. A body is received once a view wants it, since that asks a waiting client to send it."""

    async def handle_messages(self, nursery: trio.Nursery, request: Any, receive: Any) -> None:  # type: ignore[override]
        through = _exchange_of(self.scope)
        if "expect" in through.headers and self.scope["http_version"] < "2":
            await through.wants_body.wait()
        await super().handle_messages(nursery, request, receive)


class Application(QuartTrio):
    url_rule_class = _Rule  # type: ignore[assignment]  # as Quart does
    asgi_http_class = _Call


def build_application(endpoints: Iterable[Endpoint], settings: HttpConfig, accounting: Accounting) -> Application:
    """Build the application of all routes, including the hot ones: for HTTP/2, and for unusual requests to those."""
    endpoints = tuple(endpoints)
    acceptance = Acceptance(endpoints)
    app = Application("plainsong", static_folder=None)
    install_errors(app)
    app.url_map = _map_of(tuple((route.name, route.method, route.path) for route, _ in endpoints))
    methods: defaultdict[str, set[str]] = defaultdict(set)
    for endpoint in endpoints:
        route = endpoint.route
        app.view_functions[route.name] = (
            hot_view(endpoint, settings, acceptance) if route.hot else _view(endpoint, settings, acceptance, accounting)
        )
        methods[rule_of(route.path)] |= {"GET", "HEAD"} if route.method == "GET" else {route.method}
    for rule, allowed in methods.items():
        app.view_functions[f"OPTIONS {rule}"] = _options(allowed)
    _count_unknown(app, accounting)
    return app


@cache
def _map_of(routes: tuple[tuple[str, str, str], ...]) -> QuartMap:
    """Return the map from method and path to the name of a view; ``routes`` are names, methods and paths.

    Cached, since parsing the rules takes two thirds of the time to create an application.
    """
    found = QuartMap(merge_slashes=False, converters={"anytext": _AnyText})
    for name, method, path in routes:
        found.add(_Rule(rule_of(path), endpoint=name, methods=[method]))
    for rule in dict.fromkeys(rule_of(path) for _, _, path in routes):
        found.add(_Rule(rule, endpoint=f"OPTIONS {rule}", methods=["OPTIONS"]))
    return found


class _AnyText(BaseConverter):
    """The rest of a path, including slashes and line ends."""

    part_isolating = False
    regex = r"[\s\S]+"


def rule_of(path: str) -> str:
    """Return a path in the framework's syntax. Names of producers and files may be any text."""
    for name in ("producer", "file"):
        path = path.replace(f"{{{name}}}", f"<anytext:{name}>")
    return path.replace("{", "<").replace("}", ">")


def _places(route: Route[Any], path: dict[str, str]) -> dict[str, str]:
    """Return ``path`` with the producer's name decoded from the raw path: the framework replaces invalid UTF-8.

    Raises InvalidName.
    """
    if "producer" not in path:
        return path
    # The name is the end of the path, and may contain slashes.
    sent = request.scope["raw_path"].split(b"/", route.path.count("/"))[-1]
    try:
        return {**path, "producer": unquote_to_bytes(sent).decode()}
    except UnicodeDecodeError:
        raise InvalidName("the producer's name is not UTF-8", hint="percent-encode its UTF-8 bytes") from None


def _view(
    endpoint: Endpoint, settings: HttpConfig, acceptance: Acceptance, accounting: Accounting
) -> Callable[..., Awaitable[Response]]:
    route, handler = endpoint
    max_bytes = route.body_bytes

    async def view(**path: str) -> Response:
        begun_s = perf_counter()
        through = exchange()
        accounting.access.begin(through.request_id)
        try:
            through.enter(route, path)
            asked = _asked(through, _places(route, path))
            asked.body = await _read_small(max_bytes) if max_bytes else b""
            answer = await acceptance.decode(route, asked, through.reservation, max_bytes, settings.body_timeout_s)
            if answer is None:
                answering = partial(answer_of, handler)
                ends = route.reads_only or route.ends_with_client
                answer = await _answered(answering, asked, through, ends_with_client=ends)
            if not isinstance(answer.body, bytes):
                through.stream = answer.body
                if request.method == "HEAD":  # a stream may never end
                    answer.body, answer.length = b"", None
            answer = await admitted(answer, through.room, only_looks=route.reads_only and may_be_refused(answer))
        except Exception as error:  # noqa: BLE001  # a bug is answered too, and logged
            answer = answer_to(error, through.request_id)
        seconds = perf_counter() - begun_s
        accounting.answered(route, request.path, answer, seconds)
        return as_response(answer)

    return view


def _asked(through: Exchange, path: Mapping[str, str]) -> Request:
    """Return the current request, without its body."""
    query = request.query_string.decode("latin-1")
    admission = through.admission
    return Request(
        path,
        query,
        through.headers,
        request_id=through.request_id,
        room=through.room,
        who=admission.who,
        rights=admission.rights,
        peer=through.peer,
    )


async def _answered(
    answer: Callable[[Request], Awaitable[Answer]], asked: Request, through: Exchange, *, ends_with_client: bool
) -> Answer:
    """Return the answer to a request, which may wait for something if it ends when the client leaves.

    A half-closed client is answered without further waiting; a request whose room is needed for others is refused.
    """
    if not ends_with_client:
        return await answer(asked)
    held = through.reservation
    with trio.CancelScope() as waiting, through.sending_end.telling(waiting.cancel):
        held.may_give_way(waiting.cancel)
        try:
            return await answer(asked)
        finally:
            held.keeps()
    if held.gave_way:
        return answer_for(held.refusal())
    asked.waited_ms = WAITED_MS
    return await answer(asked)


async def _read_small(max_bytes: int) -> bytes:
    """Return the body as sent. Raises BodyTooLarge as soon as it is known to exceed ``max_bytes``."""
    through = exchange()
    if (content_length(through.headers.get("content-length", "")) or 0) > max_bytes:
        raise _too_large(max_bytes)
    through.wants_body.set()
    body = bytearray()
    async for chunk in request.body:
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"a body is limited to {max_bytes} bytes on this route", hint="this route accepts no messages")


def _options(allowed: set[str]) -> Callable[..., Awaitable[Response]]:
    headers = [("Allow", ", ".join(sorted(allowed | {"OPTIONS"})))]

    async def view(**path: str) -> Response:
        return as_response(Answer(200, headers=headers))

    return view


def _count_unknown(app: Application, accounting: Accounting) -> None:
    async def counted(response: Response) -> Response:
        if request.url_rule is None:
            seconds = trio.current_time() - exchange().started
            accounting.requested(UNKNOWN_ROUTE, response.status_code, seconds)
        return response

    app.after_request(counted)


def exchange() -> Exchange:
    """Return the current request's state in the gate: its id, its joined headers, its reservations."""
    return _exchange_of(request.scope)


def _exchange_of(scope: Any) -> Exchange:
    found: Exchange = scope["extensions"][EXCHANGE]  # set by the gate
    return found


def hot_view(endpoint: Endpoint, settings: HttpConfig, acceptance: Acceptance) -> Callable[..., Awaitable[Response]]:
    """Return a view whose answers are the same, byte for byte, as without the application."""
    route, handler = endpoint

    async def view(**path: str) -> Response:
        through = exchange()
        try:
            through.enter(route, path)
        except PlainsongError as error:
            through.guard.answered(route.name, request.path, status_of(error), through.request_id)
            raise
        asked = _asked(through, path)
        through.wants_body.set()
        asked.body = await request.body  # the gate has checked its size
        held, max_bytes = through.reservation, settings.max_body_bytes
        answer = await acceptance.decode(route, asked, held, max_bytes, settings.body_timeout_s)
        if answer is None:
            answering = partial(respond, handler)
            answer = await _answered(answering, asked, through, ends_with_client=route.reads_only)
        return as_response(await admitted(answer, through.room, only_looks=route.reads_only))

    return view


def as_response(answer: Answer) -> Response:
    """Return ``answer`` as Quart's response."""
    response = Response(answer.body, answer.status)
    response.headers.clear()
    if answer.content_type is not None:
        response.headers["Content-Type"] = answer.content_type
    if isinstance(answer.body, bytes) and answer.status not in (204, 304):
        response.headers["Content-Length"] = str(len(answer.body))
    elif answer.length is not None:
        response.headers["Content-Length"] = str(answer.length)
    for name, value in answer.headers:
        response.headers.add(name, value)
    response.timeout = None  # sends have their own deadlines, and a stream may last forever
    return response


def install_errors(app: Quart) -> None:
    """Make ``app`` answer all errors as problems, and compress the answers of its other routes."""
    # The gate has its own bounds and time-outs.
    app.config.update(
        MAX_CONTENT_LENGTH=None, BODY_TIMEOUT=None, RESPONSE_TIMEOUT=None, PROVIDE_AUTOMATIC_OPTIONS=False
    )

    async def on_error(error: Exception) -> Response:
        allow = getattr(error, "valid_methods", None) or ()
        if isinstance(error, HTTPException):
            return as_response(answer_for(_plain(error), allow=allow))
        return as_response(answer_to(error, exchange().request_id))

    async def compressed(response: Response) -> Response:
        if (
            isinstance(response.response, DataBody)
            and "Vary" not in response.headers
            and request.method != "HEAD"
            and response.status_code != 304
        ):
            answer = Answer(response.status_code, await response.get_data(as_text=False))
            await compress(answer, exchange().headers.get("accept-encoding"))
            for name, value in answer.headers:
                response.headers[name] = value
            response.set_data(answer.body)  # type: ignore[arg-type]
        return response

    app.register_error_handler(Exception, on_error)
    app.register_error_handler(HTTPException, on_error)
    app.after_request(compressed)


def _plain(error: HTTPException) -> PlainsongError:
    """Return our error for one that the framework raised."""
    match error.code:
        case 404:
            return NotFound(f"there is nothing at {request.path}", hint=_elsewhere(request.path))
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


def _elsewhere(path: str) -> str:
    """Return a hint for a path that does not exist."""
    return f"try {path.rstrip('/')}" if path.endswith("/") and path.strip("/") else ""
