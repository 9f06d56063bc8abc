"""What a cluster keeps in ZooKeeper: a node for each instance that is there, and one for what operators have said.

<path>/instances/<name>   ephemeral: {"address": "host:port", "weight": 100, "leaving": false, "slices": 64}
<path>/placement          pins and drains, changed by compare-and-set
"""

from __future__ import annotations

import json
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from broker.cluster.zookeeper import Away, Changed, Exists
from protocol.cluster.assignment import Member
from protocol.cluster.placement import NameTaken, Placement, UnreadablePlacement
from protocol.cluster.slices import SLICES
from protocol.errors import ClusterUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.cluster.zookeeper import ZooKeeper

log = logging.getLogger(__name__)

#: Attempts at what somebody else changes at the same moment.
ATTEMPTS = 20


class Nodes:
    """The nodes below one path; every call raises Away."""

    def __init__(self, zookeeper: ZooKeeper, path: str) -> None:
        self._zookeeper = zookeeper
        self._instances = f"{path}/instances"
        self._placement = f"{path}/placement"
        #: Sessions of ours that may be over: a node of one of these is our own, and goes.
        self._sessions: deque[int] = deque(maxlen=16)

    async def members(self) -> list[Member]:
        """All instances that are there."""
        found: list[Member] = []
        for name in await self._zookeeper.children(self._instances):
            node = await self._zookeeper.get(f"{self._instances}/{name}")
            member = None if node is None else decode_member(name, node.value)
            if member is not None:
                found.append(member)
        return found

    async def placement(self) -> Placement:
        """What operators have said; nothing where it cannot be read."""
        node = await self._zookeeper.get(self._placement)
        return Placement() if node is None else _decoded(node.value)

    async def change_placement(self, edit: Callable[[Placement], Placement]) -> Placement:
        """Say something else; what holds now. Raises ClusterUnavailable, and whatever ``edit`` does."""
        for _ in range(ATTEMPTS):
            node = await self._zookeeper.get(self._placement)
            before = Placement() if node is None else _decoded(node.value)
            after = edit(before)
            if after == before:
                return after
            write = (
                partial(self._zookeeper.create, self._placement, after.encode())
                if node is None
                else partial(self._zookeeper.set, self._placement, after.encode(), node.version)
            )
            try:
                await write()
            except (Changed, Exists):
                continue
            return after
        raise ClusterUnavailable("others change the placement all the time", hint="nothing happened; ask again")

    async def keep(self, me: Member, *, first: bool) -> None:
        """See that our node is there, in this session, and says what it should.

        Args:
          first: whether this process has had none yet: one with our address is of a process that is gone.
        Raises:
          NameTaken: it belongs to another instance.
        """
        path, value = f"{self._instances}/{me.name}", encode_member(me)
        for _ in range(ATTEMPTS):
            session = self._zookeeper.session
            if session not in self._sessions:
                self._sessions.append(session)
            node = await self._zookeeper.get(path)
            try:
                if node is None:
                    await self._zookeeper.create(path, value, ephemeral=True)
                elif node.session == session:
                    if node.value != value:
                        await self._zookeeper.set(path, value, node.version)
                    return
                else:
                    other = decode_member(me.name, node.value)
                    address = "an unknown address" if other is None else other.address
                    if node.session not in self._sessions and not (first and address == me.address):
                        raise NameTaken(me.name, address)
                    await self._zookeeper.delete(path, node.version)
            except (Changed, Exists):
                pass
        raise Away("the node of this instance changes all the time")


def encode_member(member: Member) -> bytes:
    """What an instance's node says."""
    return json.dumps(
        {"address": member.address, "weight": member.weight, "leaving": member.leaving, "slices": member.slices}
    ).encode()


def decode_member(name: str, value: bytes) -> Member | None:
    """The reverse; None for what is none of ours, which is told."""
    try:
        said = json.loads(value)
        address, weight, leaving = said["address"], said["weight"], bool(said["leaving"])
        # Without it, it is all or nothing.
        slices = said.get("slices", 0 if leaving else SLICES)
    except (ValueError, KeyError, TypeError, AttributeError):
        address, weight, leaving, slices = None, 0, False, 0
    if isinstance(address, str) and isinstance(weight, int) and weight >= 1 and slices in range(SLICES + 1):
        return Member(name, address, weight, leaving, int(slices))
    log.warning("node of an instance unreadable", extra={"instance": name, "value": repr(value[:80])})
    return None


def _decoded(value: bytes) -> Placement:
    try:
        return Placement.decode(value)
    except UnreadablePlacement as error:
        log.warning("placement unreadable: no pins, no drains", extra={"why": str(error)})
        return Placement()
