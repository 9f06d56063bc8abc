"""The object store that holds a commit log: S3 and its kin, a local folder, or memory, all through obstore.

The only home of obstore. It is not installed with every daemon, so only what uses an object store imports this module.

obstore waits and retries inside native code, so its calls run in threads, and it does not retry: the protocol needs to
see each lost answer. It answers a refused condition with an error of its own; any other error of a write leaves the
outcome unknown, since the request may have arrived.
"""

from __future__ import annotations

import os
from contextlib import suppress
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

from storage.base import StoreUnusable
from storage.directory import sync_directory
from storage.replication.carry import ObjectStoreRefused, ObjectStoreUnavailable
from storage.replication.protocol import Fetched, Verdict
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
#: Calls under way at a time, given-up ones included. Each needs a thread.
MAX_CALLS = 16
#: A call that has not returned after this many times ``timeout_s`` is given up: the library's own bounds have failed.
GIVE_UP = 3
#: Objects of one call to remove them.
REMOVED_AT_ONCE = 1000
#: Parts of the messages of refusals that the library reports as general errors.
_REFUSALS = ("403 Forbidden", "401 Unauthorized", "SignatureDoesNotMatch", "InvalidAccessKeyId", "AccessDenied")


class ObjectStore:
    """The objects below a prefix of an object store."""

    def __init__(self, store: LocalStore | MemoryStore | S3Store, timeout_s: float, root: Path | None = None) -> None:
        """Internal: call ``open`` instead."""
        self._store = store
        self._timeout_s = timeout_s
        self._root = root
        #: See ``carry.Objects``.
        self.can_exchange = root is None
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
            return cls(MemoryStore(), timeout_s)
        try:
            if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
                root = Path(parts.path)
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
                return cls(LocalStore(root), timeout_s, root)
            if parts.scheme == "s3" and parts.netloc:
                prefix = parts.path.strip("/")
                # Options of the client replace those of the environment.
                is_plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
                client = {"timeout": timedelta(seconds=timeout_s), "allow_http": is_plain}
                retries = {"max_retries": 0}
                store = S3Store(parts.netloc, prefix=prefix or None, client_options=client, retry_config=retries)  # type: ignore[arg-type]  # typed dicts
                return cls(store, timeout_s)
        except (OSError, BaseError) as error:
            raise StoreUnusable(f"{url} cannot be used: {_kind(error)}") from error
        raise StoreUnusable(f"{url} is not an object store", hint="s3://bucket/prefix or file:/path")

    async def get(self, name: str) -> Fetched | None:
        """Read an object; None if it does not exist. Raises StoreError."""
        return await self._in_thread(f"reading {name}", partial(self._get, name))

    async def create(self, name: str, data: bytes) -> Verdict:
        """Create an object if there is none. Raises ObjectStoreRefused."""
        return await self._written(partial(self._put, name, data, "create"))

    async def exchange(self, name: str, data: bytes, etag: str) -> Verdict:
        """Replace an object if it still has this version. Raises ObjectStoreRefused.

        Raises:
          StoreUnusable: a local folder cannot do this.
        """
        return await self._written(partial(self._put, name, data, etag))

    async def names(self, prefix: str) -> list[str]:
        """Return the names of the objects below ``prefix``, ascending. Raises StoreError."""
        return await self._in_thread(f"listing {prefix}", partial(self._names, prefix))

    async def remove(self, names: Sequence[str]) -> None:
        """Remove objects; a missing one is not an error. Raises StoreError: some may have been removed."""
        for at in range(0, len(names), REMOVED_AT_ONCE):
            await self._in_thread("removing objects", partial(self._remove, names[at : at + REMOVED_AT_ONCE]))

    async def _written(self, put: Callable[[], Verdict]) -> Verdict:
        try:
            return await self._in_thread("writing", put)
        except ObjectStoreUnavailable:
            return Verdict.UNKNOWN  # the call was given up, and may still take effect

    async def _in_thread(self, doing: str, call: Callable[[], T]) -> T:
        """Run a call in a thread. Raises ObjectStoreUnavailable: it does not return in time.

        A cancelled caller leaves the thread to itself: for the protocol that is a lost answer, like any other.
        """
        with trio.move_on_after(GIVE_UP * self._timeout_s):
            return await in_thread(call, abandon_on_cancel=True, limiter=self._calls)
        raise ObjectStoreUnavailable(f"{doing}: no answer")

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
        except (BaseError, OSError) as error:
            raise _failed(f"reading {name}", error) from error
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
        except (BaseError, OSError) as error:
            failed = _failed(f"writing {name}", error)
            if isinstance(failed, ObjectStoreRefused):
                raise failed from error
            return Verdict.UNKNOWN
        return Verdict.DONE

    def _names(self, prefix: str) -> list[str]:
        try:
            return sorted(each["path"] for page in obstore.list(self._store, prefix) for each in page)
        except (BaseError, OSError) as error:
            raise _failed(f"listing {prefix}", error) from error

    def _remove(self, names: Sequence[str]) -> None:
        try:
            obstore.delete(self._store, list(names))
        except FileNotFoundError:
            # A local folder stops at the first missing one.
            for name in names:
                with suppress(FileNotFoundError):
                    obstore.delete(self._store, name)
        except (BaseError, OSError) as error:
            raise _failed("removing objects", error) from error

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


def _failed(doing: str, error: Exception) -> ObjectStoreRefused | ObjectStoreUnavailable:
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError, PermissionError)):
        return ObjectStoreRefused(f"{doing}: {_kind(error)}")
    # Of a LIST, the library reports a refusal as any other error.
    if isinstance(error, BaseError) and any(words in str(error) for words in _REFUSALS):
        return ObjectStoreRefused(f"{doing}: PermissionDeniedError")
    return ObjectStoreUnavailable(f"{doing}: {_kind(error)}")


def _kind(error: Exception) -> str:
    """Name an error without its text, which quotes the request."""
    return error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
