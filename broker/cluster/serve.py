"""This instance as a member of a cluster: its links, calls of the owners of topics, and answers to other instances."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from broker.api.messages.poll import read_within
from broker.api.messages.poll_many import Since
from broker.cluster.forward import Forwarding, ScatterGather, topics_in
from broker.cluster.handover import Handover
from broker.cluster.owners import Owners, RoutedAsks, decode_ask
from broker.cluster.remote_stream import RoutedStream, serve_stream
from broker.http.budgets import BodyBudget
from broker.http.messages import only_plain
from broker.http.route import owned_name
from broker.http.wire import answer_to
from broker.link.client import Links, connect, connect_by_tls
from broker.link.flow import Reply
from broker.link.http_codec import answer_request, decode_identity, decode_request, encode_answer, encode_page
from broker.link.proof import link_secret
from broker.link.server import CallHandler, in_task, peer_handler
from broker.link.version_0_1 import HOT, REQUEST, VIEW, hot_as_request
from broker.link.wire import LinkBounds
from broker.security.guard import OPEN, forbidden
from broker.security.identity import ANONYMOUS
from plainsong.protocol.errors import BadRequest, NoOwner, ShuttingDown
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.asks import Look

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from actors.directory import Directory
    from actors.ownership import Ownership
    from broker.api.messages.poll_many import LocalTopics, PollingMany
    from broker.api.messages.stream import Streams
    from broker.config import Config
    from broker.http.budgets import AnswerBudget, Reservation
    from broker.http.handlers import RequestTasks
    from broker.http.messages import Conversation
    from broker.http.route import Endpoint
    from broker.link.server import Call, PendingReply, ServesPeer
    from broker.metrics import Metrics
    from broker.security.guard import Guard
    from broker.security.identity import Identity
    from broker.tls import Certificates
    from plainsong.protocol.errors import PlainsongError

#: How many concurrent calls a link may have in addition to clients' requests.
OWN_CALLS = 1024


class Cluster:
    """This instance as a member of a cluster.

    Args:
      nursery: runs the links, which must outlive everything that uses them.
    """

    def __init__(
        self,
        config: Config,
        ownership: Ownership,
        directory: Directory,
        metrics: Metrics,
        nursery: trio.Nursery,
        certificates: Certificates | None = None,
    ) -> None:
        self.ownership = ownership
        #: The secret that instances prove to each other; None if there is none.
        self.secret = link_secret(config, ownership.me.name)
        dial: Callable[[str], Awaitable[trio.abc.Stream]] = (
            connect if certificates is None else partial(connect_by_tls, lambda: certificates.now.links)
        )
        # Each client connection may have one request in progress, usually a waiting poll; and daemons call each other.
        self._bounds = LinkBounds(requests=config.http.max_connections + OWN_CALLS)
        self.links = Links(nursery, self._bounds, dial=dial, secret=self.secret)
        self.owners = Owners(ownership, self.links, metrics)
        self.asks = RoutedAsks(self.owners, directory)
        self.handover = Handover(directory, self.owners)
        directory.open_at_owners = self.handover.pass_on
        self._config = config
        self._budget = BodyBudget(config.http.max_inflight_bytes)
        self._dispatcher: Dispatcher | None = None

    @property
    def dispatcher(self) -> Dispatcher:
        """The handler of other instances' calls; available after ``forward``."""
        assert self._dispatcher is not None
        return self._dispatcher

    def forward(self, endpoints: tuple[Endpoint, ...], local: Local, tasks: RequestTasks) -> tuple[Endpoint, ...]:
        """Return the same routes, now answered by the owner; ``endpoints`` answer calls from other instances."""
        self._dispatcher = Dispatcher(endpoints, local, self.owners, self._budget)
        self._dispatcher.kinds |= self.handover.kinds()
        scatter = ScatterGather(self.owners, local.polling_many, local.topics)
        decides, max_wait_ms = self._config.transactions.service, self._config.poll.max_wait_ms
        forwarding = Forwarding(self.owners, scatter, tasks, decides=decides, max_wait_ms=max_wait_ms)
        return forwarding.endpoints(endpoints)

    def peer_handler(self) -> ServesPeer:
        """Return the handler for connections of other instances."""
        return peer_handler(self.dispatcher, self._bounds, self.secret)

    def begin(
        self,
        streams: Streams,
        namespace: str,
        topic: str,
        request_id: str,
        reservation: Reservation,
        who: Identity = ANONYMOUS,
    ) -> Conversation:
        """Begin a client's stream to a topic of any instance. Raises InvalidName."""
        return RoutedStream(streams, self.owners, namespace, topic, request_id, reservation, who)


@dataclass(frozen=True, slots=True)
class Local:
    """The parts of this instance that answer without calling other instances."""

    directory: Directory
    topics: LocalTopics
    polling_many: PollingMany
    streams: Streams
    answers: AnswerBudget
    guard: Guard = OPEN


# --- dispatch --------------------------------------------------------------------------------------


class Dispatcher:
    """Answers the calls of other instances itself, or with NoOwner, but never by calling a third instance.

    The exception is a stream that began on this instance: it continues after its topic has moved (``serve_stream``).

    Args:
      endpoints: the endpoints that answer on this instance, as without a cluster.
      budget: limits the memory of other instances' streams.
    """

    def __init__(self, endpoints: Iterable[Endpoint], local: Local, owners: Owners, budget: BodyBudget) -> None:
        self._endpoints = {endpoint.route.name: endpoint for endpoint in endpoints}
        self._local = local
        self._owners = owners
        self._budget = budget
        #: The handlers by kind of call; other parts of the daemon add theirs, such as ``tx.sync``.
        self.kinds: dict[str, CallHandler] = {
            REQUEST: self._request,
            HOT: self._hot,
            VIEW: self._request,
            "ask": self._ask,
            "look_many": in_task(self._look_many),
            "page": in_task(self._page),
            "stream": in_task(self._stream),
        }

    def __call__(self, call: Call, reply: PendingReply) -> None:
        """Answer a call. Raises NoOwner: this instance does not own what the call is about, and has changed nothing."""
        handler = self.kinds.get(call.kind)
        if handler is None:
            raise BadRequest(
                f"{call.kind[:80]!r} is nothing this version answers",
                hint="do all instances run the same version?",
            )
        handler(call, reply)

    def _refuse_unless_mine(self, name: TopicName | None) -> None:
        if name is not None and not self._owners.ownership.is_mine(name):
            raise NoOwner(f"{name} is not owned by {self._owners.ownership.me.name}")

    # --- requests ------------------------------------------------------------------------------

    def _request(self, call: Call, reply: PendingReply) -> None:
        name, request = decode_request(call.value, call.body)
        route, handler = self._endpoints[name]
        for owned in topics_in(request) if route.owner == "topics" else [owned_name(route.owner, request.path)]:
            self._refuse_unless_mine(owned)
        # The instance that got the request has authenticated the name; each owner authorizes it by its own grants.
        admission = self._local.guard.admission_of(request.who)
        self._local.guard.authorize(admission, route, request.path)
        request.who, request.rights = admission.who, admission.rights
        self._owners.metrics.forwarded("in")

        def refused(error: Exception) -> Reply | Exception:
            """Return the problem for the client; NoOwner and ShuttingDown are for the instance that called."""
            plain = only_plain(error)
            if isinstance(plain, NoOwner | ShuttingDown):
                return plain
            return encode_answer(answer_to(error, request.request_id))

        answer_request(handler, request, self._local.answers.room(), call, reply, only_looks=False, refused=refused)

    def _hot(self, call: Call, reply: PendingReply) -> None:
        call.value = hot_as_request(call.value)
        self._request(call, reply)

    async def _stream(self, call: Call) -> Reply:
        assert call.channel is not None  # streams are conversations
        namespace, topic, request_id, *more = call.value
        who = decode_identity(more[0]) if more else ANONYMOUS
        self._owners.metrics.forwarded("in")
        stream, path = self._endpoints["stream"].route, {"namespace": namespace, "topic": topic}
        guard = self._local.guard
        guard.authorize(guard.admission_of(who), stream, path)
        with self._budget.reserve() as reservation:
            await serve_stream(
                self._local.streams, self._owners, call.channel, namespace, topic, request_id, reservation, who
            )
        return Reply()

    # --- calls of the daemons themselves -------------------------------------------------------

    def _ask(self, call: Call, reply: PendingReply) -> None:
        name, ask = decode_ask(call.value)
        if isinstance(ask, Look):  # may wait for messages until the caller gives up
            reply.run(partial(self._looked, name, ask))
            return
        self._local.directory.put(
            name, ask, lambda found: reply(found if isinstance(found, Exception) else Reply(found))
        )

    async def _looked(self, name: TopicName, look: Look) -> Reply:
        return Reply(await self._local.directory.ask(name, look))

    async def _look_many(self, call: Call) -> Reply:
        given, left_s, *identity = call.value
        wanted = [Since(TopicName(namespace, topic), *rest) for namespace, topic, *rest in given]
        found: list[Any] = [self._forbidden(one.name, identity) for one in wanted]
        allowed = [at for at, error in enumerate(found) if error is None]
        here, asked = self._local.topics, [wanted[at] for at in allowed]
        if left_s is None or len(asked) < len(wanted):  # a refusal is answered without a wait
            answers: Sequence[Any] = await here.look(asked)
        else:
            answers = await here.wait(asked, trio.current_time() + left_s)
        for at, answer in zip(allowed, answers, strict=True):
            found[at] = answer
        return Reply(found)

    def _forbidden(self, name: TopicName, identity: Sequence[Any]) -> PlainsongError | None:
        """Return the error if the name that the caller authenticated may not poll a topic. Raises Unauthenticated."""
        guard = self._local.guard
        admission = guard.admission_of(decode_identity(identity[0]) if identity else ANONYMOUS)
        return None if admission.rights.on_topic("poll", *name) else forbidden(admission.who, "poll", str(name))

    async def _page(self, call: Call) -> Reply:
        name, span, limit, max_bytes, view, *identity = call.value
        if (refusal := self._forbidden(name, identity)) is not None:
            raise refusal
        here, room = self._local.topics, self._local.answers.room()
        try:
            return encode_page(
                await read_within(room, limit, max_bytes, partial(here.page, name, span, limit, view=view)), room
            )
        except BaseException:
            room.release()
            raise
