# Written by scripts/unasync.py from plainsong/_async/administration.py: change that, and run it (make sync).
"""Administration: topics, readers, producers and namespaces, and what the service reports about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plainsong import calls
from plainsong.loading import load
from plainsong.positions import OLDEST
from plainsong.protocol import ids
from plainsong.protocol.errors import PreconditionFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Unpack

    from plainsong._sync.events import Events
    from plainsong._sync.retry import Channel
    from plainsong.chains import ChainHead, ChainReport
    from plainsong.messages import Seen, TopicOptions
    from plainsong.positions import Start
    from plainsong.protocol.answers.messages import ReaderRow
    from plainsong.protocol.answers.service import EventKind, FindingRow
    from plainsong.protocol.answers.topics import (
        ChangeReport,
        DeletedTopic,
        History,
        NamespaceDescription,
        ProducerList,
        ProducerState,
        TopicColumn,
        TopicPage,
        TopicStats,
        UndeletedTopic,
    )

#: Attempts of ``set_properties`` while other programs change the same topic.
CHANGE_TRIES = 50


class Administration:
    """Topics, readers, producers and namespaces of a daemon; made by ``Client.admin``."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def namespace(self) -> str:
        """The namespace of all topics, that of the client."""
        return self._channel.namespace

    # --- topics ------------------------------------------------------------------------------------

    def overview(
        self,
        *,
        namespace: str | None = None,
        containing: str | None = None,
        sort: TopicColumn = "name",
        descending: bool = False,
        limit: int | None = None,
        after: str | None = None,
    ) -> TopicPage:
        """One page of topics with their statistics, sorted by the daemon; opens no topic.

        Args:
          namespace: only this namespace; None: all.
          containing: part of ``namespace:topic``, case-insensitive.
          limit: 500 at most; None: 100.
          after: ``next`` of the previous page.
        Returns:
          ``topics``, ``total`` and ``next``, which is None on the last page.
        Raises:
          InvalidParameter, InvalidName.
        """
        query = {"namespace": namespace, "q": containing, "sort": sort, "limit": limit, "after": after}
        return self._channel.call(calls.topics_page({**query, "order": "desc" if descending else None}))

    def deleted_topics(self) -> list[DeletedTopic]:
        """The deleted topics of the namespace, with their sizes and until when they can be restored."""
        return self._channel.call(calls.deleted_topics(self.namespace))

    def attention(self) -> list[FindingRow]:
        """The findings that need an operator's attention, worst first: ``kind``, ``severity``, ``subject``, ``text``, ``sinceMs``."""
        return self._channel.call(calls.attention())

    def events(self, *topics: str, kinds: Iterable[EventKind] = ()) -> Events:
        """Follows the service: the current state first, then changes, at most one event of each kind per second.

        It continues after a restart of the daemon, or at another of the client's URLs; use it in a ``with`` block.

        Args:
          topics: include their statistics, 200 at most: ``orders`` is in this namespace, ``shop:orders`` in ``shop``.
          kinds: ``topics``, ``transactions``, ``attention``, ``cluster``; by default all, ``topics`` if some are named.
        Returns:
          an iterator of ``ServiceEvent``; raises like a call that cannot succeed.
        Raises:
          InvalidName.
        """
        load("plainsong._sync.events")
        from plainsong._sync.events import Events

        return Events(self._channel, calls.events_path(self.namespace, topics, kinds))

    def history(self, topic: str) -> History:
        """Messages published and read, and bytes, in each of the last sixty minutes. Raises TopicNotFound."""
        return self._channel.call(calls.topic_history(self.namespace, topic))

    def properties(self, topic: str) -> dict[str, str]:
        """The topic's properties, including its generation, all values as strings. Raises TopicNotFound."""
        return self._channel.call(calls.describe_topic(self.namespace, topic))

    def set_properties(self, topic: str, **properties: Unpack[TopicOptions]) -> ChangeReport:
        """Changes the given properties, as for ``create_topic``; None returns one to its default.

        Concurrent changes of different properties are all kept.

        Returns:
          the daemon's report: ``before``, ``after``, and in ``effect`` what the change ``hides``. If the answer was lost
          and a repetition found the change made, it is the report of a dry run, with nothing left to change.
        Raises:
          TopicNotFound, InvalidProperty. PreconditionFailed: other clients kept changing it.
        """
        changes = calls.checked_properties(properties)
        tries = 0
        while True:
            tries += 1
            current, etag = self._channel.call(calls.describe_topic_state(self.namespace, topic))
            given = calls.changed_properties(current, changes)
            change = calls.set_properties(self.namespace, topic, given, etag)
            if tries > 1 and not calls.is_changed(current, given):
                change = calls.dry_run(change)  # another change would be recorded, too
            try:
                return self._channel.call(change)
            except PreconditionFailed:
                if tries == CHANGE_TRIES:
                    raise

    def replace_properties(self, topic: str, **properties: Unpack[TopicOptions]) -> ChangeReport:
        """Replaces all properties; those not given return to their defaults.

        Returns:
          the report, as for ``set_properties``.
        Raises:
          TopicNotFound, InvalidProperty.
        """
        given = calls.changed_properties({}, calls.checked_properties(properties))
        return self._channel.call(calls.set_properties(self.namespace, topic, given))

    def delete_topic(self, topic: str) -> ChangeReport:
        """Deletes the topic and its messages for every reader.

        Returns:
          the daemon's report: in ``effect`` what the deletion ``removes``, and ``undeleteUntilMs``.
        Raises:
          TopicNotFound: nothing happened. ConnectionLost, DeadlineExceeded: unknown.
        """
        return self._channel.call(calls.delete_topic(self.namespace, topic))

    def undelete_topic(self, topic: str) -> UndeletedTopic:
        """Restores a deleted topic.

        Returns:
          the daemon's report: in ``effect`` what the undelete ``returns``.
        Raises:
          TopicExists, TopicNotFound, PartlyCleaned: nothing happened.
        """
        return self._channel.call(calls.undelete_topic(self.namespace, topic))

    def set_aside(self, topic: str, first: str | bytes, last: str | bytes) -> ChangeReport:
        """Takes the rows from one id to another, both included, out of a topic, so that readers get past damaged ones.

        The daemon copies them unchanged to a file. Needs ``admin`` on the topic.

        Returns:
          the daemon's report: in ``after`` the file, in ``effect`` what it ``removes``.
        Raises:
          TopicNotFound; NotFound: there are no rows between these ids; InvalidMessageId, LowSpace.
        """
        ids = [each if isinstance(each, str) else each.hex() for each in (first, last)]
        return self._channel.call(calls.set_aside(self.namespace, topic, ids[0], ids[1]))

    def chain_head(self, topic: str) -> ChainHead:
        """The head of a chained topic: keep it, to prove later that nothing before it has changed.

        Raises:
          TopicNotFound; NotFound: the topic is not chained.
        """
        return self._channel.call(calls.chain_head(self.namespace, topic))

    def verify_chain(self, topic: str, *, known: ChainHead | None = None) -> ChainReport:
        """Reads all of a chained topic, and verifies it against its entries on this machine.

        Messages published during the verification are not covered.

        Args:
          known: an earlier head: the chain must still have it, or its entry must have expired.
        Raises:
          TopicNotFound; NotFound: the topic is not chained; GenerationChanged: it was re-created during the call;
          InvalidParameter: ``known`` is of another topic.
        """
        load("plainsong.chains")
        from plainsong.chains import Verifying

        verifying = Verifying(self.chain_head(topic), known)
        while (page := verifying.page()) is not None:
            after, messages = page
            verifying.take(self._channel.call(calls.chain_entries(self.namespace, topic, after, messages=messages)))
        return verifying.report()

    def stats(self, topic: str, *, reader: str | bytes | None = None) -> TopicStats:
        """The daemon's statistics of a topic (``messages``, ``bytes``, ``oldestId``, ``newestId``, …).

        Args:
          reader: an id; the statistics then include the messages after it, as ``reader``.
        Raises:
          TopicNotFound.
        """
        at = reader.hex() if isinstance(reader, bytes) else reader
        return self._channel.call(calls.topic_stats(self.namespace, topic, at))

    def messages(
        self,
        topic: str,
        start: Start = OLDEST,
        *,
        until: Start = None,
        limit: int | None = None,
        newest_first: bool = False,
        payload_bytes: int | None = None,
        containing: str | None = None,
    ) -> Sequence[Seen]:
        """Lists messages, each with its state, without consuming them (``start <= id < until``).

        Args:
          limit: 1 000 at most; None: 100.
          payload_bytes: the first bytes of each payload; ``size`` is the full size. None: the whole payload.
          containing: only messages whose payload contains this text; searches some 50 000 messages.
        Raises:
          TopicNotFound, InvalidParameter.
        """
        since = self._channel.resolve(topic, start)
        end = self._channel.resolve(topic, until)
        call = calls.look(
            self.namespace,
            topic,
            since,
            end,
            limit,
            newest_first=newest_first,
            payload_bytes=payload_bytes,
            containing=containing,
        )
        return self._channel.call(call)

    def message(self, topic: str, message_id: str | bytes) -> Seen:
        """One complete message, with its state, without consuming it. Raises TopicNotFound, NotFound, InvalidMessageId."""
        text = message_id.hex() if isinstance(message_id, bytes) else message_id
        return self._channel.call(calls.look_at_one(self.namespace, topic, text))

    # --- named readers -------------------------------------------------------------------------

    def readers(self, topic: str) -> list[ReaderRow]:
        """All saved positions of a topic: ``name``, ``position``, ``changedMs``, ``expiresMs``. Raises TopicNotFound."""
        return self._channel.call(calls.list_readers(self.namespace, topic))

    def reader(self, topic: str, name: str) -> ReaderRow:
        """The saved position of one reader. Raises NotFound, TopicNotFound."""
        return self._channel.call(calls.show_reader(self.namespace, topic, name))

    def set_reader(self, topic: str, name: str, position: Start) -> None:
        """Sets a reader's position unconditionally: it continues after that id, or as ``read`` starts at that place.

        Raises TopicNotFound, InvalidMessageId, InvalidParameter.
        """
        if isinstance(position, bytes):
            calls.checked_position(position)
        place = self._channel.resolve(topic, position)
        if not isinstance(place, bytes):  # a time, or None for the oldest: the position is before its first message
            place = ids.before(ids.bound_at(place or 0)) or ids.FIRST_BOUND
        self._channel.call(calls.set_reader(self.namespace, topic, name, place))

    def delete_reader(self, topic: str, name: str) -> None:
        """Deletes a reader's position. Raises NotFound, TopicNotFound: nothing happened."""
        self._channel.call(calls.delete_reader(self.namespace, topic, name))

    # --- managing producers ----------------------------------------------------------------------

    def producers(self, topic: str, *, after: str | None = None, limit: int = 100) -> ProducerList:
        """One page of a topic's ``producers``, by name, ``next`` for ``after``, and how the topic retains them.

        Raises TopicNotFound, InvalidParameter.
        """
        call = calls.list_producers(self._channel.namespace, topic, after, limit)
        return self._channel.call(call)

    def producer_state(self, topic: str, name: str, *, generation: int | None = None) -> ProducerState:
        """``epoch``, ``lastSequenceId``, ``recent``, … of one producer; with a ``generation`` also of a deleted topic.

        Raises TopicNotFound, ProducerNotFound, GenerationChanged, ProducerExpired.
        """
        call = calls.show_producer(self._channel.namespace, topic, name, generation)
        return self._channel.call(call)

    def delete_producer(self, topic: str, name: str) -> None:
        """Forgets a producer: its session ends, and its sequence ids may be used again. Raises TopicNotFound, ProducerNotFound."""
        self._channel.call(calls.delete_producer(self._channel.namespace, topic, name))

    # --- namespaces --------------------------------------------------------------------------------

    @property
    def namespaces(self) -> Namespaces:
        """The daemon's namespaces and their properties."""
        return Namespaces(self._channel)


class Namespaces:
    """The daemon's namespaces; made by ``Administration.namespaces``."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def list(self) -> list[str]:
        """The names of the namespaces with topics or properties, sorted."""
        return self._channel.call(calls.list_namespaces())

    def show(self, namespace: str | None = None) -> NamespaceDescription:
        """Its ``properties`` and their effective values; None: the client's own namespace. Raises InvalidName."""
        return self._channel.call(calls.show_namespace(self._named(namespace)))

    def set(self, namespace: str | None = None, /, **properties: Any) -> NamespaceDescription:
        """Replaces all its properties (``deduplication``), effective at once. Raises InvalidProperty, InvalidName."""
        call = calls.set_namespace(self._named(namespace), properties)
        return self._channel.call(call)

    def _named(self, namespace: str | None) -> str:
        return self._channel.namespace if namespace is None else namespace
