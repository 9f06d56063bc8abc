"""Enters a cluster and leaves it: this instance's name, its advertised address, and the next owners of its topics.

Coming into a cluster and leaving it: what this instance is called, where it is reached, and who has its topics after it.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from typing import TYPE_CHECKING

import trio

from actors.observe import SystemClock
from broker.cluster.handover import Rebalance
from broker.config.sections import parse_ensemble
from broker.config.values import parse_address
from broker.link.client import Link, connect
from broker.link.flow import LinkBroken, Reply
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from broker.cluster.membership import Membership
    from broker.config import Config
    from broker.link.server import Call, CallHandler
    from broker.service import Service

log = logging.getLogger(__name__)
#: How much of the time of a hand-over may be spent on portions; then what is left goes at once.
REBALANCE_SHARE = 0.7


async def find_others(config: Config, nursery: trio.Nursery) -> Membership | None:
    """This instance's view of its cluster, kept in ``nursery``; None where it is to be alone. It owns nothing yet."""
    if not config.cluster.zookeeper:
        return None
    from broker.cluster.membership import Membership  # here, so that an instance that is alone needs no ZooKeeper

    membership = Membership(
        parse_ensemble(config.cluster.zookeeper),
        instance_of(config),
        weight=config.cluster.weight,
        session_timeout_s=config.cluster.session_timeout_s,
        clock=SystemClock(),
    )
    await nursery.start(membership.run)
    return membership


def instance_of(config: Config) -> str:
    """What this instance is called: as it is told, or after its host and its port."""
    if config.cluster.instance:
        return config.cluster.instance
    port = parse_address(config.cluster.advertise or config.http.bind).port
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:80] or "instance"
    return f"{host}-{port or os.getpid()}"  # a free port is another one after a restart


def describe_membership(membership: Membership) -> str:
    """This instance among the others, in a few words for the banner."""
    if not membership.entered:
        return f"{membership.me.name}, not reached yet: nothing is owned"
    return f"{membership.me.name} at {membership.me.address}, one of {len(membership.instances)}"


async def enter(membership: Membership, address: str, stop: trio.Event) -> None:
    """Be one of the instances, reached at ``address``, unless ``stop`` is set first. Raises NameTaken, in a group."""
    async with trio.open_nursery() as nursery:

        async def not_after_all() -> None:
            await stop.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(not_after_all)
        await membership.enter(address)
        nursery.cancel_scope.cancel()


def start_rebalance(service: Service, membership: Membership, nursery: trio.Nursery) -> Rebalance:
    """What has topics come and go in portions, kept in ``nursery``."""
    assert service.cluster is not None  # there is one wherever there is a membership
    portions = Rebalance(membership, service.cluster.handover)
    nursery.start_soon(portions.run)
    return portions


async def hand_over(service: Service, portions: Rebalance, within_s: float) -> None:
    """Own nothing any more: others take over, portion by portion; what is theirs already is forwarded to them.

    Returns when all topics are let go, or after ``within_s``; those that are left towards its end go at once. Readiness
    is denied from now on, and a held poll is answered when its topic goes.
    """
    service.stopping = True
    membership, topics, begun_s = portions.membership, len(service.directory), trio.current_time()
    with trio.move_on_after(within_s) as patience:
        if membership.connected:
            with trio.move_on_after(REBALANCE_SHARE * within_s):
                await membership.begin_to_leave()
                await portions.gone()
        await membership.leave()
        await service.directory.drained()
    took_s = round(trio.current_time() - begun_s, 3)
    if patience.cancelled_caught:
        log.warning("left the cluster before all topics were let go", extra={"topics": topics, "seconds": took_s})
    else:
        log.info("left the cluster", extra={"topics": topics, "seconds": took_s})


# --- self check ------------------------------------------------------------------------------------
#
# Whether an instance is found at its own address: what it advertises is where all others will look for it.


#: What an instance is asked for: its name.
WHO = "who"
#: How long finding it may take.
WITHIN_S = 5.0
_HINT = "cluster.advertise must be an address by which the others reach this instance, and it reaches itself"


def who_handler(name: str) -> CallHandler:
    """What answers ``WHO`` at the instance of that name."""

    async def answer(call: Call) -> Reply:
        del call
        await trio.lowlevel.checkpoint()
        return Reply(name)

    return answer


async def verify_advertised_address(
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
            found = await _ask_name(await dial(address), address)
        except (OSError, ValueError) as error:
            return str(error)
        except LinkBroken as error:
            return f"whoever is there is no instance of ours: {error.why}"
        except PlainsongError:
            return ""  # it is one of ours, of an older version
        return "" if found == name else f"the instance {str(found)[:100]!r} is there"
    return "nobody answers"


async def _ask_name(stream: trio.abc.Stream, address: str) -> object:
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
