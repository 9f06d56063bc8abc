"""A route: the one declaration of a method and path. Listeners, forwarding, metrics and openapi.json use it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from inspect import iscoroutinefunction
from time import perf_counter
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from broker.http.budgets import SMALL_BODY_BYTES
from broker.http.handlers import RequestCancelled
from broker.http.messages import Answer, only_plain, status_of
from broker.logs import AccessLog
from plainsong.protocol.errors import InvalidName
from plainsong.protocol.names import topic_name
from storage.base import NAMESPACES_NAME, SERVICE_NAME

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from broker.http.handlers import RequestTasks
    from broker.http.messages import Answered, Handler, Request
    from broker.security.identity import On, Verb
    from plainsong.protocol.names import TopicName

S = TypeVar("S")
JSON_TYPE = "application/json"

#: The instance that answers a request: the owner of the topic in its path, of each topic in its body, of the
#: transaction service, of the invalid list (which has an owner even where Tephra decides), or of the properties of
#: namespaces.
Owner: TypeAlias = Literal["topic", "topics", "transactions", "invalid_list", "namespaces"]


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a route's requests."""

    schema: dict[str, Any] | None = None
    """A JSON schema; None: not described."""
    max_bytes: int = SMALL_BODY_BYTES
    """For a hot route ``http.max_body_bytes`` applies instead."""
    types: tuple[str, ...] = (JSON_TYPE,)
    example: object = None
    required: bool = True
    """True if a request without a body is refused."""


@dataclass(frozen=True, slots=True)
class Route(Generic[S]):
    """One method of one path."""

    name: str
    """In metrics, logs, and links between instances; the operation id in openapi.json."""
    method: str
    path: str
    """A template: ``/v1/namespaces/{namespace}/topics``."""
    subject: type[S]
    """The class that has the handler; ``bind`` finds its instance."""
    handler: Callable[[S, Request, Answered], None] | Callable[[S, Request], Awaitable[Answer]]
    """An ``async def`` runs in its own task."""
    _: KW_ONLY
    owner: Owner | None = None
    """None: any instance answers."""
    reads_only: bool = False
    """True if answering changes nothing, so that the request may be repeated elsewhere; always true for GET."""
    ends_with_client: bool = False
    """True if its handler is cancelled when the client leaves, like one that only reads. It is then called again with
    ``Request.waited_ms``, and answers at once. Not for hot routes."""
    hot: bool = False
    """True if the listener calls its handler without the application; its requests are traced."""
    quick: bool = False
    """Like ``hot``, for a route without messages, if the body is short and not compressed; see ``is_direct``."""
    wait_ms: Callable[[Request], int] | None = None
    """Returns the wait that a request asks for; 0 if it cannot be decoded. None: the route never waits."""
    body: Body | None = None
    errors: tuple[str, ...] = ()
    """Error codes that it may answer with."""
    verb: Verb | tuple[Verb, ...] | None
    """The verb that a name needs, or any one of several. None: no verb, when ``on`` is ``name`` or ``nobody``."""
    on: On
    tag: str
    doc: str
    """A sentence for openapi.json."""
    parameters: tuple[str, ...] = ()
    """Query parameters; ``openapi`` describes each."""
    headers: tuple[str, ...] = ()
    """Request headers in addition to those of every route; ``openapi`` describes each."""
    success: int = 200
    """The status of a successful answer."""
    answered: str = "done"
    """The description of that status."""
    answer: Any = None
    """The type of a successful answer's body, see ``plainsong.protocol.answers``; None if it is empty."""
    answer_types: tuple[str, ...] = (JSON_TYPE,)
    answer_headers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads_only", self.reads_only or self.method == "GET")
        assert (self.verb is None) == (self.on in ("name", "nobody")), self.name

    @property
    def is_direct(self) -> bool:
        """True if the listener may call its handler without the application."""
        return self.hot or self.quick

    @property
    def body_bytes(self) -> int:
        """The largest body of a request; a hot route has the listener's bound instead."""
        return 0 if self.body is None else self.body.max_bytes

    @property
    def may_wait(self) -> bool:
        """True if a request may wait for messages."""
        return self.wait_ms is not None or self.owner == "topics"

    @property
    def verbs(self) -> tuple[Verb, ...]:
        """The verbs, any one of which is sufficient; empty if none is needed."""
        if self.verb is None:
            return ()
        return (self.verb,) if isinstance(self.verb, str) else self.verb


class Endpoint(NamedTuple):
    """A route, and its handler in this process."""

    route: Route[Any]
    handler: Handler


def bind(routes: Iterable[Route[Any]], subjects: Iterable[object], tasks: RequestTasks) -> tuple[Endpoint, ...]:
    """Return each route with its handler bound to the subject of the route's class."""
    by_class = {type(subject): subject for subject in subjects}
    return tuple(Endpoint(each, _bound(each, by_class[each.subject], tasks)) for each in routes)


def _bound(route: Route[Any], subject: object, tasks: RequestTasks) -> Handler:
    method: Any = MethodType(route.handler, subject)
    return tasks.adapt(method) if iscoroutinefunction(route.handler) else partial(_handle, method)


def _handle(handler: Handler, request: Request, answered: Answered) -> None:
    try:
        handler(request, answered)
    except Exception as error:  # noqa: BLE001  # the caller receives it
        answered(error)


def owned_name(owner: Owner | None, path: Mapping[str, str]) -> TopicName | None:
    """Return the name whose owner answers.

    None: any instance answers. This includes a path with an invalid topic name, which any instance can refuse, and the
    owner ``topics``, whose names are in the body.
    """
    if owner == "topic":
        try:
            return topic_name(path["namespace"], path["topic"])
        except InvalidName:
            return None
    if owner in ("transactions", "invalid_list"):
        return SERVICE_NAME
    return NAMESPACES_NAME if owner == "namespaces" else None


# --- accounting ------------------------------------------------------------------------------------


class CountAnswers(Protocol):
    """Counts answers by route and status: ``Metrics.requested``, or a front end's message to the owner process."""

    def __call__(self, route: str, status: int, seconds: float, requests: int = 1, /) -> None:
        """Count ``requests`` requests that were answered as one."""
        ...


@dataclass(frozen=True, slots=True)
class Accounting:
    """Counts answers, and writes a line for each if ``log.access`` is on."""

    requested: CountAnswers
    access: AccessLog

    def answered(
        self, route: Route[Any], target: str, answer: Answer, seconds: float, request_id: str | None = None
    ) -> None:
        """Count and log one answer; see ``AccessLog.answered``."""
        self.requested(route.name, answer.status, seconds)
        self.access.answered(route.name, target, answer.status, seconds, answer.headers, request_id)


NO_ACCOUNTING = Accounting(lambda *_: None, AccessLog(enabled=False))


def accounted(endpoint: Endpoint, accounting: Accounting) -> Endpoint:
    """Wrap a hot route so that its answers are counted and logged, whichever listener the request used.

    Answers of other routes are counted where their bodies are read, since that can fail.
    """
    route, handler = endpoint
    if not route.hot:
        return endpoint
    requested, access = accounting.requested, accounting.access

    def handle(request: Request, answered: Answered) -> None:
        begun_s = perf_counter()

        def account(outcome: Answer | Exception) -> None:
            took_s = perf_counter() - begun_s
            answered(outcome)  # first, so that the client does not wait for the rest
            if isinstance(outcome, RequestCancelled):
                return
            status = status_to(outcome) if isinstance(outcome, Exception) else outcome.status
            requested(route.name, status, took_s)
            if access.enabled:
                headers = () if isinstance(outcome, Exception) else outcome.headers
                access.answered(route.name, _target(request.path), status, took_s, headers, request.request_id)

        handler(request, account)

    return Endpoint(route, handle)


def status_to(error: BaseException) -> int:
    """Return the status that a handler's error is answered with."""
    plain = only_plain(error)
    return 500 if plain is None else status_of(plain)


def _target(path: Mapping[str, str]) -> str:
    return f"{path['namespace']}:{path['topic']}" if "topic" in path else path.get("transaction", "")
