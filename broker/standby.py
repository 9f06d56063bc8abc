"""A daemon that is a standby: follows the log of the primary, answers a few routes, and refuses all others.

standby   builds and follows; returns once the directory is a primary's
servers   /livez, /metrics, GET /v1/replication and the take-over; every other answer is 503 standby, with the
          primary's URLs
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import trio

from actors.standby import Standby
from broker.api.answers import json_answer
from broker.api.operations.replication import NO_COPY
from broker.api.routes import ROUTES
from broker.http.budgets import AnswerBudget, BodyBudget
from broker.http.handlers import RequestTasks
from broker.http.messages import Answer, answer_for
from broker.http.origin_check import origin_check
from broker.http.reactor import open_reactor
from broker.http.route import Accounting, Endpoint, accounted
from broker.http.server import serve_http
from broker.logs import AccessLog
from broker.metrics import VARY_ACCEPT, Metrics
from broker.replication import open_objects
from broker.security.setup import build_security
from broker.tls import certificates_of
from plainsong.protocol.errors import Conflict, OutcomeUnknown
from plainsong.protocol.errors import Standby as StandbyRefusal
from plainsong.protocol.version import VERSION
from storage.clock import now_ms
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.replication.protocol import TakeOverLost
from storage.replication.segment import mode_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actors.lease_hold import LeaseHold
    from actors.standby import StandbyStatus
    from broker.config import Config
    from broker.http.messages import Answered, Handler, Request
    from broker.tls import Certificates
    from plainsong.protocol.answers.service import TakenOver

#: The longest time that a request for a take-over waits: shorter than that of the command.
MAX_TAKE_OVER_S = 45.0
#: Names the URLs at which clients reach the primary.
PRIMARY_HEADER = "Plainsong-Primary"


@dataclass(frozen=True, slots=True)
class StandbyRoutes:
    """The handlers of a standby."""

    standby: Standby
    metrics: Metrics
    to: str
    """``replication.to``."""

    def handlers(self, tasks: RequestTasks) -> dict[str, Handler]:
        """Return the routes that a standby answers, by name."""
        return {
            "livez": tasks.adapt(self.livez),
            "readyz": tasks.adapt(self.readyz),
            "metrics": tasks.adapt(self.show_metrics),
            "get_replication": tasks.adapt(self.show),
            "take_over": tasks.adapt(self.take_over),
        }

    async def livez(self, request: Request) -> Answer:
        """Answer whenever the event loop runs."""
        del request
        return json_answer({"alive": True})

    async def readyz(self, request: Request) -> Answer:
        """Answer 503: a standby serves nothing."""
        del request
        return self.refusal()

    async def show_metrics(self, request: Request) -> Answer:
        """Return the metrics of a standby."""
        body, content_type = self.metrics.render(request.headers.get("accept", ""))
        return Answer(200, body, content_type, [VARY_ACCEPT])

    async def show(self, request: Request) -> Answer:
        """Return the current state."""
        request.parameters()
        status = self.standby.status
        shown = NO_COPY | {
            "role": "standby",
            "to": self.to,
            "mode": mode_name(status.mode),
            "epoch": status.epoch,
            "lastCommit": status.last,
            "countedCommit": status.last if status.caught_up else None,
            "lagCommits": status.lag_commits,
            "error": status.error or None,
            "urls": list(status.urls),
            "automatic": status.automatic,
        }
        return json_answer(shown)

    async def take_over(self, request: Request) -> Answer:
        """Make this daemon the primary; answer once the last epoch has ended."""
        request.parameters()
        if request.waited_ms:
            # The client has left, so the attempt has ended, or ends with the seal that it has sent.
            raise OutcomeUnknown("the request ended before the standby had taken over", hint="ask for its role")
        try:
            taken: TakenOver = {"epoch": await self.standby.take_over(MAX_TAKE_OVER_S)}
        except TakeOverLost as error:
            raise Conflict(error.detail, hint=error.hint) from error
        return json_answer(taken)

    def refuse(self, request: Request, answered: Answered) -> None:
        """Answer any other route."""
        del request
        answered(self.refusal())

    def refusal(self) -> Answer:
        """Return the answer with the primary's URLs."""
        urls = self.standby.status.urls
        answer = answer_for(self.error())
        if urls:
            answer.headers.append((PRIMARY_HEADER, ", ".join(urls)))
        return answer

    def error(self) -> StandbyRefusal:
        """Return the error of every route that a standby does not answer."""
        urls = self.standby.status.urls
        where = f"; the primary is at {', '.join(urls)}" if urls else ""
        return StandbyRefusal(f"this daemon is a standby{where}", hint="send the request to the primary")

    def begin(self, *_: object) -> NoReturn:
        """Refuse a stream of publishes."""
        raise self.error()


async def run_standby(
    config: Config,
    announce: Callable[[Sequence[str]], None],
    stop: trio.Event,
    holding: trio.Nursery,
    hold: LeaseHold,
) -> bool:
    """Follow and serve until ``stop`` is set, or this process has taken over. Returns True in the latter case.

    Args:
      holding: runs a task that renews the lease of a take-over, until the primary on this directory has the lease.
      hold: used by that task, and by the primary.
    Raises:
      StoreUnusable: the directory or the object store cannot be used, or the primary allows no standby.
      DamagedLog: the log cannot be read.
      OSError: the address cannot be listened on.
    """
    replication, directory = config.replication, config.storage.data_dir.absolute()
    standby = Standby(
        open_objects(replication.to, replication.timeout_s),
        directory,
        replication,
        partial(LevelDBStore.open, directory, LevelDBOptions(config.storage), address=config.http.bind, follows=True),
        now_ms,
        holder=platform.node(),
        hold=hold,
    )
    has_taken_over = False
    ended = trio.Event()
    async with trio.open_nursery() as nursery:

        async def follow() -> None:
            nonlocal has_taken_over
            await standby.run()
            has_taken_over = True
            ended.set()

        async def wait() -> None:
            await stop.wait()
            ended.set()

        nursery.start_soon(wait)
        nursery.start_soon(follow)
        holding.start_soon(standby.hold)
        metrics = Metrics(VERSION)
        add_standby_gauges(metrics, standby)
        # Its last answer reports to a client that the take-over has succeeded.
        await _serve(config, standby, metrics, announce, ended, certificates_of(config))
        nursery.cancel_scope.cancel()
    return has_taken_over


async def _serve(
    config: Config,
    standby: Standby,
    metrics: Metrics,
    announce: Callable[[Sequence[str]], None],
    ended: trio.Event,
    certificates: Certificates | None,
) -> None:
    security = build_security(config, metrics, metrics.security_reload_failed, metrics.quota_refused)
    accounting = Accounting(metrics.requested, AccessLog(enabled=config.log.access))
    routes = StandbyRoutes(standby, metrics, config.replication.to)
    check = origin_check(config)
    async with open_reactor(config.http.keep_alive_s) as reactor, trio.open_nursery() as nursery:
        handlers = routes.handlers(RequestTasks(nursery))
        endpoints = tuple(
            accounted(Endpoint(each, handlers.get(each.name, routes.refuse)), accounting) for each in ROUTES
        )
        if security.guard.required:
            nursery.start_soon(security.run)
        if certificates is not None:
            certificates.report_names_to(check.serve_names)
            nursery.start_soon(certificates.watch, config.security.reload_s)
        serving = partial(
            serve_http,
            config.http,
            endpoints,
            reactor=reactor,
            budget=BodyBudget(config.http.max_inflight_bytes, AnswerBudget(config.http.max_answer_bytes)),
            stop=ended,
            grace_s=config.shutdown.drain_s,
            tls=certificates,
            check=check,
            guard=security.guard,
            begin=routes.begin,
            accounting=accounting,
        )
        async with trio.open_nursery() as servers:
            announce(await servers.start(serving))
        nursery.cancel_scope.cancel()


def add_standby_gauges(metrics: Metrics, standby: Standby) -> None:
    """Register the gauges of a standby; those of a primary have the same names."""

    def reads(name: str, text: str, read: Callable[[StandbyStatus], float | None]) -> None:
        metrics.reads(f"plainsong_replication_{name}", text, lambda: read(standby.status))

    reads("is_standby", "1 on a standby; absent on a primary.", lambda status: 1)
    reads("epoch", "Epoch that this standby follows.", lambda status: status.epoch)
    reads("last_commit", "Last commit that this standby has applied.", lambda status: status.last)
    reads("lag_commits", "Commits in the log that this standby has not applied yet.", lambda status: status.lag_commits)
    reads("failing", "1 while the object store refuses access or does not answer.", lambda status: bool(status.error))
    reads(
        "automatic",
        "1 while this standby takes over automatically when the lease runs out; absent on a primary.",
        lambda status: status.automatic,
    )
