"""What goes wrong between this package and the daemon, as one error that says whether the request happened."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Whether the request happened: it did not, it did, or nobody can tell.
Outcome = Literal["not-applied", "applied", "unknown"]

_OUTCOMES: dict[str, Outcome] = {"not-applied": "not-applied", "applied": "applied", "unknown": "unknown"}


class BrokerError(Exception):
    """The daemon refused a request, or could not be reached. It can be pickled: Spark carries it between processes."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        hint: str = "",
        outcome: Outcome = "not-applied",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(status, code, detail, hint, outcome, retry_after_s)
        #: Of HTTP; 0: there was no answer.
        self.status = status
        #: Of docs/http.md; ``unreachable`` when there was no answer.
        self.code = code
        self.detail = detail
        self.hint = hint
        self.outcome: Outcome = outcome
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}" + (f" ({self.hint})" if self.hint else "")

    def with_hint(self, further: str) -> BrokerError:
        """The same, with one more hint."""
        hint = f"{self.hint}; {further}" if self.hint else further
        return BrokerError(self.status, self.code, self.detail, hint, self.outcome, self.retry_after_s)

    def after_all(self, may_have_happened: bool) -> BrokerError:
        """This error as the last of several attempts, of which an earlier one may have happened."""
        if not may_have_happened:
            return self
        return BrokerError(self.status, self.code, self.detail, self.hint, "unknown", self.retry_after_s)


def refused(url: str, status: int, headers: Mapping[str, str], body: bytes) -> BrokerError:
    """The error of an answer that is no success, whoever wrote it."""
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    if not isinstance(problem, dict) or "code" not in problem:
        shown = body[:200].decode("utf-8", "replace").strip()
        detail = f"{url} answered {status}, and not as a Plainsong daemon does: {shown!r}"
        return BrokerError(status, "unexpected_answer", detail, "check the option url", "unknown")
    return BrokerError(
        status,
        str(problem["code"]),
        str(problem.get("detail", "")),
        str(problem.get("hint") or ""),
        _OUTCOMES.get(str(problem.get("outcome")), "unknown"),
        _seconds(headers.get("retry-after")),
    )


def unreachable(url: str, why: str, *, attempts: int, seconds: float, outcome: Outcome) -> BrokerError:
    """The error of a daemon that gave no answer, or half of one."""
    detail = f"no answer from {url}: {why}; attempts: {attempts}, in {seconds:.1f} s"
    return BrokerError(0, "unreachable", detail, "check that the daemon runs, and the option url", outcome)


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdigit() else None
