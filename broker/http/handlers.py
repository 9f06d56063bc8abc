"""The one form of a handler: it receives a request and a callback for the answer, and calls the callback exactly once.

A handler that only asks an actor answers within the actor's turn. One that waits for something else is an ``async
def``; ``RequestTasks`` turns it into a handler, and is the only place where a request gets a task.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from actors.mailbox import Future
from broker.logs import request_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from broker.http.messages import Answer, Answered, AsyncHandler, Handler, Request

A = TypeVar("A")
#: Reported as ``waited_ms`` after a half-close: longer than any wait, so that the handler answers at once.
WAITED_MS = 1 << 40


class RequestCancelled(Exception):
    """The outcome of a cancelled request; only its canceller receives it."""


class RequestTasks:
    """Runs ``async def`` handlers, each request in a task of ``nursery``."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        #: A task keeps the context it is started with, and a caller's context could keep a request alive.
        self._context = copy_context()

    def adapt(self, handler: AsyncHandler) -> Handler:
        """Return a handler that runs ``handler`` in a task for each request."""
        return partial(self.run, handler)

    def run(self, handler: AsyncHandler, request: Request, answered: Answered) -> None:
        """Run ``handler`` in a task, which ``Request.cancel`` cancels."""
        scope = trio.CancelScope()
        if request.is_cancelled:
            scope.cancel()
        self._context.run(self._nursery.start_soon, _run, handler, request, answered, scope, request.on_cancel)
        request.on_cancel = scope.cancel

    def settle(self, ask: Callable[[], Awaitable[A]], settled: Callable[[A | Exception], object]) -> None:
        """Run ``ask`` in a task, and pass its outcome to ``settled``."""
        self._context.run(self._nursery.start_soon, _settle, ask, settled)


async def _settle(ask: Callable[[], Awaitable[A]], settled: Callable[[A | Exception], object]) -> None:
    outcome: A | Exception = RequestCancelled()
    try:
        outcome = await ask()
    except Exception as error:  # noqa: BLE001  # the caller receives it
        outcome = error
    finally:
        settled(outcome)
        del outcome


async def _run(
    handler: AsyncHandler,
    request: Request,
    answered: Answered,
    scope: trio.CancelScope,
    outer: Callable[[], object] | None,
) -> None:
    """Args: outer: cancels a task that waits for this one."""
    request_id.set(request.request_id)
    outcome: Answer | Exception = RequestCancelled()
    try:
        with scope:
            outcome = await handler(request)
        if scope.cancel_called and not isinstance(outcome, Exception):
            outcome = await _without_reader(outcome)
    except Exception as error:  # noqa: BLE001  # the caller receives it
        outcome = error
    finally:
        request.on_cancel = outer
        answered(outcome)
        del outcome  # the traceback of an error refers to this frame


async def _without_reader(answer: Answer) -> RequestCancelled:
    """Close the stream of an answer that was made despite the cancellation, and return the outcome that replaces it."""
    if not isinstance(answer.body, bytes):
        with trio.CancelScope(shield=True):
            await answer.body.aclose()
    return RequestCancelled()


async def answer_of(handler: Handler, request: Request) -> Answer:
    """Return the handler's answer, or raise its error.

    Cancellation cancels the request, and waits until the handler's task, if it has one, has ended.
    """
    future: Future[Answer] = Future()
    outer = request.on_cancel
    handler(request, future.settle)
    try:
        return await future.wait()
    except trio.Cancelled:
        if not future.is_settled and request.on_cancel is not None and request.on_cancel is not outer:
            request.on_cancel()
            with trio.CancelScope(shield=True), suppress(Exception):
                await future.wait()
        raise


class SendingEnd:
    """The state of the client's sending half, shared by all requests of a connection."""

    def __init__(self) -> None:
        self.has_come = False
        #: True while an endless answer is sent: a client that sends no more is then taken to have left.
        self.is_endless = False
        self._told: dict[Callable[[], object], None] = {}

    def come(self) -> None:
        """Record that the client has half-closed or closed the connection."""
        self.has_come = True
        for tell in list(self._told):
            tell()

    @contextmanager
    def telling(self, tell: Callable[[], object]) -> Iterator[None]:
        """Call ``tell`` if the client sends no more, now or within the block."""
        self._told[tell] = None
        if self.has_come:
            tell()
        try:
            yield
        finally:
            del self._told[tell]


def rendered(request: Request, render: Callable[[A], Answer], found: A | Exception) -> Answer | Exception:
    """Return the outcome of a request that asked an actor: an error, or the answer that ``render`` makes.

    Called in the actor's turn, so a bug in ``render`` becomes the outcome instead of being raised.
    """
    if isinstance(found, Exception):
        return found
    try:
        answer = render(found)
        if request.prepare is not None:
            request.prepare(answer)
    except Exception as error:  # noqa: BLE001
        return error
    return answer
