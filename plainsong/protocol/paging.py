"""Reads a list that comes in pages, each of which names where the next one begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

A = TypeVar("A")
P = TypeVar("P", bound="Mapping[str, Any]")


def pages(ask: Callable[[A | None], P]) -> Iterator[P]:
    """Yield all pages of a list.

    Args:
      ask: returns the page after an entry (None: the first page). The page's ``next`` is the entry to continue after;
        None on the last page.
    """
    after: A | None = None
    while True:
        page = ask(after)
        yield page
        after = page["next"]
        if after is None:
            return
