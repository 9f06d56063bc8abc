"""From an answer to what it means: an error of its class, with its outcome, or nothing wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from plainsong.core.effects import Failure
from plainsong.errors import ConnectFailed, ConnectionLost, DeadlineExceeded, UnexpectedAnswer
from plainsong.protocol.errors import (
    BY_CODE,
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
    from collections.abc import Mapping

    from plainsong.core.effects import Answer


def _narrowed(cls: type[PlainsongError]) -> type[PlainsongError]:
    """The subclass that has no code of its own but this one: ``Overloaded`` for ``Unavailable``.

    Of those beside it: a daemon in the same process has some that say more than an answer does.
    """
    beside = [narrow for narrow in cls.__subclasses__() if narrow.__module__ == cls.__module__]
    return next((narrow for narrow in beside if narrow.code == cls.code), cls)


#: Every code and the narrowest class that carries it, so that users can catch either.
NARROWEST = {code: _narrowed(cls) for code, cls in BY_CODE.items()}
#: What a code that this version does not know is told as.
BY_STATUS: dict[int, type[PlainsongError]] = {
    400: BadRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    405: MethodNotAllowed,
    409: Conflict,
    410: Gone,
    413: TooLarge,
    415: UnsupportedMediaType,
    429: QuotaExceeded,
    500: Internal,
    503: Unavailable,
}
_MAX_RETRY_AFTER_S = 3600


def error_of(answer: Answer | Failure, url: str) -> PlainsongError | None:
    """What went wrong, or None. Its ``outcome`` is that of this one attempt."""
    if isinstance(answer, Failure):
        return _failed(answer, url)
    if 200 <= answer.status < 300:
        return None
    error = _told(answer)
    if error is None:
        said = answer.body[:80].decode("utf-8", "replace")
        error = UnexpectedAnswer(f"{url} answered {answer.status}: {said!r}", hint="is this a plainsong daemon?")
        if 400 <= answer.status < 500:
            error.outcome = "not-applied"
    retry_after = answer.headers.get("retry-after", "")
    if retry_after.isascii() and retry_after.isdigit():
        error.retry_after_s = min(int(retry_after[:9]), _MAX_RETRY_AFTER_S)
    return error


def _failed(failure: Failure, url: str) -> PlainsongError:
    detail = f"{url}: {failure.detail}"
    error: PlainsongError
    if failure.kind == "connect":
        error = ConnectFailed(detail, hint="is the daemon running there? plainsong serve starts one")
        error.retry_after_s = 0  # there was nobody to ask for a pause
    elif failure.kind == "timeout":
        error = DeadlineExceeded(detail, outcome="unknown", hint="request_timeout_s is its limit")
    else:
        error = ConnectionLost(detail)
    error.__cause__ = failure.cause
    return error


def _told(answer: Answer) -> PlainsongError | None:
    """The error of a problem+json body; None when it is none."""
    if not answer.headers.get("content-type", "").startswith("application/problem+json"):
        return None
    try:
        problem: Mapping[str, Any] = json.loads(answer.body)
        return problem_error(problem, answer.status)
    except (ValueError, AttributeError):
        return None


def problem_error(problem: Mapping[str, Any], status: int = 0) -> PlainsongError:
    """The error that a problem+json object tells; a code of a later version is kept as it is."""
    code = str(problem.get("code", ""))
    status = status or int(problem.get("status", 500))
    cls = NARROWEST.get(code) or BY_STATUS.get(status, PlainsongError)
    error = cls(str(problem.get("detail", "")), hint=str(problem.get("hint", "")))
    if error.code != code and code:
        vars(error)["code"] = code
    outcome = problem.get("outcome")
    if outcome in ("not-applied", "applied", "unknown"):
        error.outcome = outcome
    return error
