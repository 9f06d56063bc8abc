"""Polls that an undecided transaction holds up: what their answers say, and how they wait for the decision."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import trio

from protocol.page import HIDDEN_COUNTED

if TYPE_CHECKING:
    from broker.service import Service
    from protocol.page import Held, Page

#: A pointer our authority does not know is nobody's to wake: it becomes visible once the read pointer has passed it.
UNKNOWN_PATIENCE_S = 1.0


def position_headers(page: Page) -> list[tuple[str, str]]:
    """Where the page ends, why there, and where to go on."""
    headers: list[tuple[str, str]] = [("Plainsong-End", page.end)]
    if page.last_id is not None:
        headers.append(("Plainsong-Last-Id", page.last_id.hex()))
    if page.held is not None:
        headers.append(("Plainsong-Held-By", str(page.held.pointer)))
        headers.append(("Plainsong-Held-Since", str(page.held.since_ms)))
        headers.append(("Plainsong-Hidden-Messages", hidden_messages(page.held)))
    return headers


def hidden_messages(held: Held) -> str:
    """How many messages wait behind the undecided one; more than a thousand are not counted."""
    return f"{HIDDEN_COUNTED - 1}+" if held.hidden >= HIDDEN_COUNTED else str(held.hidden)


async def wait_for_decision(service: Service, held: Held, mark: int, deadline_s: float) -> None:
    """Wait until something may have become of what holds the page, or the deadline has come; then look again.

    Args:
      mark: ``service.pointers.mark``, taken before the view and the page.
      deadline_s: on trio's clock.
    Raises:
      Overloaded: too many wait already.
    """
    unknown = service.transactions.standing(held.pointer) == "unknown"
    patience_s = trio.current_time() + UNKNOWN_PATIENCE_S if unknown else inf
    with trio.move_on_at(min(deadline_s, patience_s)):
        await service.pointers.wait(held.pointer, mark)
