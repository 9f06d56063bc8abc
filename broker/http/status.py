"""Errors as answers: one table from error classes to statuses, and the problem+json they are told in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from broker.http.exchange import HttpAnswer
from protocol.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    Gone,
    Internal,
    MethodNotAllowed,
    NotFound,
    PlainsongError,
    QuotaExceeded,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnsupportedMediaType,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

PROBLEM_TYPE = "application/problem+json"

#: The most specific class of an error that stands here decides.
STATUS_OF: dict[type[PlainsongError], int] = {
    BadRequest: 400,
    Unauthenticated: 401,
    Forbidden: 403,
    NotFound: 404,
    MethodNotAllowed: 405,
    Conflict: 409,
    Gone: 410,
    TooLarge: 413,
    UnsupportedMediaType: 415,
    QuotaExceeded: 429,
    Internal: 500,
    Unavailable: 503,
    PlainsongError: 500,
}


def status_of(error: PlainsongError) -> int:
    """The HTTP status that ``error`` is answered with."""
    return next(STATUS_OF[cls] for cls in type(error).__mro__ if cls in STATUS_OF)


def problem_of(error: PlainsongError) -> dict[str, str | int]:
    """What is told of ``error``, under the names of problem+json."""
    return {
        "type": f"/errors/{error.code}",
        "title": error.title,
        "status": status_of(error),
        "detail": error.detail,
        "code": error.code,
        "hint": error.hint,
        "outcome": error.outcome,
    }


def answer_for(error: PlainsongError, *, allow: Iterable[str] = ()) -> HttpAnswer:
    """``error`` as problem+json; ``allow`` are the methods that a 405 names instead."""
    problem = problem_of(error)
    status = status_of(error)
    headers = []
    if error.retry_after_s is not None:
        headers.append(("Retry-After", str(error.retry_after_s)))
    if status == 405:
        headers.append(("Allow", ", ".join(sorted(allow))))
    # surrogateescape cannot occur in what we decode ourselves, but a detail may quote anything: never fail here.
    body = json.dumps(problem, ensure_ascii=False).encode("utf-8", "replace")
    return HttpAnswer(status, body, PROBLEM_TYPE, headers)


def only_plain(error: BaseException) -> PlainsongError | None:
    """The ``PlainsongError`` that ``error`` is, or that a nursery wrapped alone; None when it is, or holds, a bug."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, PlainsongError) else None
