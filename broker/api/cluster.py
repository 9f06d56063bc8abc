"""The cluster, as this instance sees it, and what operators say about it: instances drained, topics pinned."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from broker.api.route import TRANSACTIONS, json_answer
from broker.link.flow import LinkBroken, Reply
from plainsong.protocol.cluster import Member, Placement, instance_name
from plainsong.protocol.codec import json_values as values
from plainsong.protocol.errors import Conflict, InvalidParameter, NotFound, PlainsongError, nearest
from plainsong.protocol.names import topic_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from broker.cluster.membership import Membership
    from broker.http.messages import HttpAnswer, ViewRequest
    from broker.link.server import Call
    from broker.service import Service
    from plainsong.protocol.codec.json_values import Kind
    from plainsong.protocol.names import TopicName

#: How long the others are waited for, of whom only a number is wanted.
ASK_TIMEOUT_S = 1.0
#: What other instances are asked for it.
TOPICS_OPEN = "topics_open"
_PIN: Mapping[str, tuple[str, Kind]] = {"instance": ("instance", values.text)}


async def show(service: Service, request: ViewRequest) -> HttpAnswer:
    """Who is there and who is drained, what is pinned, and who owns ``?topic=``. Raises InvalidParameter, InvalidName."""
    about = request.parameters("topic").get("topic")
    ownership = service.directory.environment.ownership
    transactions = ownership.owner(TRANSACTIONS)
    found: dict[str, Any] = {
        "instance": ownership.me.name,
        "address": ownership.me.address,
        "zookeeper": _zookeeper(service.membership),
        "instances": await _instances(service),
        "pins": dict(_placement(service).pins),
        "transactions": None if transactions is None else transactions.name,
        "topic": None,
    }
    if about is not None:
        name = _topic(about)
        owner = ownership.owner(name)
        found["topic"] = {
            "name": str(name),
            "owner": None if owner is None else owner.name,
            "pinned": _placement(service).pins.get(str(name)),
        }
    return json_answer(found)


def _zookeeper(membership: Membership | None) -> dict[str, object] | None:
    if membership is None:
        return None
    return {"connected": membership.connected, "since": membership.since_ms}


def _placement(service: Service) -> Placement:
    return Placement() if service.membership is None else service.membership.assignment.placement


async def _instances(service: Service) -> list[dict[str, object]]:
    members = _members(service)
    drained = _placement(service).drained
    opened: dict[str, int] = {}
    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(_count_topics, service, member, opened)
    return [
        {
            "name": member.name,
            "address": member.address,
            "weight": member.weight,
            "leaving": member.leaving,
            "drained": member.name in drained,
            "slices": member.slices,
            "topicsOpen": opened.get(member.name),
        }
        for member in members
    ]


def _members(service: Service) -> Sequence[Member]:
    if service.membership is not None:
        return service.membership.assignment.members
    return [Member(each.name, each.address) for each in service.directory.environment.ownership.instances]


async def _count_topics(service: Service, member: Member, opened: dict[str, int]) -> None:
    """How many topics are open there; an instance that cannot be asked is left out."""
    if member.name == service.directory.environment.ownership.me.name:
        opened[member.name] = _opened(service)
        return
    if service.cluster is None:
        return
    try:
        with trio.move_on_after(ASK_TIMEOUT_S):
            link = await service.cluster.links.to(member.address)
            opened[member.name] = int((await link.call(TOPICS_OPEN, None)).value)
    except (LinkBroken, PlainsongError):
        pass


async def topics_open(service: Service, call: Call) -> Reply:
    """The answer to another instance that shows the cluster."""
    del call
    await trio.lowlevel.checkpoint()
    return Reply(_opened(service))


def _opened(service: Service) -> int:
    """Topics that are open here, those that are on their way to somebody else among them."""
    return len(service.directory) + service.directory.closing


async def drain(service: Service, request: ViewRequest) -> HttpAnswer:
    """An instance is to own nothing any more. Raises NotFound (it is not there), Conflict, ClusterUnavailable."""
    request.parameters()
    membership, name = _cluster(service), instance_name(request.path["instance"])
    if name not in (known := _names(service)):
        raise NotFound(f"there is no instance {name}", hint=nearest(name, known))
    await membership.change_placement(partial(Placement.with_drained, instance=name, drained=True))
    return json_answer({"instance": name, "drained": True})


async def undrain(service: Service, request: ViewRequest) -> HttpAnswer:
    """An instance is to own its share again, also one that is not there. Raises Conflict, ClusterUnavailable."""
    request.parameters()
    membership, name = _cluster(service), instance_name(request.path["instance"])
    await membership.change_placement(partial(Placement.with_drained, instance=name, drained=False))
    return json_answer({"instance": name, "drained": False})


async def pin(service: Service, request: ViewRequest) -> HttpAnswer:
    """A topic is to be at an instance, as long as that is there. Raises InvalidParameter, Conflict, ClusterUnavailable."""
    request.parameters()
    name, to = request.name, request.fields(_PIN).get("instance")
    membership, known = _cluster(service), _names(service)
    if to not in known:
        raise InvalidParameter(
            f"there is no instance {to}" if to else "say which instance", hint=nearest(str(to), known)
        )
    await membership.change_placement(partial(Placement.pinned, name=name, instance=to))
    return json_answer({"topic": str(name), "instance": to})


async def unpin(service: Service, request: ViewRequest) -> HttpAnswer:
    """A topic is to be where its name says, pinned before or not. Raises Conflict, ClusterUnavailable."""
    request.parameters()
    name = request.name
    await _cluster(service).change_placement(partial(Placement.unpinned, name=name))
    return json_answer({"topic": str(name), "instance": None})


def _cluster(service: Service) -> Membership:
    if service.membership is None:
        raise Conflict("this instance is alone and owns everything", hint="cluster.zookeeper makes it one of several")
    return service.membership


def _names(service: Service) -> list[str]:
    return [member.name for member in _members(service)]


def _topic(text: str) -> TopicName:
    namespace, colon, topic = text.partition(":")
    if not colon:
        raise InvalidParameter(f"topic is {text[:80]!r}", hint="write namespace:topic")
    return topic_name(namespace, topic)
