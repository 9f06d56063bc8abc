"""Whether an instance is found at its own address: what it advertises is where all others will look for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from broker.peering.answers import LinkBroken, Reply
from broker.peering.link import Link
from broker.peering.links import connect
from protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from broker.cluster.dispatch import Handler
    from broker.peering.serving import Call

log = logging.getLogger(__name__)

#: What an instance is asked for: its name.
WHO = "who"
#: How long finding it may take.
WITHIN_S = 5.0
_HINT = "cluster.advertise must be an address by which the others reach this instance, and it reaches itself"


def tells(name: str) -> Handler:
    """What answers ``WHO`` at the instance of that name."""

    async def answer(call: Call) -> Reply:
        del call
        await trio.lowlevel.checkpoint()
        return Reply(name)

    return answer


async def look_for_oneself(
    name: str, address: str, dial: Callable[[str], Awaitable[trio.abc.Stream]] = connect, within_s: float = WITHIN_S
) -> str:
    """Asks who is at ``address``, the instance's own; why it is not the instance, which the log says, too; or nothing."""
    why = await _why_not(name, address, dial, within_s)
    if why:
        log.warning(
            "this instance is not found at its own address",
            extra={"instance": name, "address": address, "why": why, "hint": _HINT},
        )
    return why


async def _why_not(name: str, address: str, dial: Callable[[str], Awaitable[trio.abc.Stream]], within_s: float) -> str:
    with trio.move_on_after(within_s):
        try:
            found = await _asked(await dial(address), address)
        except (OSError, ValueError) as error:
            return str(error)
        except LinkBroken as error:
            return f"whoever is there is no instance of ours: {error.why}"
        except PlainsongError:
            return ""  # it is one of ours, of an older version
        return "" if found == name else f"the instance {str(found)[:100]!r} is there"
    return "nobody answers"


async def _asked(stream: trio.abc.Stream, address: str) -> object:
    """The name that whoever is there says. Raises LinkBroken, PlainsongError."""
    link = Link(stream, peer=address)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        try:
            found = (await link.call(WHO, None)).value
        except (LinkBroken, PlainsongError) as error:
            found = error
        link.cut()
    if isinstance(found, Exception):
        raise found
    return found
