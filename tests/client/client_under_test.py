"""One suite for both clients: a test's ``Client`` is the one for threads, or the asynchronous one in an adapter.

The tests are written for threads. With ``both_clients`` they run a second time, with each call carried out by an
``AsyncClient`` on an event loop in a thread of its own: the adapter waits for what is awaited, ``with`` and ``for``
stand for ``async with`` and ``async for``, and the object of a sent message has ``result`` and ``exception``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from inspect import getattr_static, iscoroutine, isfunction
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

import plainsong
from plainsong import AsyncClient, transactions
from plainsong._async._futures import AsyncSettled, AsyncTicket
from tests.client.simulation import kind

_life = ExitStack()
_portals: list[BlockingPortal] = []
#: Methods whose asynchronous result must be entered first; in the client for threads it is open already.
_OPENED = ("publisher", "producer", "stream")


def portal() -> BlockingPortal:
    """Return the portal to the event loop, which lives as long as the tests of a file."""
    if not _portals:
        opened = _life.enter_context(start_blocking_portal("trio"))
        # Senders and readers that tests left running must not keep the interpreter from exiting.
        _life.callback(partial(opened.call, opened.stop, True))
        _portals.append(opened)
    return _portals[0]


def close_portal() -> None:
    """End the event loop and every task on it; the next call to ``portal`` starts another."""
    _life.close()
    _portals.clear()


def _client(*arguments: Any, **options: Any) -> Any:
    """Create a client of the kind that the running test covers."""
    if kind().name == "sync":
        return plainsong.Client(*arguments, **options)
    return Adapter(AsyncClient(*arguments, **options))


if TYPE_CHECKING:  # so that the arguments of its methods are checked
    from plainsong import Client
else:
    Client = _client


def only_threads(why: str) -> None:
    """Skip the test for the asynchronous client."""
    if kind().name == "async":
        pytest.skip(f"of threads: {why}")


class Adapter:
    """An object of the asynchronous client, with the interface for threads."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._block: Any = None
        self._entered: Any = None

    def __repr__(self) -> str:
        return repr(self._inner).replace("<Async", "<")

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        name_inside = "aclose" if name == "close" else name
        if isfunction(getattr_static(type(self._inner), name_inside, None)):
            value = getattr(self._inner, name_inside)  # a method: reading the attribute runs none of the client's code
        else:
            value = portal().call(getattr, self._inner, name_inside)
        if not callable(value) or isinstance(value, type):
            return wrapped(value)

        def call(*arguments: Any, **options: Any) -> Any:
            given = [unwrapped(each) for each in arguments]
            if name == "run_in_transaction":
                given[0] = in_a_thread(given[0])
            result = wrapped(portal().call(partial(awaited, partial(value, *given, **options))))
            if name in _OPENED and isinstance(result, Adapter):
                result._open()
            return result

        return call

    def _open(self) -> None:
        self._block = portal().wrap_async_context_manager(self._inner)
        self._block.__enter__()

    def __enter__(self) -> Any:
        if self._block is None:
            self._open()
        if isinstance(self._inner, plainsong.AsyncTransactionContext):
            self._entered = transactions.enter(self._inner)
        return self

    def __exit__(self, *error: Any) -> Any:
        if self._entered is not None:
            transactions.leave(self._entered)
        block, self._block = self._block, None
        return block.__exit__(*error)

    def __iter__(self) -> Adapter:
        return self

    def __next__(self) -> Any:
        try:
            return portal().call(self._inner.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None


class Future:
    """The outcome of a message."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def done(self) -> bool:
        return bool(self._inner.done())

    def result(self, timeout: float | None = None) -> Any:
        async def wait() -> Any:
            with anyio.fail_after(timeout):
                return await self._inner

        return portal().call(wait)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.result(timeout)
        except plainsong.PlainsongError as error:
            return error
        return None


async def awaited(work: Callable[[], Any]) -> Any:
    """Return the result, awaited if it is a coroutine; futures are left to the test."""
    result = work()
    return await result if iscoroutine(result) else result


def in_a_thread(function: Any) -> Any:
    """Wrap a test's function for a client that awaits it."""

    async def work(context: Any) -> Any:
        inside = transactions.enter(context)
        try:
            return await anyio.to_thread.run_sync(function, wrapped(context))
        finally:
            transactions.leave(inside)

    return work


def wrapped(value: Any) -> Any:
    """Wrap a value of the asynchronous client for a test."""
    if isinstance(value, AsyncSettled | AsyncTicket):
        return Future(value)
    return Adapter(value) if type(value).__module__.startswith("plainsong._async") else value


def unwrapped(value: Any) -> Any:
    """Return the asynchronous client's object for a test's value."""
    return value._inner if isinstance(value, Adapter) else value
