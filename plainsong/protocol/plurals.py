"""Counts in texts for people: ``1 topic``, ``12 topics``."""

from __future__ import annotations


def counted(count: int, thing: str) -> str:
    """Return ``1 topic`` or ``12 topics``; ``thing`` is the singular."""
    return f"{count} {plural(thing, count)}"


def plural(thing: str, count: float | None) -> str:
    """Return ``thing`` after ``count``: unchanged after 1, otherwise in the plural; None is no single one either."""
    if count == 1:
        return thing
    if thing.endswith(("ch", "s", "sh", "x")):
        return f"{thing}es"
    if thing.endswith("y") and thing[-2:-1] not in "aeiou":
        return f"{thing[:-1]}ies"
    return f"{thing}s"
