"""The application behind hypercorn: every route as Quart sees it, each answer counted, nothing ever HTML."""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter
from typing import TYPE_CHECKING

import trio
from quart import Response, request
from quart_trio import QuartTrio as Application

from broker.cluster.routing import only_looks
from broker.http.answers import SMALL_BYTES, admitted
from broker.http.bodies import decoded_body, needs_decoding
from broker.http.exchange import HttpAnswer
from broker.http.quart_door import as_response, hot_rule, hot_view, install_errors, passage
from broker.http.respond import answer_to
from broker.views.route import ViewRequest
from protocol.errors import BodyTooLarge

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from broker.http.exchange import HotHandlers
    from broker.http.settings import HttpSettings
    from broker.service import Service
    from broker.views.route import Route

__all__ = ["UNKNOWN_ROUTE", "Application", "build_application"]

#: What answers of no route are counted under: their paths are not ours to name.
UNKNOWN_ROUTE = "unknown"


def build_application(
    service: Service, routes: Iterable[Route], handlers: HotHandlers, settings: HttpSettings
) -> Application:
    """The hot routes (for clients that the lane hands over) and ``routes``, errors as problems."""
    app = Application("plainsong", static_folder=None)
    install_errors(app, settings)
    methods: defaultdict[str, set[str]] = defaultdict(set)
    for verb, handler in handlers.items():
        rule = hot_rule(verb)
        app.add_url_rule(rule, verb, hot_view(verb, handler, settings), methods=["POST"], strict_slashes=True)
        methods[rule].add("POST")
    for route in routes:
        rule = rule_of(route.path)
        view = _view(service, route)
        app.add_url_rule(rule, route.name, view, methods=[route.method], strict_slashes=True)
        methods[rule] |= {"GET", "HEAD"} if route.method == "GET" else {route.method}
    for rule, allowed in methods.items():
        view = _options(allowed)
        app.add_url_rule(rule, f"OPTIONS {rule}", view, methods=["OPTIONS"], strict_slashes=True)
    _count_unknown(app, service)
    return app


def rule_of(path: str) -> str:
    """A path as the framework writes it. Names of producers are any text, slashes included."""
    return path.replace("{producer}", "<path:producer>").replace("{", "<").replace("}", ">")


def _view(service: Service, route: Route) -> Callable[..., Awaitable[Response]]:
    async def view(**path: str) -> Response:
        begun_s = perf_counter()
        through = passage()
        service.access.begin(through.request_id)
        try:
            body = await _read_small(route.max_body_bytes) if route.max_body_bytes else b""
            query = request.query_string.decode("latin-1")
            asked = ViewRequest(path, query, through.headers, body, through.request_id, room=through.room)
            answer = await route.view(service, asked)
            answer = await admitted(answer, through.room, only_looks=_may_be_refused(route, answer))
        except Exception as error:  # noqa: BLE001  # a bug is answered too, and logged
            answer = answer_to(error, through.request_id)
        seconds = perf_counter() - begun_s
        service.metrics.requested(route.name, answer.status, seconds)
        service.access.answered(route.name, request.path, answer.status, seconds, answer.headers)
        return as_response(answer)

    return view


def _may_be_refused(route: Route, answer: HttpAnswer) -> bool:
    """What says how the daemon is doing is small, and answered whatever else it is short of."""
    body = answer.body
    return only_looks(route) and not (isinstance(body, bytes) and len(body) <= SMALL_BYTES)


async def _read_small(max_bytes: int) -> bytes:
    """The body, decompressed; refused as soon as it is known to be larger than ``max_bytes``."""
    through = passage()
    announced = through.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.body:
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    if needs_decoding(through.headers):
        return await decoded_body(bytes(body), through.headers, max_bytes, through.held)
    return bytes(body)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"a body here may have {max_bytes} bytes", hint="this route takes no messages")


def _options(allowed: set[str]) -> Callable[..., Awaitable[Response]]:
    headers = [("Allow", ", ".join(sorted(allowed | {"OPTIONS"})))]

    async def view(**path: str) -> Response:
        return as_response(HttpAnswer(200, headers=headers))

    return view


def _count_unknown(app: Application, service: Service) -> None:
    async def counted(response: Response) -> Response:
        if request.url_rule is None:
            seconds = trio.current_time() - passage().started
            service.metrics.requested(UNKNOWN_ROUTE, response.status_code, seconds)
        return response

    app.after_request(counted)
