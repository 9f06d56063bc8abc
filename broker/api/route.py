"""A route: the one declaration of a method and path, from which listeners, forwarding, metrics and openapi.json follow."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from inspect import iscoroutinefunction
from time import perf_counter
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import trio

from broker.http.handlers import RequestCancelled
from broker.http.messages import Answer, BodyPieces, only_plain, status_of
from plainsong.protocol.codec import AVRO
from plainsong.protocol.codec.json_values import between_pieces, compact
from plainsong.protocol.errors import InvalidName
from plainsong.protocol.names import TopicName, topic_name
from storage.loop import nap

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from broker.api.schemas import Schema
    from broker.http.handlers import RequestTasks
    from broker.http.messages import Answered, Handler, Request
    from broker.logs import AccessLog
    from broker.security.identity import On, Verb
    from plainsong.protocol.codec import Codec

S = TypeVar("S")
T = TypeVar("T")
#: The largest body of a request that only says what to do.
SMALL_BODY_BYTES = 64 << 10
JSON_TYPE = "application/json"

#: Who answers a request: the owner of the topic in its path, of each topic in its body, of the transaction service, of
#: the invalid list (which has an owner also where a Tephra decides), or of the properties of namespaces.
Owner: TypeAlias = Literal["topic", "topics", "transactions", "invalid_list", "namespaces"]
#: The names whose owners have the transaction service and the properties of namespaces: no topic's namespace is empty.
TRANSACTIONS = TopicName("", "transactions")
NAMESPACES = TopicName("", "namespaces")


@dataclass(frozen=True, slots=True)
class Body:
    """What a route reads."""

    schema: Schema | None = None
    """None: it takes nothing that is worth a description."""
    max_bytes: int = SMALL_BODY_BYTES
    """Of a hot route the bound is ``http.max_body_bytes`` instead."""
    types: tuple[str, ...] = (JSON_TYPE,)
    example: object = None
    required: bool = True
    """Whether a request without one is refused."""


@dataclass(frozen=True, slots=True)
class Route(Generic[S]):
    """One method of one path."""

    name: str
    """In metrics, in logs, on links between instances, and the operation's id in the description."""
    method: str
    path: str
    """With places: ``/v1/namespaces/{namespace}/topics``."""
    subject: type[S]
    """Whose method the handler is; ``bind`` finds the object."""
    handler: Callable[[S, Request, Answered], None] | Callable[[S, Request], Awaitable[Answer]]
    """An ``async def`` runs in a task of its own."""
    _: KW_ONLY
    owner: Owner | None = None
    """None: any instance answers."""
    reads_only: bool = False
    """Nothing happens by answering it, so that it may be asked again elsewhere; true of every GET."""
    hot: bool = False
    """The lane serves it, whose body is bounded by the listener, and its requests are traced."""
    quick: bool = False
    """The lane serves it, though it takes no messages, if its body is short and not compressed; see ``in_lane``."""
    wait_ms: Callable[[Request], int] | None = None
    """How long a request asks to wait; 0 where that cannot be read. None: it never waits."""
    body: Body | None = None
    errors: tuple[str, ...] = ()
    """The codes it may answer."""
    verb: Verb | tuple[Verb, ...] | None
    """What a name needs to ask it; one of several will do. None: nothing, where ``on`` is ``name`` or ``nobody``."""
    on: On
    tag: str
    doc: str
    """What it does, in a sentence."""
    parameters: tuple[str, ...] = ()
    """Of the query; ``openapi`` describes each."""
    headers: tuple[str, ...] = ()
    """Of the request, beside those that every request may have; ``openapi`` describes each."""
    success: int = 200
    """The status of what succeeds."""
    answered: str = "done"
    """What that status says."""
    answer: Schema | None = None
    """Of that status; None: an empty body."""
    answer_types: tuple[str, ...] = (JSON_TYPE,)
    answer_headers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads_only", self.reads_only or self.method == "GET")
        assert (self.verb is None) == (self.on in ("name", "nobody")), self.name

    @property
    def in_lane(self) -> bool:
        """Whether the lane serves it."""
        return self.hot or self.quick

    @property
    def body_bytes(self) -> int:
        """The largest body of a request; of a hot route the listener's bound counts instead."""
        return 0 if self.body is None else self.body.max_bytes

    @property
    def may_wait(self) -> bool:
        """Whether a request may wait for something to come."""
        return self.wait_ms is not None or self.owner == "topics"

    @property
    def verbs(self) -> tuple[Verb, ...]:
        """The verbs of which one is needed; none where no verb is."""
        if self.verb is None:
            return ()
        return (self.verb,) if isinstance(self.verb, str) else self.verb


class Endpoint(NamedTuple):
    """A route, and the function that answers it in this process."""

    route: Route[Any]
    handler: Handler


def bind(routes: Iterable[Route[Any]], subjects: Iterable[object], tasks: RequestTasks) -> tuple[Endpoint, ...]:
    """Each route with its handler as a method of the subject that the route names; there is one object of each class."""
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
    """The name whose owner answers.

    None: any instance does, or the path has no valid name of a topic, which any instance can say. The names of
    ``topics`` stand in the body.
    """
    if owner == "topic":
        try:
            return topic_name(path["namespace"], path["topic"])
        except InvalidName:
            return None
    if owner in ("transactions", "invalid_list"):
        return TRANSACTIONS
    return NAMESPACES if owner == "namespaces" else None


# --- answers ---------------------------------------------------------------------------------------


def json_answer(value: Any, *, headers: list[tuple[str, str]] | None = None) -> Answer:
    """``value`` as an answer of status 200."""
    body = compact(value).encode()
    return Answer(200, body, JSON_TYPE, headers or [])


#: Bodies longer than this are decoded off the event loop: everybody else would wait for them. Measured at
#: 10 ns a byte for JSON; version 1 of Avro is so much faster that only its very large bodies are worth a thread.
LOOP_BYTES = 256 * 1024
LOOP_AVRO_BYTES = 4 * 1024 * 1024
#: What is longer than this has a thread of its own, so that what is not need not wait for it; large answers likewise.
LARGE_BYTES = 4 * 1024 * 1024
#: Answers up to this size are sent as one: that is sooner done than to send each of their pieces.
JOINED_BYTES = 2 * 1024 * 1024


async def off_loop(size: int, codec: Codec, work: Callable[[], T]) -> T:
    """Do ``work`` here, or in a thread when it is about so many bytes that others would notice.

    There are two threads for it in all, one of them for what is large. It holds the interpreter's lock, so that more
    would do no more of it; but each takes the lock from the event loop. A large JSON body is parsed in pieces, and
    between them the thread sleeps long enough for the loop to get the lock.
    """
    if size <= (LOOP_AVRO_BYTES if codec is AVRO else LOOP_BYTES):
        return work()
    return await trio.to_thread.run_sync(_politely, work, limiter=_limiter(_large if size > LARGE_BYTES else _medium))


def _politely(work: Callable[[], T]) -> T:
    """In a thread of ``off_loop``, whose context is its own."""
    between_pieces.set(_let_the_loop_run)
    return work()


def _let_the_loop_run() -> None:
    nap(0.0001)


async def in_steps(size: int, pieces: Iterator[bytes], *, at_once_bytes: int = LOOP_BYTES) -> list[bytes]:
    """The pieces of an answer, which are about ``size`` bytes together; those of a small one at once.

    A large one is made on the event loop, a piece in each of its turns, and the next one when it is done: however many
    ask for large pages at the same time, a turn has two pieces in it at most. Answers of up to ``LARGE_BYTES`` do not
    wait for longer ones. In a thread they would not be made faster, since encoding holds the interpreter's lock, and
    each time that the event loop calls the system it would have to wait for that lock.
    """
    if size <= at_once_bytes:
        return list(pieces)
    made = []
    async with _limiter(_large_answers if size > LARGE_BYTES else _medium_answers):
        for piece in pieces:
            if piece:
                made.append(piece)
            await trio.lowlevel.checkpoint()
    return made


def body_of(made: list[bytes]) -> bytes | BodyPieces:
    """Pieces as the body of an answer: those of a large one are not joined, which would hold the event loop."""
    return b"".join(made) if sum(map(len, made)) <= JOINED_BYTES else BodyPieces(made)


_medium_answers: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("medium answers")
_large_answers: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("large answers")
_medium: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("medium work off the loop")
_large: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("large work off the loop")


def _limiter(of: trio.lowlevel.RunVar[trio.CapacityLimiter]) -> trio.CapacityLimiter:
    try:
        return of.get()
    except LookupError:
        limiter = trio.CapacityLimiter(1)
        of.set(limiter)
        return limiter


# --- accounting ------------------------------------------------------------------------------------


class CountAnswers(Protocol):
    """Counts answers by route and status: ``Metrics.requested``, or a front end's message to the owning process."""

    def __call__(self, route: str, status: int, seconds: float, requests: int = 1, /) -> None:
        """``requests`` of them were answered as one."""
        ...


@dataclass(frozen=True, slots=True)
class Accounting:
    """Counts answers, and writes a line for each where ``log.access`` asks for it."""

    requested: CountAnswers
    access: AccessLog


def accounted(endpoint: Endpoint, accounting: Accounting) -> Endpoint:
    """A hot route whose answers are counted and logged, whichever listener the request came by.

    Those of other routes are counted where their bodies are read, since reading one may fail.
    """
    route, handler = endpoint
    if not route.hot:
        return endpoint
    requested, access = accounting.requested, accounting.access

    def handle(request: Request, answered: Answered) -> None:
        begun_s = perf_counter()

        def account(outcome: Answer | Exception) -> None:
            took_s = perf_counter() - begun_s
            answered(outcome)  # the client need not wait for what follows
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
    """The status that a handler's error is answered with."""
    plain = only_plain(error)
    return 500 if plain is None else status_of(plain)


def _target(path: Mapping[str, str]) -> str:
    return f"{path['namespace']}:{path['topic']}" if "topic" in path else path.get("transaction", "")
