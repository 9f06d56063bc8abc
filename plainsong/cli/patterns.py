"""Names and patterns of topics: ``orders-*`` means all that look so."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from plainsong.cli.exits import CommandFailed, Exit
from protocol.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

_WILD = frozenset("*?[")


def is_pattern(text: str) -> bool:
    """Whether ``text`` can mean several topics."""
    return bool(_WILD & set(text))


def chosen(there: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Those topics that are meant, in their own order; all of them when nothing is said.

    Raises:
      CommandFailed: a name that is no topic's, or a pattern that fits none.
    """
    if not wanted:
        return list(there)
    for each in wanted:
        if is_pattern(each):
            if not any(fnmatchcase(name, each) for name in there):
                raise CommandFailed(f"no topic looks like {each!r}", hint=_known(there), code=Exit.NOT_FOUND)
        elif each not in there:
            hint = nearest(each, there) if there else _known(there)
            raise CommandFailed(f"there is no topic {each!r}", hint=hint, code=Exit.NOT_FOUND)
    return [name for name in there if any(name == each or fnmatchcase(name, each) for each in wanted)]


def _known(there: Sequence[str]) -> str:
    return "plainsong topic list shows those there are" if there else "there are no topics yet: plainsong topic create"
