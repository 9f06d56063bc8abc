"""What handlers and views work with: the actors behind the directory, the store to read from, and the bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import trio

from actors.reading import read_page
from broker.http.budgets import AnswerBudget
from broker.metrics import Rates

if TYPE_CHECKING:
    from actors.directory import Directory
    from actors.namespaces import Namespaces
    from actors.observe import Clock, SpaceGuard
    from actors.pointers import PointerIndex
    from actors.transactions import TransactionService
    from broker.authority import Authority, Transactions
    from broker.cluster.membership import Membership
    from broker.cluster.serve import Cluster
    from broker.config import Config
    from broker.logs import AccessLog
    from broker.metrics import Metrics
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.page import Page
    from plainsong.protocol.topic.asks import Span
    from plainsong.protocol.transactions.view import View
    from storage.base import Store

A = TypeVar("A")


@dataclass(slots=True)
class Service:
    """The daemon as its front end sees it; one for all connections."""

    config: Config
    store: Store
    directory: Directory
    clock: Clock
    space: SpaceGuard
    metrics: Metrics
    access: AccessLog
    version: str
    decider: Authority
    """Who decides transactions, with its life."""
    namespaces: Namespaces
    """What namespaces say for their topics."""
    pointers: PointerIndex
    """Undecided write pointers, their topics, and who waits for them."""
    stopping: bool = False
    """Whether the daemon is leaving: readyz says so, and new work is refused by the closed mailboxes."""
    answers: AnswerBudget = field(init=False)
    """What answers may hold until their readers have taken them."""
    rates: Rates = field(default_factory=Rates)
    """How much each topic was published to and read lately."""
    cluster: Cluster | None = None
    """The way to other instances; None: there are none."""
    membership: Membership | None = None
    """Who the other instances are, and who owns what; None: this one is alone."""
    served: trio.Event = field(default_factory=trio.Event)
    """Set once the server has stopped and its last answers have left."""

    def __post_init__(self) -> None:
        self.answers = AnswerBudget(self.config.http.max_answer_bytes)

    @property
    def transactions(self) -> Transactions:
        """Who decides transactions: what committed readers see, and what became of a pointer."""
        return self.decider.transactions

    authority = transactions

    @property
    def embedded(self) -> TransactionService | None:
        """The same, where it is this daemon's own service; None: a Tephra, or nobody."""
        return self.decider.embedded

    def stop(self) -> None:
        """Take nothing new; polls that wait are answered with what there is."""
        self.stopping = True
        self.directory.close()
        self.pointers.close()

    async def drained(self) -> None:
        """Wait until topics and then the transaction service, which may have asked them, have ended. Stop first."""
        await self.directory.drained()
        await self.decider.aclose()

    async def ask(self, name: TopicName, ask: Ask[A]) -> A:
        """The answer of a topic's actor wherever it is: for what goes on while the topic may change hands.

        Raises:
          NoOwner: there is no owner just now; nothing happened. PlainsongError: as ``AskAnywhere.ask`` does.
        """
        return await (self.directory if self.cluster is None else self.cluster.asks).ask(name, ask)

    async def read(
        self,
        name: TopicName,
        span: Span,
        *,
        limit: int,
        max_bytes: int,
        view: View | None = None,
        with_pointers: bool = False,
    ) -> Page:
        """The next messages of a span, from the scan cache or the store.

        Args:
          view: what the reader may see; None: everything, undecided and rolled back.
          with_pointers: fill in ``Page.pointers``.
        Raises:
          StoreError: the store could not be read.
        """
        return await read_page(
            self.store,
            self.directory.cache(name),
            span,
            limit=limit,
            max_bytes=max_bytes,
            view=view,
            with_pointers=with_pointers,
        )
