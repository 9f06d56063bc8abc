"""Is it there, is it ready, how is it doing: for load balancers, service managers and people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from broker.api.route import json_answer
from broker.http.messages import HttpAnswer, answer_for
from plainsong.protocol.errors import LowSpace, NoOwner, Recovering, ShuttingDown, TransactionsUnavailable

if TYPE_CHECKING:
    from broker.cluster.membership import Membership
    from broker.cluster.serve import Cluster
    from broker.http.messages import ViewRequest
    from broker.service import Service
    from plainsong.protocol.errors import PlainsongError

#: Topics that cannot be loaded and are named in an answer; of the others only the number is.
MAX_NAMED_TOPICS = 10


async def ping(service: Service, request: ViewRequest) -> HttpAnswer:
    """``OK``."""
    return HttpAnswer(200, b"OK", "text/plain; charset=utf-8")


async def livez(service: Service, request: ViewRequest) -> HttpAnswer:
    """The event loop turns, or nobody would answer this."""
    return json_answer({"alive": True})


async def readyz(service: Service, request: ViewRequest) -> HttpAnswer:
    """Whether everything is served; 503 and all reasons when something is not.

    A transaction service that is away is told, and is no reason: plain publishes and polls go on without it. Nor is a
    ZooKeeper that is away: owners go on.
    """
    found = _reasons(service)
    told: dict[str, object] = {"transactions": _transactions(service)}
    if service.membership is not None:
        told["cluster"] = _cluster(service.membership, service.cluster)
    if not found:
        return json_answer({"ready": True, "reasons": [], **told})
    answer = answer_for(found[0])
    assert isinstance(answer.body, bytes)  # problems always are
    reasons = [{"code": error.code, "detail": error.detail} for error in found]
    answer.body = json.dumps({**json.loads(answer.body), "ready": False, "reasons": reasons, **told}).encode()
    return answer


def _cluster(membership: Membership, cluster: Cluster | None) -> dict[str, object]:
    """What this instance is among the others, and which of them it needed and could not reach."""
    lost = {} if cluster is None else cluster.links.unreachable
    return {
        "instance": membership.me.name,
        "instances": len(membership.instances),
        "zookeeper": membership.connected,
        "since": membership.since_ms,
        "unreachable": sorted(each.name for each in membership.instances if each.address in lost),
    }


def _transactions(service: Service) -> dict[str, object]:
    """Who decides transactions, and why committed polls are refused now, if they are."""
    why = None
    try:
        service.transactions.view()
    except TransactionsUnavailable as error:
        why = error.detail
    return {"service": service.config.transactions.service, "available": why is None, "why": why}


def _reasons(service: Service) -> list[PlainsongError]:
    reasons: list[PlainsongError] = []
    if service.stopping:
        reasons.append(ShuttingDown("the daemon is leaving"))
    if service.space.low:
        bound = service.config.storage.min_free_bytes
        reasons.append(
            LowSpace(
                f"{service.space.free_bytes} bytes are free, less than storage.min_free_bytes ({bound}): "
                "publishes are refused, polls go on",
                hint="free some space; it clears by itself",
            )
        )
    return reasons + _apart(service) + _unloadable(service)


def _apart(service: Service) -> list[PlainsongError]:
    """Why this instance owns nothing although it belongs to a cluster."""
    membership = service.membership
    if membership is None or service.stopping:
        return []
    if membership.taken_by is not None:
        return [NoOwner(f"the instance at {membership.taken_by} has this one's name", hint="end one of the two")]
    if not membership.entered:
        return [NoOwner("the cluster is not reached yet", hint="the daemon keeps trying; is ZooKeeper there?")]
    return []


def _unloadable(service: Service) -> list[PlainsongError]:
    """Topics that are asked for and cannot be loaded, most likely since the store does not answer."""
    names = sorted(str(entry.name) for entry in service.directory if entry.mailbox.closed_for is not None)
    if not names:
        return []
    more = f" and {len(names) - MAX_NAMED_TOPICS} more" if len(names) > MAX_NAMED_TOPICS else ""
    shown = ", ".join(names[:MAX_NAMED_TOPICS])
    return [Recovering(f"cannot be loaded: {shown}{more}", hint="the daemon keeps trying; its log says why")]


async def version(service: Service, request: ViewRequest) -> HttpAnswer:
    """What is running, and what it speaks."""
    return json_answer(
        {"version": service.version, "api": "v1", "avro": [1, 2], "store": service.store.traits.kind},
    )


async def metrics(service: Service, request: ViewRequest) -> HttpAnswer:
    """Everything that is counted, as Prometheus reads it."""
    body, content_type = service.metrics.render()
    return HttpAnswer(200, body, content_type)
