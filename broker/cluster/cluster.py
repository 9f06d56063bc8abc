"""What a daemon among others has besides: links to them, the way to any owner, and what it answers to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.cluster.asking import AskAnywhere
from broker.cluster.dispatch import Dispatcher
from broker.cluster.forwarding import Forwarding
from broker.cluster.handing import Hands
from broker.cluster.owners import Owners
from broker.cluster.spreading import Spreading
from broker.cluster.streaming import RoutedStream
from broker.http.bodies import BodyBudget
from broker.peering.bounds import LinkBounds
from broker.peering.door import peer_door
from broker.peering.links import Links
from broker.views.table import ROUTES

if TYPE_CHECKING:
    import trio

    from actors.directory import Directory
    from actors.ownership import Ownership
    from broker.config import Config
    from broker.http.bodies import Holding
    from broker.http.conversation import Conversation
    from broker.http.exchange import HotHandlers
    from broker.http.listen import PeerDoor
    from broker.metrics import Metrics
    from broker.service import Service
    from broker.views.route import Route

#: Calls of a link that are no client's.
OWN_CALLS = 1024


class Cluster:
    """This instance as one of several.

    Args:
      nursery: where links live: they end after all that needs them.
    """

    def __init__(
        self, config: Config, ownership: Ownership, directory: Directory, metrics: Metrics, nursery: trio.Nursery
    ) -> None:
        self.ownership = ownership
        # Each connection may have one request under way, a poll that waits most often; and daemons ask, too.
        self._bounds = LinkBounds(requests=config.http.max_connections + OWN_CALLS)
        self.links = Links(nursery, self._bounds)
        self.owners = Owners(ownership, self.links, metrics)
        self.asking = AskAnywhere(self.owners, directory)
        self.hands = Hands(directory, self.owners)
        directory.pass_on = self.hands.pass_on
        self.forwarding = Forwarding(
            self.owners,
            Spreading(self.owners),
            decides=config.transactions.service == "embedded",
            max_wait_ms=config.poll.max_wait_ms,
        )
        self._budget = BodyBudget(config.http.max_inflight_bytes)
        self._dispatcher: Dispatcher | None = None

    @property
    def dispatcher(self) -> Dispatcher:
        """What answers other instances; there once ``answer_with`` was called."""
        assert self._dispatcher is not None
        return self._dispatcher

    def answer_with(self, service: Service, handlers: HotHandlers) -> None:
        """Answer other instances with this service; ``handlers`` are those that answer here, uncounted."""
        self._dispatcher = Dispatcher(service, self.owners, handlers, ROUTES, self._budget)
        self._dispatcher.kinds |= self.hands.kinds()

    def door(self) -> PeerDoor:
        """What serves the connections of other instances."""
        return peer_door(self.dispatcher, self._bounds)

    def routes(self) -> tuple[Route, ...]:
        """All routes that are not hot, answered wherever they belong."""
        return self.forwarding.routes(ROUTES)

    def begin(self, service: Service, namespace: str, topic: str, request_id: str, held: Holding) -> Conversation:
        """A client's stream, wherever its topic is. Raises InvalidName."""
        return RoutedStream(service, self.owners, namespace, topic, request_id, held)
