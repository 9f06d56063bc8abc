"""Methods of a client, bound to a topic."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def of_topic(method: Callable[Concatenate[Any, str, P], R]) -> Callable[Concatenate[Any, P], R]:
    """The method of a topic that calls this method of its client, with the topic as the first argument.

    It has the signature, less the topic, and the documentation of the client's method.
    """
    name, signature = method.__name__, inspect.signature(method)

    def bound(self: Any, /, *arguments: Any, **options: Any) -> Any:
        return getattr(self._client, name)(self.name, *arguments, **options)

    itself, _, *others = signature.parameters.values()
    bound.__signature__ = signature.replace(parameters=[itself, *others])  # type: ignore[attr-defined] # inspect reads it
    bound.__name__, bound.__doc__, bound.__module__ = name, method.__doc__, method.__module__
    bound.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{name}"
    return bound
