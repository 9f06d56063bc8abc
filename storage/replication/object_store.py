"""The object store that holds a commit log: S3 and its kin, a local folder, or memory, all through obstore.

The only home of obstore. It is not installed with every daemon, so only what uses an object store imports this module.

obstore waits and retries inside native code, so its calls run in threads, and it does not retry: the protocol needs to
see each lost answer. It answers a refused condition with an error of its own; any other error of a write leaves the
outcome unknown, since the request may have arrived.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeVar
from urllib.parse import urlsplit

import obstore
import trio
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, MemoryStore, S3Store

from storage.base import StoreError, StoreUnusable
from storage.directory import sync_directory
from storage.replication.protocol import Apply, Create, Exchange, Fetched, Get, Verdict

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from storage.replication.protocol import Steps
    from storage.replication.segment import Segment

T = TypeVar("T")
#: Pause before a request is repeated: at first, and at most. It doubles until then.
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
#: Calls under way at a time. Each needs a thread.
MAX_CALLS = 16


class ObjectStoreUnavailable(StoreError):
    """The object store did not answer, or answered with an error of its own. A read may be repeated."""

    title = "The object store is not available"


class ObjectStoreRefused(StoreError):
    """The object store does not accept the credentials. Repeating the request does not help."""

    title = "The object store refuses access"


class ObjectStore:
    """The objects below a prefix of an object store."""

    def __init__(self, store: LocalStore | MemoryStore | S3Store, root: Path | None = None) -> None:
        """Internal: call ``open`` instead."""
        self._store = store
        self._root = root
        self._calls = trio.CapacityLimiter(MAX_CALLS)

    @classmethod
    def open(cls, url: str, *, timeout_s: float) -> Self:
        """Return the objects below ``url``. Nothing is asked of the object store yet.

        Args:
          url: ``s3://bucket/prefix``, ``file:/path`` or ``memory:``. Credentials, region and endpoint of S3 come from
            the environment (``AWS_…``).
          timeout_s: after which a request to S3 counts as unanswered.
        Raises:
          StoreUnusable: the URL is unknown or contains credentials, or the folder cannot be made.
        """
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise StoreUnusable(
                "the URL of an object store has more than a scheme, a bucket and a prefix",
                hint="credentials and options come from the environment",
            )
        if parts.scheme == "memory":
            return cls(MemoryStore())
        try:
            if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
                root = Path(parts.path)
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
                return cls(LocalStore(root), root)
            if parts.scheme == "s3" and parts.netloc:
                prefix = parts.path.strip("/")
                # Options of the client replace those of the environment.
                is_plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
                client = {"timeout": timedelta(seconds=timeout_s), "allow_http": is_plain}
                retries = {"max_retries": 0}
                return cls(
                    S3Store(parts.netloc, prefix=prefix or None, client_options=client, retry_config=retries)  # type: ignore[arg-type]  # typed dicts
                )
        except (OSError, BaseError) as error:
            raise StoreUnusable(f"{url} cannot be used: {_kind(error)}") from error
        raise StoreUnusable(f"{url} is not an object store", hint="s3://bucket/prefix or file:/path")

    async def get(self, name: str) -> Fetched | None:
        """Read an object; None if it does not exist. Raises StoreError."""
        return await self._in_thread(partial(self._get, name))

    async def create(self, name: str, data: bytes) -> Verdict:
        """Create an object if there is none. Raises ObjectStoreRefused."""
        return await self._in_thread(partial(self._put, name, data, "create"))

    async def exchange(self, name: str, data: bytes, etag: str) -> Verdict:
        """Replace an object if it still has this version. Raises ObjectStoreRefused.

        Raises:
          StoreUnusable: a local folder cannot do this.
        """
        return await self._in_thread(partial(self._put, name, data, etag))

    async def names(self, prefix: str) -> list[str]:
        """Return the names of the objects below ``prefix``, ascending. Raises StoreError."""
        return await self._in_thread(partial(self._names, prefix))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        # Never abandoned: an answer that arrives must not be lost by a cancelled caller.
        return await trio.to_thread.run_sync(call, limiter=self._calls)

    # --- in a thread -----------------------------------------------------------------------------

    def _get(self, name: str) -> Fetched | None:
        try:
            found = obstore.get(self._store, name)
            data, etag = bytes(found.bytes()), found.meta["e_tag"]
            if self._root is not None:
                # The writer may have died between creating the object and syncing it.
                self._sync(self._root, name)
        except FileNotFoundError:
            return None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise ObjectStoreRefused(f"reading {name}: {_kind(error)}") from error
        except (BaseError, OSError) as error:
            raise ObjectStoreUnavailable(f"reading {name}: {_kind(error)}") from error
        return Fetched(data, etag or "")

    def _put(self, name: str, data: bytes, condition: Literal["create"] | str) -> Verdict:
        mode = {"e_tag": condition} if condition != "create" else "create"
        try:
            obstore.put(self._store, name, data, mode=mode, use_multipart=False)  # type: ignore[arg-type]  # a typed dict
            if self._root is not None:
                self._sync(self._root, name)
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            return Verdict.REFUSED
        except NotImplementedError as error:
            raise StoreUnusable("this object store cannot replace an object on condition") from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise ObjectStoreRefused(f"writing {name}: {_kind(error)}") from error
        except (BaseError, OSError):
            return Verdict.UNKNOWN
        return Verdict.DONE

    def _names(self, prefix: str) -> list[str]:
        try:
            return sorted(each["path"] for page in obstore.list(self._store, prefix) for each in page)
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise ObjectStoreRefused(f"listing {prefix}: {_kind(error)}") from error
        except (BaseError, OSError) as error:
            raise ObjectStoreUnavailable(f"listing {prefix}: {_kind(error)}") from error

    @staticmethod
    def _sync(root: Path, name: str) -> None:
        """Make an object of a local folder survive a power cut, with the folders that lead to it. obstore does not."""
        path = root / name
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        while path != root:
            path = path.parent
            sync_directory(path)


async def carry_out(
    objects: ObjectStore,
    steps: Steps[T],
    apply: Callable[[Segment], Awaitable[object]],
    *,
    pause: Callable[[float], Awaitable[object]] = trio.sleep,
) -> T:
    """Run a procedure of the protocol against an object store, and return its result.

    A read is repeated until it has an answer, with growing pauses; a lost answer of a write is followed by one pause.

    Args:
      apply: takes the segments that were read.
    Raises:
      ObjectStoreRefused, StoreUnusable, and what the procedure raises.
    """
    answer: object = None
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        if isinstance(request, Apply):
            answer = await apply(request.segment)
            continue
        while True:
            try:
                answer = await _answer(objects, request)
            except ObjectStoreUnavailable:
                answer = Verdict.UNKNOWN
            if not isinstance(answer, Verdict) or answer is Verdict.DONE:
                pause_s = FIRST_PAUSE_S
                break
            await pause(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            if not isinstance(request, Get):
                break


async def _answer(objects: ObjectStore, request: Get | Create | Exchange) -> Fetched | Verdict | None:
    if isinstance(request, Get):
        return await objects.get(request.name)
    if isinstance(request, Create):
        return await objects.create(request.name, request.data)
    return await objects.exchange(request.name, request.data, request.etag)


def _kind(error: Exception) -> str:
    """Name an error without its text, which quotes the request."""
    return error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
