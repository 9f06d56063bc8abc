"""Which codes a route may answer: a few families, and the status of each code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.http.status import STATUS_OF
from protocol.errors import BY_CODE

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Whatever route it is.
ANY = ("invalid_parameter", "overloaded", "internal")
#: Reading a topic, which may have no owner just now.
READS = (*ANY, "invalid_name", "topic_not_found", "recovering", "no_owner", "shutting_down", "storage_failed")
#: Changing a topic: it may not be known whether it happened.
WRITES = (*READS, "outcome_unknown")
#: A body is read.
BODY = ("malformed_body", "body_too_large", "unsupported_media_type")


def by_status(codes: Iterable[str]) -> dict[int, list[str]]:
    """Codes by the status they are answered with, both ascending."""
    found: dict[int, list[str]] = {}
    for code in sorted(set(codes)):
        found.setdefault(status_of_code(code), []).append(code)
    return dict(sorted(found.items()))


def status_of_code(code: str) -> int:
    """The status that ``code`` is answered with."""
    return next(STATUS_OF[cls] for cls in BY_CODE[code].__mro__ if cls in STATUS_OF)
