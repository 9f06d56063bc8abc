"""The client for threads."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from plainsong.core import options
from plainsong.core.operations import Operations
from plainsong.core.reading import Reading
from plainsong.errors import NotSent
from plainsong.settings import DEFAULT_URL, Settings, from_environment
from plainsong.starts import OLDEST
from plainsong.sync.administration import Administration
from plainsong.sync.delivery import close_all
from plainsong.sync.publisher import Publisher
from plainsong.sync.reader import Reader
from plainsong.sync.shell import Shell
from plainsong.transport.blocking import Wire

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

    from plainsong.core.gathering import Mode, Overflow
    from plainsong.core.outcomes import DroppedMessage
    from plainsong.messages import Page, Receipt
    from plainsong.positions import Position
    from plainsong.serializers import SerializerLike
    from plainsong.starts import Start

log = logging.getLogger("plainsong.client")


class Client(Administration):
    """Talks to a daemon: topics, publishing, polling, reading.

    Thread-safe: share one among all threads. After a fork the child gets connections of its own; parent and
    child can both go on using the client. Connections are made when needed: making a client needs no daemon.

    Every method raises ``PlainsongError`` and nothing else on account of the daemon or the network; the error's
    ``outcome`` says whether the request happened. Calls are tried again, with pauses, as long as that is safe
    and ``deadline_s`` is not over.

    Args:
      url: of the daemon, or several (a list, or one string with commas): the next is tried when one cannot be
        reached or is leaving.
      namespace: of all topics.
      token_file: a file whose one line is sent as a bearer token; read once.
      connect_timeout_s: for a connection to come about.
      request_timeout_s: for one request and its whole answer.
      deadline_s: for a call with all its retries; methods take one of their own. The time that a poll is
        asked to wait is added to both.
      retry: False: one attempt at each URL, and no pauses.
      max_connections: open at once; further requests wait for one.
    Raises:
      InvalidName, InvalidParameter: an argument makes no sense.
    """

    def __init__(
        self,
        url: str | Sequence[str] = DEFAULT_URL,
        *,
        namespace: str = "default",
        token_file: str | os.PathLike[str] | None = None,
        connect_timeout_s: float = 5.0,
        request_timeout_s: float = 30.0,
        deadline_s: float = 60.0,
        retry: bool = True,
        max_connections: int = 100,
    ) -> None:
        self._settings = Settings.checked(
            url,
            namespace=namespace,
            token_file=token_file,
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            deadline_s=deadline_s,
            retry=retry,
            max_connections=max_connections,
        )
        self._wire = Wire(self._settings)
        self._shell = Shell(self._wire.carry)
        self._operations = Operations(self._settings, random.random, lambda: time.time_ns() // 1_000_000)
        self._publishers: WeakSet[Publisher] = WeakSet()

    @classmethod
    def from_environment(cls, **options: Any) -> Self:
        """A client for ``PLAINSONG_URL`` and ``PLAINSONG_NAMESPACE``; ``options`` as above, which win."""
        return cls(**{**from_environment(), **options})

    def close(self) -> None:
        """Close its publishers, with a limit of their ``exit_timeout_s``, then all connections. Idempotent.

        Raises:
          NotSent: what its publishers could not send; all is closed nevertheless.
        """
        try:
            close_all(list(self._publishers))
        finally:
            self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except NotSent as error:
            if kind is None:
                raise
            log.warning("a client was left by an error: %s", error.detail)

    def __repr__(self) -> str:
        return f"<Client of {self.namespace} at {self._operations.places.current}>"

    # --- publishing ------------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        messages: Any,
        *,
        ttl_s: int | None = None,
        serializer: SerializerLike = None,
        retry_unknown: bool = False,
        deadline_s: float | None = None,
    ) -> Receipt:
        """Publish, and return when it is durable.

        Args:
          messages: one, or a list (or tuple) of several, which become visible together; each is what the
            serializer takes (bytes, without one), or an ``Outgoing`` around it.
          ttl_s: seconds they live, if that is shorter than the topic's ttl.
          retry_unknown: also try again when an attempt may have taken: at least once, perhaps twice.
          deadline_s: for this call.
        Raises:
          TopicNotFound, MessageTooLarge, BodyTooLarge, NotEncodable, NoMessages, ConnectFailed: nothing happened.
          ConnectionLost, OutcomeUnknown: unknown. DeadlineExceeded: as its ``outcome`` says.
        """
        return self._shell.run(
            self._operations.publish(
                topic, messages, ttl_s=ttl_s, serializer=serializer, retry_unknown=retry_unknown, deadline_s=deadline_s
            )
        )

    def publisher(
        self,
        topic: str | None = None,
        *,
        linger_ms: float = 0,
        max_batch_messages: int = options.DEFAULT_BATCH_MESSAGES,
        max_batch_bytes: int = options.DEFAULT_BATCH_BYTES,
        max_pending_bytes: int = options.DEFAULT_PENDING_BYTES,
        overflow: Overflow | None = None,
        mode: Mode = "reliable",
        delivery_timeout_s: float | None = None,
        retry_unknown: bool = False,
        on_drop: Callable[[DroppedMessage], object] | None = None,
        serializer: SerializerLike = None,
        connections: int = 4,
        exit_timeout_s: float = options.EXIT_TIMEOUT_S,
    ) -> Publisher:
        """A buffer for publishing without waiting; use it in a ``with`` block, or close it.

        Args:
          topic: of messages that name none.
          linger_ms: how long a first message waits for company; with 0, what accumulates while a request is
            under way is gathered all the same.
          max_batch_messages, max_batch_bytes: of one request.
          max_pending_bytes: that the buffer may occupy, about 400 bytes for each message beside its payload.
          overflow: when the buffer is full: ``"wait"`` (the default), ``"raise"`` BufferFull, or ``"drop"`` the
            new message.
          mode: ``"reliable"``: every failure is told by the message's future, and by ``flush`` and ``close``.
            ``"best_effort"``: a message that cannot be delivered is dropped, counted and told to ``on_drop``;
            nothing waits, and nothing raises.
          delivery_timeout_s: after which a message that could not be delivered fails or is dropped; None: 120
            in reliable mode, 10 in best effort. A request under way is waited for no longer than that.
          retry_unknown: as for ``publish``.
          on_drop: called with a ``DroppedMessage``, in a thread of the publisher or in ``send``.
          connections: requests under way at once, for different topics; never two for one topic.
          exit_timeout_s: how long the end of the program, or of a block that an error left, may wait.
        Raises:
          InvalidParameter: an option makes no sense.
        """
        overflow = overflow or ("wait" if mode == "reliable" else "drop")
        bounds = options.publisher_bounds(
            linger_ms=linger_ms,
            max_batch_messages=max_batch_messages,
            max_batch_bytes=max_batch_bytes,
            max_pending_bytes=max_pending_bytes,
            delivery_timeout_s=delivery_timeout_s,
            mode=mode,
            overflow=overflow,
            retry_unknown=retry_unknown,
            connections=connections,
        )
        publisher = Publisher(
            self._operations,
            self._wire.carry,
            bounds,
            topic=topic,
            overflow=overflow,
            connections=connections,
            serializer=serializer,
            on_drop=on_drop,
            exit_timeout_s=exit_timeout_s,
        )
        self._publishers.add(publisher)
        return publisher

    # --- reading ---------------------------------------------------------------------------------

    def poll(
        self,
        topic: str,
        start: Start = OLDEST,
        *,
        inclusive: bool | None = None,
        limit: int | None = None,
        max_bytes: int | None = None,
        wait_ms: int | None = None,
        until: Start = None,
        serializer: SerializerLike = None,
        deadline_s: float | None = None,
    ) -> Page:
        """One page of messages, oldest first.

        Args:
          start: see ``plainsong.starts``; go on after a page with its ``last_id``.
          inclusive: whether a message at ``start`` belongs to it; None: at a time yes, at an id no.
          limit, max_bytes: at most so much; None: what the daemon gives at once (100 000 messages, 16 MiB).
          wait_ms: wait so long (60 000 at most) for a first message when there is none.
          until: end before it.
        Raises:
          TopicNotFound, InvalidParameter, InvalidMessageId, ConnectFailed, DeadlineExceeded: nothing happens by
            reading, and it is tried again until ``deadline_s`` is over.
        """
        return self._shell.run(
            self._operations.poll(
                topic,
                start,
                inclusive=inclusive,
                limit=limit,
                max_bytes=max_bytes,
                wait_ms=wait_ms,
                until=until,
                serializer=serializer,
                deadline_s=deadline_s,
            )
        )

    def read(
        self,
        topics: str | Iterable[str],
        start: Start = OLDEST,
        *,
        follow: bool = False,
        until: Start = None,
        limit: int | None = None,
        position: Position | None = None,
        serializer: SerializerLike = None,
        page_messages: int = options.DEFAULT_PAGE_MESSAGES,
        save_every: int = 1_000,
        save_interval_s: float = 5.0,
    ) -> Reader:
        """An iterator over messages, in the order of each topic, fair between several.

        Args:
          topics: a name, a pattern (``orders-*``), or several of them. A pattern takes in new topics while
            following, within ten seconds.
          start: where to begin, for topics that ``position`` knows nothing of.
          follow: wait for more at the end, for ever, through restarts of the daemon; else end there.
          until: end before it (not with ``follow``).
          limit: end after so many messages.
          position: a ``FilePosition`` or ``ServerPosition``; where the loop was is where the next one begins.
          page_messages: fetched at once.
          save_every, save_interval_s: the position is saved after so many messages or seconds, whichever is
            first, before waiting at the end, and at the end. What was read after the last save comes again
            after a crash; nothing is skipped.
        Raises:
          InvalidParameter, InvalidName: at once. The iterator raises as ``poll`` does (while following only what
            waiting does not cure, such as TopicNotFound), PositionNotSaved, and PositionChanged.
        """
        plan = options.read_plan(
            topics,
            start,
            until=until,
            follow=follow,
            limit=limit,
            serializer=serializer,
            page_messages=page_messages,
            save_every=save_every,
            save_interval_s=save_interval_s,
        )
        return Reader(Reading(self._operations, plan, position), self._shell)
