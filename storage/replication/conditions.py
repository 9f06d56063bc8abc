"""Checks that an object store replaces an object only in the version that was read, as the lease needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from storage.replication.protocol import Create, Exchange, Get, Unconditional

if TYPE_CHECKING:
    from storage.replication.protocol import Steps

_FIRST, _SECOND, _WRONG = b"1", b"2", b"3"


def check_replacement(name: str) -> Steps[None]:
    """Replace an object, and try to replace it in its former version. ``name`` must not be that of another object.

    Raises:
      Unconditional: the object store replaces it nevertheless.
    """
    while (found := (yield Get(name))) is None:
        yield Create(name, _FIRST)
    while (now := (yield Get(name))).data == _FIRST:
        yield Exchange(name, _SECOND, now.etag)
    yield Exchange(name, _WRONG, found.etag)
    if (yield Get(name)).data == _WRONG:
        raise Unconditional(
            "the object store ignores If-Match: it replaced an object of another version",
            hint="use an object store with conditional writes (If-None-Match and If-Match)",
        )
