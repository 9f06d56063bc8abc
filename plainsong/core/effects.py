"""What a decision asks the world for: generators yield these, a shell carries them out and sends the result back.

    Send    → Answer or Failure         Pause → None         Blocking → what its function returns
    Now     → seconds on a clock that only goes forward          Tell → what a participant's method returns

What goes wrong while an effect is carried out is raised where it was yielded. A generator of this kind is
called ``Steps``. The sync shell runs it with sockets and sleeps, the async one
with anyio, the tests with whatever they want to see happen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request, without the place it goes to."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """No whole answer came."""

    kind: Literal["connect", "lost", "timeout"]
    """``connect``: nothing was sent. The others: it may have been taken."""
    detail: str
    cause: Exception | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request to ``url`` and wait for its answer, no longer than ``timeout_s`` for all of it."""

    url: str
    request: Request
    connect_timeout_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Now:
    """Look at the clock."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """Call a function that touches the disk."""

    work: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Tell:
    """Call a method of somebody else's object, here and now; if it is asynchronous, await it."""

    work: Callable[[], Any]


Effect: TypeAlias = Send | Pause | Now | Blocking | Tell
Steps: TypeAlias = Generator[Effect, Any, T]
