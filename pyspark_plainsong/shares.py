"""Dividing what one micro-batch may have fairly between topics."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def fair_shares(room: int, wanted: Mapping[str, int], turn: int) -> dict[str, int]:
    """``room`` divided equally, where nobody gets more than is wanted and what is left over goes to the others.

    Args:
      wanted: by topic, more than 0 each.
      turn: rotates who gets what cannot be divided, so that from turn to turn nobody starves.
    """
    names = sorted(wanted)
    first = turn % len(names) if names else 0
    waiting = names[first:] + names[:first]
    shares = dict.fromkeys(names, 0)
    while waiting and room >= len(waiting):
        each = room // len(waiting)
        for name in waiting:
            more = min(each, wanted[name] - shares[name])
            shares[name] += more
            room -= more
        waiting = [name for name in waiting if shares[name] < wanted[name]]
    for name in waiting[:room]:
        shares[name] += 1
    return shares
