"""The cluster as this instance sees it, and changes of placement by operators: drained instances, pinned topics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from broker.api.answers import json_answer
from broker.api.change import change_answer
from broker.http.messages import flag
from broker.link.flow import LinkBroken, Reply
from plainsong.protocol.answers.service import DrainedInstance, PinnedTopic
from plainsong.protocol.cluster import Member, Placement
from plainsong.protocol.codec import json_values as values
from plainsong.protocol.errors import Conflict, InvalidParameter, NotFound, PlainsongError, nearest
from plainsong.protocol.names import instance_name, topic_name
from storage.base import SERVICE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from actors.directory import Directory
    from actors.ownership import Ownership
    from broker.http.messages import Answer, Request
    from broker.link.client import Links
    from broker.link.server import Call, CallHandler, PendingReply
    from broker.membership.membership import Membership
    from plainsong.protocol.answers.service import ClusterView, InstanceRow, SecurityDigests, ZooKeeperState
    from plainsong.protocol.codec.json_values import Kind
    from plainsong.protocol.names import TopicName

#: How long to wait for other instances, whose answers only add details.
ASK_TIMEOUT_S = 1.0
#: Calls to other instances: the number of their open topics, and the digests of their security files.
TOPICS_OPEN = "topics_open"
SECURITY_DIGESTS = "security_digests"
_PIN: Mapping[str, tuple[str, Kind]] = {"instance": ("instance", values.text)}


@dataclass(frozen=True, slots=True)
class ClusterRoutes:
    """The routes of the cluster."""

    directory: Directory
    ownership: Ownership
    membership: Membership | None
    """None if there is only this instance."""
    links: Links | None
    security: Callable[[], SecurityDigests | None] = lambda: None
    """Returns the digests of this instance's security files; None if authentication is off."""

    async def show(self, request: Request) -> Answer:
        """Return instances, drains, pins, and the owner of ``?topic=``. Raises InvalidParameter, InvalidName."""
        about = request.parameters("topic").get("topic")
        ownership = self.ownership
        transactions = ownership.owner(SERVICE_NAME)
        found: ClusterView = {
            "instance": ownership.me.name,
            "address": ownership.me.address,
            "zookeeper": _zookeeper(self.membership),
            "instances": await self._instances(),
            "pins": dict(self._placement().pins),
            "transactions": None if transactions is None else transactions.name,
            "topic": None,
        }
        if about is not None:
            name = parse_name(about)
            owner = ownership.owner(name)
            found["topic"] = {
                "name": str(name),
                "owner": None if owner is None else owner.name,
                "pinned": self._placement().pins.get(str(name)),
            }
        return json_answer(found)

    def _placement(self) -> Placement:
        return Placement() if self.membership is None else self.membership.assignment.placement

    async def _instances(self) -> list[InstanceRow]:
        members = self._members()
        drained = self._placement().drained
        opened: dict[str, int] = {}
        digests: dict[str, SecurityDigests] = {}
        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(self._count_topics, member, opened)
                nursery.start_soon(self._ask_digests, member, digests)
        return [
            {
                "name": member.name,
                "address": member.address,
                "weight": member.weight,
                "leaving": member.leaving,
                "drained": member.name in drained,
                "slices": member.slices,
                "topicsOpen": opened.get(member.name),
                "security": digests.get(member.name),
            }
            for member in members
        ]

    def _members(self) -> Sequence[Member]:
        if self.membership is not None:
            return self.membership.assignment.members
        return [Member(each.name, each.address) for each in self.ownership.instances]

    async def _count_topics(self, member: Member, opened: dict[str, int]) -> None:
        """Add the instance's number of open topics, unless it does not answer."""
        if member.name == self.ownership.me.name:
            opened[member.name] = topics_open(self.directory)
            return
        count = await self._ask(member, TOPICS_OPEN)
        if count is not None:
            opened[member.name] = int(count)

    async def _ask_digests(self, member: Member, digests: dict[str, SecurityDigests]) -> None:
        """Add the digests of an instance's security files, unless it has none or does not answer."""
        found = self.security() if member.name == self.ownership.me.name else await self._ask(member, SECURITY_DIGESTS)
        if found is not None:
            digests[member.name] = found

    async def _ask(self, member: Member, what: str) -> Any:
        """Call another instance; None if it does not answer, or does not support the call."""
        if self.links is None:
            return None
        try:
            with trio.move_on_after(ASK_TIMEOUT_S):
                link = await self.links.to(member.address)
                return (await link.call(what, None)).value
        except (LinkBroken, PlainsongError):
            pass
        return None

    async def drain(self, request: Request) -> Answer:
        """Drain an instance; its topics move in batches after the answer.

        Raises:
          NotFound (no such instance), Conflict, ClusterUnavailable: nothing happened.
        """
        dry_run = flag(request.parameters("dryRun"), "dryRun")
        membership, name = self._cluster(), instance_name(request.path["instance"])
        if name not in (known := self._names()):
            raise NotFound(f"there is no instance {name}", hint=nearest(name, known))
        opened: dict[str, int] = {}
        member = next(each for each in self._members() if each.name == name)
        await self._count_topics(member, opened)
        placement = self._placement()
        left = [each for each in self._members() if each.name != name and each.name not in placement.drained]
        warnings = [] if left else ["no other instance would remain, so the drain would have no effect"]
        before = {"drained": name in placement.drained}
        if not dry_run:
            await membership.change_placement(partial(Placement.with_drained, instance=name, drained=True))
        return change_answer(
            "cluster.drain",
            name,
            before,
            {"drained": True},
            dry_run=dry_run,
            effect={"moves": {"topicsOpen": opened.get(name)}},
            warnings=warnings,
            more=None if dry_run else {"instance": name, "drained": True},
        )

    async def undrain(self, request: Request) -> Answer:
        """Undo a drain, even of an instance that is not running. Raises Conflict, ClusterUnavailable."""
        request.parameters()
        membership, name = self._cluster(), instance_name(request.path["instance"])
        await membership.change_placement(partial(Placement.with_drained, instance=name, drained=False))
        return json_answer(DrainedInstance(instance=name, drained=False))

    async def pin(self, request: Request) -> Answer:
        """Pin a topic to an instance. The pin has no effect while that instance is not a member.

        Raises:
          InvalidParameter, Conflict, ClusterUnavailable: nothing happened.
        """
        request.parameters()
        name, to = request.name, request.fields(_PIN).get("instance")
        membership, known = self._cluster(), self._names()
        if to not in known:
            raise InvalidParameter(
                f"there is no instance {to}" if to else "instance is missing", hint=nearest(str(to), known)
            )
        await membership.change_placement(partial(Placement.pinned, name=name, instance=to))
        return json_answer(PinnedTopic(topic=str(name), instance=to))

    async def unpin(self, request: Request) -> Answer:
        """Remove a topic's pin, if any; placement is automatic again. Raises Conflict, ClusterUnavailable."""
        request.parameters()
        name = request.name
        await self._cluster().change_placement(partial(Placement.unpinned, name=name))
        return json_answer(PinnedTopic(topic=str(name), instance=None))

    def _cluster(self) -> Membership:
        if self.membership is None:
            raise Conflict(
                "this is a single instance, which owns everything", hint="to run several, set cluster.zookeeper"
            )
        return self.membership

    def _names(self) -> list[str]:
        return [member.name for member in self._members()]


def _zookeeper(membership: Membership | None) -> ZooKeeperState | None:
    if membership is None:
        return None
    return {"connected": membership.connected, "since": membership.since_ms}


def topics_open(directory: Directory) -> int:
    """Return the number of topics open here, including those moving to another owner."""
    return len(directory) + directory.closing


def topics_open_handler(directory: Directory) -> CallHandler:
    """Return the handler for an instance that shows the cluster."""

    def answer(call: Call, reply: PendingReply) -> None:
        del call
        reply(Reply(topics_open(directory)))

    return answer


def security_digests_handler(security: Callable[[], SecurityDigests | None]) -> CallHandler:
    """Return the handler for an instance that compares security files."""

    def answer(call: Call, reply: PendingReply) -> None:
        del call
        reply(Reply(security()))

    return answer


def parse_name(text: str) -> TopicName:
    """Parse ``namespace:topic``. Raises InvalidParameter, InvalidName."""
    namespace, colon, topic = text.partition(":")
    if not colon:
        raise InvalidParameter(f"topic is {text[:80]!r}", hint="write namespace:topic")
    return topic_name(namespace, topic)
