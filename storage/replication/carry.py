"""Runs the protocol against an object store: the interface of every library, its errors, and the retries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from plainsong.protocol.backoff import Backoff
from storage.base import StoreError
from storage.replication.protocol import Apply, Create, Exchange, Fetched, Get, GetAll, Verdict

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from storage.replication.protocol import Steps
    from storage.replication.segment import Segment

T = TypeVar("T")
#: Pauses before a retry; the last one repeats.
PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0)


class ObjectStoreUnavailable(StoreError):
    """The object store did not respond, or responded with an internal error. A read may be retried."""

    title = "The object store is not available"


class ObjectStoreRefused(StoreError):
    """The object store does not accept the credentials, or lacks the bucket. A retry does not help."""

    title = "The object store refuses access"


class Objects(Protocol):
    """The objects below a prefix of an object store; ``storage.replication.object_store`` implements it."""

    can_exchange: bool
    """False if objects cannot be replaced conditionally, so that there is no lease."""

    async def get(self, name: str) -> Fetched | None:
        """Read an object; None if it does not exist. Raises StoreError."""
        ...

    async def create(self, name: str, data: bytes) -> Verdict:
        """Create an object if there is none. Raises ObjectStoreRefused."""
        ...

    async def exchange(self, name: str, data: bytes, etag: str) -> Verdict:
        """Replace an object if it still has this version. Raises ObjectStoreRefused."""
        ...

    async def names(self, prefix: str) -> list[str]:
        """Return the names of the objects below ``prefix``, ascending. Raises StoreError."""
        ...

    async def remove(self, names: Sequence[str]) -> None:
        """Remove objects; a missing one is not an error. Raises StoreError: some may have been removed."""
        ...


class WrappedObjects:
    """Passes every call on to other objects; subclasses override some."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.can_exchange = objects.can_exchange

    async def get(self, name: str) -> Fetched | None:
        """See ``Objects``."""
        return await self._objects.get(name)

    async def create(self, name: str, data: bytes) -> Verdict:
        """See ``Objects``."""
        return await self._objects.create(name, data)

    async def exchange(self, name: str, data: bytes, etag: str) -> Verdict:
        """See ``Objects``."""
        return await self._objects.exchange(name, data, etag)

    async def names(self, prefix: str) -> list[str]:
        """See ``Objects``."""
        return await self._objects.names(prefix)

    async def remove(self, names: Sequence[str]) -> None:
        """See ``Objects``."""
        await self._objects.remove(names)


async def ignore(segments: Sequence[Segment]) -> None:
    """Ignore segments, for callers that apply none."""
    del segments
    await trio.lowlevel.checkpoint()


async def read_all(get: Callable[[str], Awaitable[Fetched | None]], names: Sequence[str]) -> list[Fetched | None]:
    """Read objects at once, and return them in the order of ``names``, up to the first that cannot be read.

    Raises StoreError: the first object cannot be read.
    """
    found: list[Fetched | StoreError | None] = [None] * len(names)

    async def read_one(at: int, name: str) -> None:
        try:
            found[at] = await get(name)
        except StoreError as error:
            found[at] = error

    async with trio.open_nursery() as nursery:
        for at, name in enumerate(names):
            nursery.start_soon(read_one, at, name)
    read: list[Fetched | None] = []
    for each in found:
        if isinstance(each, StoreError):
            if not read:
                raise each
            break
        read.append(each)
    return read


async def carry_out(
    objects: Objects,
    steps: Steps[T],
    apply: Callable[[Sequence[Segment]], Awaitable[object]] = ignore,
    *,
    pause: Callable[[float], Awaitable[object]] = trio.sleep,
    failed: Callable[[str], object] = lambda _: None,
) -> T:
    """Run a procedure of the protocol against an object store, and return its result.

    A read is retried until it is answered, with growing pauses; a write whose answer was lost is followed by one pause.

    Args:
      apply: takes the segments that were read.
      failed: called with the reason before each pause.
    Raises:
      ObjectStoreRefused, StoreUnusable, and what the procedure raises.
    """
    answer: object = None
    backoff = Backoff(PAUSES_S)
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        if isinstance(request, Apply):
            answer = await apply(request.segments)
            continue
        while True:
            why = "a write has no answer"
            try:
                answer = await _answer(objects, request)
            except ObjectStoreUnavailable as error:
                answer, why = Verdict.UNKNOWN, error.detail
            if not isinstance(answer, Verdict) or answer is Verdict.DONE:
                backoff.reset()
                break
            if answer is Verdict.UNKNOWN:
                failed(why)
            await pause(backoff.failed())
            if not isinstance(request, Get | GetAll):
                break


async def _answer(
    objects: Objects, request: Get | GetAll | Create | Exchange
) -> Sequence[Fetched | None] | Fetched | Verdict | None:
    if isinstance(request, GetAll):
        return await read_all(objects.get, request.names)
    if isinstance(request, Get):
        return await objects.get(request.name)
    if isinstance(request, Create):
        return await objects.create(request.name, request.data)
    return await objects.exchange(request.name, request.data, request.etag)
