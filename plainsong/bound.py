"""Methods of a client or of its administration, bound to a topic or reachable by an older name."""

from __future__ import annotations

import inspect
import warnings
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def of_topic(method: Callable[Concatenate[Any, str, P], R]) -> Callable[Concatenate[Any, P], R]:
    """The method of a topic that calls this method of its client, with the topic as the first argument.

    It has the documentation of the client's method, and its signature without the topic.
    """
    return _of(attrgetter("_client"), method)


def of_administration(method: Callable[Concatenate[Any, str, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Like ``of_topic``, for a method of ``client.admin``."""
    return _of(attrgetter("_client.admin"), method)


def _of(owner: Callable[[Any], Any], method: Callable[Concatenate[Any, str, P], R]) -> Callable[Concatenate[Any, P], R]:
    name = method.__name__

    def bound(self: Any, /, *arguments: Any, **options: Any) -> Any:
        return getattr(owner(self), name)(self.name, *arguments, **options)

    described: Callable[Concatenate[Any, P], R] = _described(bound, method, skipped=1)
    return described


def moved(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method that has moved to ``client.admin``, under its old name in the client: warns, then calls it there."""
    name = method.__name__

    def bound(self: Any, /, *arguments: Any, **options: Any) -> Any:
        warn_moved(name)
        return getattr(self.admin, name)(*arguments, **options)

    described: Callable[Concatenate[Any, P], R] = _described(bound, method, skipped=0)
    return described


def moved_property(name: str) -> property:
    """Like ``moved``, for a property."""

    def value(self: Any) -> Any:
        warn_moved(name)
        return getattr(self.admin, name)

    return property(value, doc=f"``admin.{name}``.")


def warn_moved(name: str) -> None:
    """Warns the caller's caller about a name that moved to ``client.admin``."""
    message = f"client.{name} is now client.admin.{name}; the next version removes the old name"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def _described(bound: Any, method: Callable[..., Any], *, skipped: int) -> Any:
    """``bound`` with the documentation of ``method``, and its signature less ``skipped`` arguments after ``self``."""
    signature = inspect.signature(method)
    itself, *others = signature.parameters.values()
    bound.__signature__ = signature.replace(parameters=[itself, *others[skipped:]])
    bound.__name__, bound.__doc__, bound.__module__ = method.__name__, method.__doc__, method.__module__
    bound.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{method.__name__}"
    return bound
