"""The client: its connections and lifetime, its transactions, and the way to everything else."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

from plainsong import calls
from plainsong._async._backend import Owned, shielded
from plainsong._async._pool import Pool
from plainsong._async.administration import AsyncAdministration
from plainsong._async.messages import AsyncMessages
from plainsong._async.retry import AsyncChannel
from plainsong._async.transaction import AsyncTransactionContext
from plainsong._async.transactions import AsyncTransactions
from plainsong.bound import moved, moved_property, of_administration, of_topic
from plainsong.errors import NotSent
from plainsong.protocol.errors import TransactionConflict
from plainsong.protocol.names import topic_name
from plainsong.settings import DEFAULT_URL, WAIT_FOR_DAEMON_S, Settings, from_environment
from plainsong.transactions import (
    DEFAULT_BUFFER_BYTES,
    DEFAULT_BUFFER_MESSAGES,
    DEFAULT_RETRIES,
    Retries,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from typing import Self, Unpack

    from plainsong.credentials import File
    from plainsong.messages import (
        TopicOptions,
    )
    from plainsong.participants import AnyParticipant
    from plainsong.transactions import TransactionKind

T = TypeVar("T")

log = logging.getLogger("plainsong.client")


class AsyncClient(AsyncMessages):
    """Talks to a daemon: topics, publishing, polling, reading, on asyncio and trio alike.

    It belongs to one event loop; any number of tasks may share it. Use it in an ``async with`` block, or ``aclose`` it.
    It connects on first use, so creating it needs no daemon. If a task is cancelled in the middle of a call, the outcome
    of the request is unknown, as after a broken connection.

    Every failure of the daemon or the network is a ``PlainsongError``, whose ``outcome`` says whether the request
    happened. The client retries a call, with pauses, while that is safe and within ``deadline_s``.

    Args:
      url: the daemon's URL, or several (a list, or one string with commas): the client fails over to the next if one is
        unreachable or shutting down.
      namespace: the namespace of all topics.
      token, token_file: a bearer token, or a file with one on its only line, which is read again if the daemon refuses it.
      ca_file: the authorities that are trusted for https, PEM; the system's by default.
      certificate: the files of the client's own certificate and its key, PEM, for daemons that ask for one.
      insecure: send the token unencrypted to another machine; without it, that is an InvalidParameter.
      connect_timeout_s: for opening a connection, the resolution of its name included.
      request_timeout_s: for one request and its complete answer; with one daemon a large body has a second more for
        each 16 KiB, and the smallest pages of a reader may take longer.
      deadline_s: for a call with all its retries; methods take their own. A poll's ``wait_ms`` extends
        both limits.
      retry: False: one attempt at each URL, and no pauses.
      max_connections: open at once; further requests wait for one.
      follow_owners: with several instances, send requests to the topic's owner, which the first answer names; False:
        only to ``url``, as behind a load balancer.
      wait_for_daemon_s: how long a first connection that is refused is retried, until any daemon has answered once.
        Give more to programs that start before their daemon.
    Raises:
      InvalidName, InvalidParameter: an argument is invalid.
    """

    def __init__(
        self,
        url: str | Sequence[str] = DEFAULT_URL,
        *,
        namespace: str = "default",
        token: str | None = None,
        token_file: File | None = None,
        ca_file: File | None = None,
        certificate: tuple[File, File] | None = None,
        insecure: bool = False,
        connect_timeout_s: float = 5.0,
        request_timeout_s: float = 30.0,
        deadline_s: float = 60.0,
        retry: bool = True,
        max_connections: int = 100,
        follow_owners: bool = True,
        wait_for_daemon_s: float = WAIT_FOR_DAEMON_S,
    ) -> None:
        self._settings = Settings.checked(
            url,
            namespace=namespace,
            token=token,
            token_file=token_file,
            ca_file=ca_file,
            certificate=certificate,
            insecure=insecure,
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            deadline_s=deadline_s,
            retry=retry,
            max_connections=max_connections,
            follow_owners=follow_owners,
            wait_for_daemon_s=wait_for_daemon_s,
        )
        self._channel = AsyncChannel(self._settings, Pool(self._settings))
        self._owned = Owned()

    @classmethod
    def from_environment(cls, **options: Any) -> Self:
        """A client for ``PLAINSONG_URL``, ``PLAINSONG_NAMESPACE``, ``PLAINSONG_TOKEN_FILE``, ``PLAINSONG_CA_FILE``,
        ``PLAINSONG_CERTIFICATE`` and ``PLAINSONG_KEY``; ``options`` as above override them.
        """
        return cls(**{**from_environment(), **options})

    async def aclose(self) -> None:
        """Closes its publishers, each within its ``exit_timeout_s``, then all connections. Idempotent.

        Raises:
          NotSent: its publishers could not send everything; all is closed nevertheless.
        """
        try:
            await self._owned.aclose()
        finally:
            await self._channel.pool.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with shielded():
                await self.aclose()
        except NotSent as error:
            if kind is None:
                raise
            log.warning("a client was closed after an error: %s", error.detail)

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.namespace} at {self._channel.places.current}>"

    # --- transactions ------------------------------------------------------------------------------

    @property
    def transactions(self) -> AsyncTransactions:
        """The daemon's transaction service, to begin and end transactions by hand, and to manage all of them."""
        return AsyncTransactions(self._channel)

    def transaction(
        self,
        participants: Iterable[AnyParticipant] = (),
        *,
        timeout_s: int | None = None,
        type: TransactionKind = "short",  # noqa: A002 - the service's word
        client_id: str | None = None,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        buffer_messages: int = DEFAULT_BUFFER_MESSAGES,
    ) -> AsyncTransactionContext:
        """A transaction, to be used in an ``async with`` block: committed at its end, undone when an exception leaves it.

        Args:
          participants: take part in addition to the messages (``AsyncTransactionAware``), and are called in this order;
            messages always come last.
          timeout_s: a whole number of seconds after which it is invalid; None: the daemon's default, 30.
          type: ``"short"``, or ``"long"`` for hours of work: its conflict check costs more, and a failed one stays on
            the list of invalid transactions.
          client_id: names the client in lists of transactions; None: this machine's name and the process.
          buffer_bytes, buffer_messages: how much the client buffers until the commit; the daemon stores the rest.
        Raises:
          InvalidParameter: at once. The block raises as ``AsyncTransactionContext.start`` and ``finish`` do.
        """
        return AsyncTransactionContext(
            self,
            participants,
            timeout_s=timeout_s,
            type=type,
            client_id=client_id,
            buffer_bytes=buffer_bytes,
            buffer_messages=buffer_messages,
        )

    async def run_in_transaction(
        self,
        function: Callable[[AsyncTransactionContext], Awaitable[T]],
        *,
        retries: int = DEFAULT_RETRIES,
        participants: Iterable[AnyParticipant] = (),
        timeout_s: int | None = None,
        type: TransactionKind = "short",  # noqa: A002 - the service's word
        client_id: str | None = None,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        buffer_messages: int = DEFAULT_BUFFER_MESSAGES,
    ) -> T:
        """Runs ``function(transaction)`` in a transaction and returns its result after the commit.

        After a conflict with another transaction it undoes this one, and calls the function again in a new one, after a
        pause that doubles and is shortened at random. The function reads the same messages again, since positions have
        not moved. Only a conflict is retried.

        Args:
          retries: attempts after the first.
        Raises:
          TransactionConflict: every attempt met one. Any exception of the function, and those of a transaction's block.
        """
        attempts = Retries(retries, self._channel.random)
        members = list(participants)
        while True:
            context = self.transaction(
                members,
                timeout_s=timeout_s,
                type=type,
                client_id=client_id,
                buffer_bytes=buffer_bytes,
                buffer_messages=buffer_messages,
            )
            try:
                async with context as transaction:
                    result = await function(transaction)
            except TransactionConflict as conflict:
                pause_s = attempts.pause_s(conflict)
            else:
                return result
            await self._channel.sleep(pause_s)

    # --- topics ------------------------------------------------------------------------------------

    def topic(self, name: str) -> AsyncTopic:
        """The topic's methods; sends no request. Raises InvalidName."""
        return AsyncTopic(self, name)

    async def topics(self) -> list[str]:
        """The names of all topics of the namespace, sorted."""
        return await self._channel.call(calls.list_topics(self.namespace))

    async def create_topic(
        self, name: str, *, if_not_exists: bool = False, **properties: Unpack[TopicOptions]
    ) -> AsyncTopic:
        """Creates a topic.

        Args:
          if_not_exists: accept an existing topic with these properties; then a lost answer is retried.
          properties: ``ttl_s`` (seconds a message lives, by default seven days), ``transactional``, ``deduplication``,
            ``max_bytes``; those not given, or None, have the daemon's defaults.
        Raises:
          TopicExists, InvalidName, InvalidProperty: nothing happened.
          ConnectionLost, DeadlineExceeded: unknown; check with ``topics``, or repeat with ``if_not_exists``.
        """
        given = calls.changed_properties({}, calls.checked_properties(properties))
        call = calls.create_topic(self.namespace, name, given, if_not_exists=if_not_exists)
        await self._channel.call(call)
        return AsyncTopic(self, name)

    @property
    def admin(self) -> AsyncAdministration:
        """Administration: topics' properties and figures, readers, producers, namespaces, what needs attention."""
        return AsyncAdministration(self._channel)

    # --- names of the version before, which warn -------------------------------------------------------

    overview = moved(AsyncAdministration.overview)
    deleted_topics = moved(AsyncAdministration.deleted_topics)
    attention = moved(AsyncAdministration.attention)
    events = moved(AsyncAdministration.events)
    history = moved(AsyncAdministration.history)
    properties = moved(AsyncAdministration.properties)
    set_properties = moved(AsyncAdministration.set_properties)
    replace_properties = moved(AsyncAdministration.replace_properties)
    delete_topic = moved(AsyncAdministration.delete_topic)
    undelete_topic = moved(AsyncAdministration.undelete_topic)
    set_aside = moved(AsyncAdministration.set_aside)
    chain_head = moved(AsyncAdministration.chain_head)
    verify_chain = moved(AsyncAdministration.verify_chain)
    stats = moved(AsyncAdministration.stats)
    messages = moved(AsyncAdministration.messages)
    message = moved(AsyncAdministration.message)
    readers = moved(AsyncAdministration.readers)
    reader = moved(AsyncAdministration.reader)
    set_reader = moved(AsyncAdministration.set_reader)
    delete_reader = moved(AsyncAdministration.delete_reader)
    producers = moved(AsyncAdministration.producers)
    producer_state = moved(AsyncAdministration.producer_state)
    delete_producer = moved(AsyncAdministration.delete_producer)
    namespaces = moved_property("namespaces")


class AsyncTopic:
    """A topic of a client. Each method calls the method of that name of the client or of ``client.admin``."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        topic_name(client.namespace, name)
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"<AsyncTopic {self._client.namespace}:{self.name}>"

    publish = of_topic(AsyncClient.publish)
    store = of_topic(AsyncClient.store)
    rollback = of_topic(AsyncClient.rollback)
    publisher = of_topic(AsyncClient.publisher)
    stream = of_topic(AsyncClient.stream)
    producer = of_topic(AsyncClient.producer)
    publish_atomic = of_topic(AsyncClient.publish_atomic)
    producers = of_administration(AsyncAdministration.producers)
    poll = of_topic(AsyncClient.poll)
    read = of_topic(AsyncClient.read)
    messages = of_administration(AsyncAdministration.messages)
    position_of_last = of_topic(AsyncClient.position_of_last)
    properties = of_administration(AsyncAdministration.properties)
    set_properties = of_administration(AsyncAdministration.set_properties)
    replace_properties = of_administration(AsyncAdministration.replace_properties)
    chain_head = of_administration(AsyncAdministration.chain_head)
    verify_chain = of_administration(AsyncAdministration.verify_chain)
    stats = of_administration(AsyncAdministration.stats)
    readers = of_administration(AsyncAdministration.readers)
    delete = of_administration(AsyncAdministration.delete_topic)
    undelete = of_administration(AsyncAdministration.undelete_topic)
