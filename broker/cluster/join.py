"""Entering and leaving a cluster: this instance's name, its advertised address, and the hand-over of its topics."""

from __future__ import annotations

import logging
import os
import re
import socket
from typing import TYPE_CHECKING

import trio

from actors.observe import SystemClock
from broker.cluster.handover import Rebalance
from broker.config.config import advertised
from broker.config.sections import parse_ensemble
from broker.link.client import Link, connect
from broker.link.flow import LinkBroken, Reply
from broker.link.proof import link_secret
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from actors.directory import Directory
    from broker.cluster.handover import Handover
    from broker.config import Config
    from broker.link.proof import LinkSecret
    from broker.link.server import Call, CallHandler, PendingReply
    from broker.membership.membership import Membership

log = logging.getLogger(__name__)
#: The part of a hand-over's time for steps; after that the remaining topics are released at once.
REBALANCE_SHARE = 0.7


async def find_others(config: Config, nursery: trio.Nursery) -> Membership | None:
    """Start to follow the cluster, in ``nursery``, without owning anything. None if no cluster is configured."""
    if not config.cluster.zookeeper:
        return None
    from broker.membership.membership import (
        Membership,  # here, so that an instance without a cluster does not load ZooKeeper's library
    )
    from broker.membership.zookeeper import access_of

    secret = link_secret(config, instance_of(config))
    membership = Membership(
        parse_ensemble(config.cluster.zookeeper),
        instance_of(config),
        weight=config.cluster.weight,
        session_timeout_s=config.cluster.session_timeout_s,
        clock=SystemClock(),
        access=access_of(config.cluster),
        proof="" if secret is None else secret.fingerprint,
    )
    await nursery.start(membership.run)
    return membership


def instance_of(config: Config) -> str:
    """Return this instance's name: ``cluster.instance``, or one derived from its host and port."""
    if config.cluster.instance:
        return config.cluster.instance
    address = advertised(config)
    assert address is not None  # required of an instance in a cluster
    port = address.port
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:80] or "instance"
    return f"{host}-{port or os.getpid()}"  # port 0 is another port after each restart


def describe_membership(membership: Membership) -> str:
    """Return this instance's state in the cluster, for the banner."""
    if membership.kept_out_by is not None:
        return f"{membership.me.name}, kept out: cluster.secret_file differs from that of {membership.kept_out_by}"
    if not membership.entered:
        return f"{membership.me.name}, not reached yet: no topics are owned"
    return f"{membership.me.name} at {membership.me.address}, one of {len(membership.instances)}"


async def enter(membership: Membership, address: str, stop: trio.Event) -> None:
    """Enter the cluster under ``address``, unless ``stop`` is set first. Raises NameTaken, in a group."""
    async with trio.open_nursery() as nursery:

        async def cancel_at_stop() -> None:
            await stop.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(cancel_at_stop)
        await membership.enter(address)
        nursery.cancel_scope.cancel()


def start_rebalance(handover: Handover, membership: Membership, nursery: trio.Nursery) -> Rebalance:
    """Start the task, in ``nursery``, that moves topics in steps."""
    rebalance = Rebalance(membership, handover)
    nursery.start_soon(rebalance.run)
    return rebalance


async def hand_over(directory: Directory, stopping: trio.Event, rebalance: Rebalance, within_s: float) -> None:
    """Leave the cluster: other instances take over the topics, step by step.

    Requests for topics that have moved are forwarded. A waiting poll is answered when its topic moves. Readiness is
    denied from now on. Returns when all topics are released, or after ``within_s``; near its end the remaining topics
    are released at once.
    """
    stopping.set()
    membership, topics, begun_s = rebalance.membership, len(directory), trio.current_time()
    with trio.move_on_after(within_s) as patience:
        if membership.connected:
            with trio.move_on_after(REBALANCE_SHARE * within_s):
                await membership.begin_to_leave()
                await rebalance.all_given_away()
        await membership.leave()
        await directory.drained()
    took_s = round(trio.current_time() - begun_s, 3)
    if patience.cancelled_caught:
        log.warning("left the cluster before all topics were handed over", extra={"topics": topics, "seconds": took_s})
    else:
        log.info("left the cluster", extra={"topics": topics, "seconds": took_s})


# --- advertised address ----------------------------------------------------------------------------


#: The kind of call that an instance answers with its name.
WHO = "who"
#: The time-out of the verification.
WITHIN_S = 5.0
_HINT = "set cluster.advertise to an address at which other instances, and this one, reach this instance"


def who_handler(name: str) -> CallHandler:
    """Return the handler of ``WHO`` for the instance of this name."""

    def answer(call: Call, reply: PendingReply) -> None:
        del call
        reply(Reply(name))

    return answer


async def verify_advertised_address(
    name: str,
    address: str,
    dial: Callable[[str], Awaitable[trio.abc.Stream]] = connect,
    within_s: float = WITHIN_S,
    secret: LinkSecret | None = None,
) -> str:
    """Connect to the instance's own advertised address, as the others will, and ask for its name.

    Return the reason, which is also logged, if the instance is not found there; otherwise an empty string.
    """
    why = await _why_not(name, address, dial, within_s, secret)
    if why:
        log.warning(
            "this instance cannot reach itself at its own address",
            extra={"instance": name, "address": address, "why": why, "hint": _HINT},
        )
    return why


async def _why_not(
    name: str,
    address: str,
    dial: Callable[[str], Awaitable[trio.abc.Stream]],
    within_s: float,
    secret: LinkSecret | None,
) -> str:
    with trio.move_on_after(within_s):
        try:
            found = await _ask_name(await dial(address), address, secret)
        except (OSError, ValueError) as error:
            return str(error)
        except LinkBroken as error:
            return f"it is not an instance of this cluster: {error.why}"
        except PlainsongError:
            return ""  # an older version, which does not support the call
        return "" if found == name else f"another instance, {str(found)[:100]!r}, answers there"
    return "it does not answer"


async def _ask_name(stream: trio.abc.Stream, address: str, secret: LinkSecret | None) -> object:
    """Return the name of the instance at the other end. Raises LinkBroken, PlainsongError."""
    link = Link(stream, peer=address, secret=secret)
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
