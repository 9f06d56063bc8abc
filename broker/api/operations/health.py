"""Health of the daemon for load balancers, service managers and people: live, ready, version, metrics, identity."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker.api.answers import json_answer
from broker.api.operations.replication import not_leased
from broker.finding import shown_bytes
from broker.http.messages import Answer, answer_for, status_of
from broker.metrics import VARY_ACCEPT
from broker.security.tokens import time_text
from plainsong.protocol.answers.service import DaemonVersion, Liveness, Readiness
from plainsong.protocol.errors import LowSpace, NoOwner, Overloaded, Recovering, ShuttingDown, TransactionsUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    import trio

    from actors.directory import Directory
    from actors.observe import SpaceGuard
    from broker.authority import Transactions
    from broker.http.messages import Request
    from broker.link.client import Links
    from broker.membership.membership import Membership
    from broker.metrics import Metrics
    from plainsong.protocol.answers.service import ClusterHealth, ReadinessReason, TransactionsHealth, Whoami
    from plainsong.protocol.errors import PlainsongError

#: How many topics that cannot be loaded an answer names; the rest is only counted.
MAX_NAMED_TOPICS = 10


@dataclass(frozen=True, slots=True)
class Health:
    """The routes about the daemon itself."""

    version: str
    store_kind: str
    decides: str
    """``transactions.service``."""
    min_free_bytes: int
    """``storage.min_free_bytes``."""
    directory: Directory
    space: SpaceGuard
    transactions: Transactions
    metrics: Metrics
    stopping: trio.Event
    membership: Membership | None
    links: Links | None
    description: Callable[[], dict[str, Any]]
    """Returns the description of the API."""
    are_descriptors_short: Callable[[], bool] = lambda: False
    """True if connections were refused recently because file descriptors ran out."""
    security: Callable[[], dict[str, Any] | None] = lambda: None
    """Returns the security files that could not be reloaded, and why; None if all are in force."""
    groups_of: Callable[[str], tuple[str, ...]] = lambda name: ()
    """Returns the groups of a name in the grants file."""
    is_leased: Callable[[], bool] = lambda: True
    """False if a standby may have taken over by itself, so that requests are refused."""

    async def ping(self, request: Request) -> Answer:
        """Answer ``OK``."""
        return Answer(200, b"OK", "text/plain; charset=utf-8")

    async def livez(self, request: Request) -> Answer:
        """Answer whenever the event loop runs."""
        return json_answer(Liveness(alive=True))

    async def describe(self, request: Request) -> Answer:
        """Return the OpenAPI document of this version."""
        return json_answer(self.description())

    async def readyz(self, request: Request) -> Answer:
        """Answer 200 if everything is served; otherwise 503 with all reasons.

        An unavailable transaction service is reported, but is not a reason: plain publishes and polls work without it.
        Nor is an unavailable ZooKeeper: owners keep their topics.
        """
        found = self._reasons()
        if not request.rights.on_service("inspect"):
            return self._status_alone(found)
        reasons: list[ReadinessReason] = [{"code": error.code, "detail": error.detail} for error in found]
        shown: Readiness = {"ready": not found, "reasons": reasons, "transactions": self._transactions()}
        if (stale := self.security()) is not None:
            shown["security"] = stale
        if self.membership is not None:
            shown["cluster"] = _cluster(self.membership, self.links)
        if not found:
            return json_answer(shown)
        answer = answer_for(found[0])
        assert isinstance(answer.body, bytes)  # problems always are
        answer.body = json.dumps({**json.loads(answer.body), **shown}).encode()
        return answer

    @staticmethod
    def _status_alone(found: list[PlainsongError]) -> Answer:
        """Return the part of the answer that needs no authentication."""
        answer = json_answer(Readiness(ready=not found))
        if found:
            answer.status = status_of(found[0])
            answer.headers.append(("Retry-After", str(found[0].retry_after_s or 1)))
        return answer

    def _transactions(self) -> TransactionsHealth:
        """Return the transaction service, and why committed polls are refused now, if they are."""
        why = None
        try:
            self.transactions.view()
        except TransactionsUnavailable as error:
            why = error.detail
        return {"service": self.decides, "available": why is None, "why": why}

    def _reasons(self) -> list[PlainsongError]:
        reasons: list[PlainsongError] = []
        if self.stopping.is_set():
            reasons.append(ShuttingDown("the daemon is shutting down"))
        if not self.is_leased():
            reasons.append(not_leased())
        if self.space.low:
            reasons.append(
                LowSpace(
                    f"only {shown_bytes(self.space.free_bytes or 0)} of disk space is free, less than "
                    f"storage.min_free_bytes ({shown_bytes(self.min_free_bytes)}): publishes are refused, polls still "
                    "work",
                    hint="free some disk space; publishes then work again",
                )
            )
        if self.are_descriptors_short():
            reasons.append(
                Overloaded(
                    "connections are refused, because few file descriptors are left",
                    hint="raise the limit on open files: LimitNOFILE of the unit, or ulimit -n",
                )
            )
        return reasons + self._apart() + self._unloadable()

    def _apart(self) -> list[PlainsongError]:
        """Return why this instance, a member of a cluster, owns nothing."""
        membership = self.membership
        if membership is None or self.stopping.is_set():
            return []
        if membership.taken_by is not None:
            return [
                NoOwner(
                    f"the instance at {membership.taken_by} has the same name",
                    hint="stop one of the two, or give it another cluster.instance",
                )
            ]
        if membership.kept_out_by is not None:
            return [
                NoOwner(
                    f"cluster.secret_file differs from that of the instance at {membership.kept_out_by}",
                    hint=(
                        "give all instances the same secret; this one joins once the secrets match, or once the "
                        "others have stopped"
                    ),
                )
            ]
        if not membership.entered:
            return [
                NoOwner(
                    "this instance has not joined the cluster yet",
                    hint="the daemon keeps trying; check that ZooKeeper is running",
                )
            ]
        return []

    def _unloadable(self) -> list[PlainsongError]:
        """Return requested topics that cannot be loaded, usually because the store does not answer."""
        names = sorted(str(entry.name) for entry in self.directory if entry.mailbox.closed_for is not None)
        if not names:
            return []
        more = f" and {len(names) - MAX_NAMED_TOPICS} more" if len(names) > MAX_NAMED_TOPICS else ""
        named = ", ".join(names[:MAX_NAMED_TOPICS])
        return [Recovering(f"topics cannot be loaded: {named}{more}", hint="the daemon keeps trying; its log says why")]

    async def whoami(self, request: Request) -> Answer:
        """Return the client's own name, how it was authenticated, and its grants."""
        request.parameters()
        who = request.who
        assert who.via != "thrift"  # this is HTTP
        shown: Whoami = {
            "name": who.name,
            "via": who.via,
            "credential": who.credential or None,
            "expires": time_text(who.expires_ms),
            "groups": sorted({*who.groups, *self.groups_of(who.name)}),
            "grants": [
                {"verbs": list(grant.verbs), "on": [str(pattern) for pattern in grant.on]}
                for grant in request.rights.grants
            ],
        }
        return json_answer(shown)

    async def show_version(self, request: Request) -> Answer:
        """Return the running version, the API versions and the store."""
        return json_answer(DaemonVersion(version=self.version, api="v1", avro=[1, 2], store=self.store_kind))

    async def show_metrics(self, request: Request) -> Answer:
        """Return all metrics, as Prometheus text, or OpenMetrics if the client accepts it."""
        body, content_type = self.metrics.render(request.headers.get("accept", ""))
        return Answer(200, body, content_type, [VARY_ACCEPT])


def _cluster(membership: Membership, links: Links | None) -> ClusterHealth:
    """Return this instance's place in the cluster, and the instances it failed to reach."""
    lost = {} if links is None else links.unreachable
    return {
        "instance": membership.me.name,
        "instances": len(membership.instances),
        "zookeeper": membership.connected,
        "since": membership.since_ms,
        "unreachable": sorted(each.name for each in membership.instances if each.address in lost),
    }
