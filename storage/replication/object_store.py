"""The object store that holds a commit log or backups: S3 and compatible ones, GCS, Azure, a local folder, or memory.

Only this module imports obstore, which is not installed with every daemon. So only code that uses an object store
imports this module.

obstore blocks in native code, so a daemon's calls run in threads. For a daemon it does not retry: the protocol needs to
see each lost answer. For the backup commands, which write each object unconditionally, it retries requests. It reports a
failed condition with a separate error; any other error of a write leaves the outcome unknown, since the request may have
arrived.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar
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
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from storage.base import StoreUnusable
from storage.replication.carry import ObjectStoreRefused, ObjectStoreUnavailable
from storage.replication.folder import FolderObjects
from storage.replication.protocol import Fetched, Verdict
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
#: Most concurrent calls, including abandoned ones. Each needs a thread.
MAX_CALLS = 16
#: A call that has not returned after this many times ``timeout_s`` is abandoned: the library's own time-outs have failed.
GIVE_UP = 3
#: How often the backup commands retry a request without an answer.
REPETITIONS = 5
#: Most objects that one call removes.
REMOVED_AT_ONCE = 1000
#: Parts of the messages of refusals that the library reports as general errors.
_REFUSALS = ("403 Forbidden", "401 Unauthorized", "SignatureDoesNotMatch", "InvalidAccessKeyId", "AccessDenied")
_CREDENTIALS = "check the credentials in the environment, their rights, and this machine's clock"
_REMOTE: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}


class BlockingObjects(Protocol):
    """The objects below a prefix of an object store. Methods block: for threads, and for commands."""

    @property
    def can_exchange(self) -> bool:
        """See ``carry.Objects``."""
        ...

    def get(self, name: str) -> Fetched | None:
        """Read an object; None if it does not exist. Raises StoreError."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object. Raises StoreError: the outcome is unknown."""
        ...

    def create(self, name: str, data: bytes) -> Verdict:
        """Create an object if there is none. Raises ObjectStoreRefused, also if there is no such bucket."""
        ...

    def exchange(self, name: str, data: bytes, etag: str) -> Verdict:
        """Replace an object if it still has this version.

        Raises:
          ObjectStoreRefused.
          StoreUnusable: this object store cannot do that.
        """
        ...

    def sizes(self, prefix: str) -> list[tuple[str, int]]:
        """Return the names of the objects below ``prefix``, ascending, with their sizes. Raises StoreError."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; a missing one is not an error. Raises StoreError: some may have been removed."""
        ...


def open_blocking(url: str, *, timeout_s: float, repeats: bool = False) -> BlockingObjects:
    """Return the objects below ``url``. Sends no request yet.

    Args:
      url: ``s3://bucket/prefix``, ``gs://…``, ``az://container/prefix``, ``file:/path`` or ``memory:``. Credentials,
        region and endpoint come from the environment (``AWS_…``, ``GOOGLE_…``, ``AZURE_STORAGE_…``).
      timeout_s: time after which a request counts as unanswered.
      repeats: retry a request without an answer a few times.
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
        return RemoteObjects(MemoryStore())
    try:
        if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
            return FolderObjects(Path(parts.path))
        if parts.scheme in _REMOTE and parts.netloc:
            prefix = parts.path.strip("/") or None
            # Options of the client replace those of the environment.
            is_plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
            client = {"timeout": timedelta(seconds=timeout_s), "allow_http": is_plain}
            span = timedelta(seconds=GIVE_UP * timeout_s)
            retries = {"max_retries": REPETITIONS if repeats else 0, "retry_timeout": span}
            kind = _REMOTE[parts.scheme]
            store = kind(parts.netloc, prefix=prefix, client_options=client, retry_config=retries)
            return RemoteObjects(store)
    except (OSError, BaseError) as error:
        raise StoreUnusable(f"{url} cannot be used: {_kind(error)}") from error
    raise StoreUnusable(
        f"{url} is not an object store", hint="s3://bucket/prefix, gs://…, az://container/prefix or file:/path"
    )


class RemoteObjects:
    """Objects that obstore reads and writes."""

    #: See ``carry.Objects``.
    can_exchange = True

    def __init__(self, store: MemoryStore | S3Store | GCSStore | AzureStore) -> None:
        self._store = store

    def get(self, name: str) -> Fetched | None:
        """See ``BlockingObjects.get``."""
        try:
            found = obstore.get(self._store, name)
            data, meta = bytes(found.bytes()), found.meta
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise _failed(f"reading {name}", error) from error
        return Fetched(data, meta[self._version] or "")

    @property
    def _version(self) -> Literal["e_tag", "version"]:
        """The field that a conditional replacement compares: GCS numbers generations."""
        return "version" if isinstance(self._store, GCSStore) else "e_tag"

    def put(self, name: str, data: bytes) -> None:
        """See ``BlockingObjects.put``."""
        try:
            obstore.put(self._store, name, data, use_multipart=False)
        except (BaseError, OSError) as error:
            raise _failed(f"writing {name}", error) from error

    def create(self, name: str, data: bytes) -> Verdict:
        """See ``BlockingObjects.create``."""
        return self._put(name, data, "create")

    def exchange(self, name: str, data: bytes, etag: str) -> Verdict:
        """See ``BlockingObjects.exchange``."""
        return self._put(name, data, {self._version: etag})

    def _put(self, name: str, data: bytes, mode: Literal["create"] | dict[str, str]) -> Verdict:
        try:
            obstore.put(self._store, name, data, mode=mode, use_multipart=False)  # type: ignore[arg-type]  # a typed dict
        except (AlreadyExistsError, PreconditionError):
            return Verdict.REFUSED
        except FileNotFoundError as error:
            if mode == "create":
                raise ObjectStoreRefused(f"writing {name}: there is no such bucket", hint="create it first") from error
            return Verdict.REFUSED  # there is nothing to replace
        except (BaseError, OSError) as error:
            failed = _failed(f"writing {name}", error)
            if isinstance(failed, ObjectStoreRefused):
                raise failed from error
            return Verdict.UNKNOWN
        return Verdict.DONE

    def sizes(self, prefix: str) -> list[tuple[str, int]]:
        """See ``BlockingObjects.sizes``."""
        try:
            pages = obstore.list(self._store, prefix or None)
            return sorted((each["path"], each["size"]) for page in pages for each in page)
        except (BaseError, OSError) as error:
            raise _failed(f"listing {prefix}", error) from error

    def remove(self, names: Sequence[str]) -> None:
        """See ``BlockingObjects.remove``."""
        for at in range(0, len(names), REMOVED_AT_ONCE):
            self._remove(names[at : at + REMOVED_AT_ONCE])

    def _remove(self, names: Sequence[str]) -> None:
        try:
            obstore.delete(self._store, list(names))
        except (BaseError, OSError) as error:
            raise _failed("removing objects", error) from error


class ObjectStore:
    """The objects below a prefix of an object store, for a daemon: each call runs in a thread, and is bounded."""

    def __init__(self, objects: BlockingObjects, timeout_s: float) -> None:
        """Internal: call ``open`` instead."""
        self._objects = objects
        self._timeout_s = timeout_s
        #: See ``carry.Objects``.
        self.can_exchange = objects.can_exchange
        self._calls = trio.CapacityLimiter(MAX_CALLS)

    @classmethod
    def open(cls, url: str, *, timeout_s: float) -> Self:
        """See ``open_blocking``."""
        return cls(open_blocking(url, timeout_s=timeout_s), timeout_s)

    async def get(self, name: str) -> Fetched | None:
        """See ``BlockingObjects``."""
        return await self._in_thread(f"reading {name}", partial(self._objects.get, name))

    async def create(self, name: str, data: bytes) -> Verdict:
        """See ``BlockingObjects``."""
        return await self._written(partial(self._objects.create, name, data))

    async def exchange(self, name: str, data: bytes, etag: str) -> Verdict:
        """See ``BlockingObjects``."""
        return await self._written(partial(self._objects.exchange, name, data, etag))

    async def names(self, prefix: str) -> list[str]:
        """Return the names of the objects below ``prefix``, ascending. Raises StoreError."""
        found = await self._in_thread(f"listing {prefix}", partial(self._objects.sizes, prefix))
        return [name for name, _ in found]

    async def remove(self, names: Sequence[str]) -> None:
        """See ``BlockingObjects``."""
        for at in range(0, len(names), REMOVED_AT_ONCE):
            some = names[at : at + REMOVED_AT_ONCE]
            await self._in_thread("removing objects", partial(self._objects.remove, some))

    async def _written(self, put: Callable[[], Verdict]) -> Verdict:
        try:
            return await self._in_thread("writing", put)
        except ObjectStoreUnavailable:
            return Verdict.UNKNOWN  # the call was abandoned, and may still take effect

    async def _in_thread(self, doing: str, call: Callable[[], T]) -> T:
        """Run a call in a thread. Raises ObjectStoreUnavailable: it does not return in time.

        If the caller is cancelled, the thread continues alone: to the protocol that is a lost answer like any other.
        """
        with trio.move_on_after(GIVE_UP * self._timeout_s):
            return await in_thread(call, abandon_on_cancel=True, limiter=self._calls, max_wait_s=inf)
        raise ObjectStoreUnavailable(f"{doing}: no answer")


def _failed(doing: str, error: Exception) -> ObjectStoreRefused | ObjectStoreUnavailable:
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError, PermissionError)):
        return ObjectStoreRefused(f"{doing}: {_kind(error)}", hint=_CREDENTIALS)
    # For a LIST, the library reports a refusal as a general error.
    if isinstance(error, BaseError) and any(words in str(error) for words in _REFUSALS):
        return ObjectStoreRefused(f"{doing}: PermissionDeniedError", hint=_CREDENTIALS)
    return ObjectStoreUnavailable(f"{doing}: {_kind(error)}")


def _kind(error: Exception) -> str:
    """Name an error without its text, which quotes the request."""
    if type(error).__name__ == "GenericError":  # the library's name for an error of the connection or of the server
        return "no answer, or an error of the server"
    return error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
