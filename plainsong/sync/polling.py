"""Reading: one page, or a loop over messages; committed ones only, or with the snapshot of a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.core import options
from plainsong.starts import OLDEST
from plainsong.sync.reader import Reader
from plainsong.sync.transaction import TransactionContext
from plainsong.transactions import current, requests
from plainsong.transactions.inside import reading_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plainsong.core.operations import Operations
    from plainsong.messages import Page
    from plainsong.positions import Position
    from plainsong.protocol.requests import Isolation
    from plainsong.serializers import SerializerLike
    from plainsong.starts import Start
    from plainsong.sync.shell import Shell
    from plainsong.transactions.values import Transaction


class Polling:
    """What ``Client`` reads."""

    _shell: Shell
    _operations: Operations

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
        isolation: Isolation | None = None,
        transaction: Transaction | None = None,
        direct: bool = False,
    ) -> Page:
        """One page of messages, oldest first.

        Args:
          start: see ``plainsong.starts``; go on after a page with its ``last_id``.
          inclusive: whether a message at ``start`` belongs to it; None: at a time yes, at an id no.
          limit, max_bytes: at most so much; None: what the daemon gives at once (100 000 messages, 16 MiB).
          wait_ms: wait so long (60 000 at most) for a first message when there is none.
          until: end before it.
          isolation: ``"committed"``: up to the first message whose transaction is undecided (then ``held`` of the page
            says whose), without those of transactions that came to nothing. None, ``"uncommitted"``: everything.
          transaction: with its snapshot instead: what was committed before it began, and what is its own.
          direct: without the snapshot of the transaction whose block this is in.
        Raises:
          TopicNotFound, InvalidParameter, InvalidMessageId, ConnectFailed, DeadlineExceeded: nothing happens by
            reading, and it is tried again until ``deadline_s`` is over.
          TransactionsUnavailable: nobody here knows what is committed. NoTransaction: the block's has ended.
        """
        if transaction is None and not direct:
            block = current.block_of(self, TransactionContext)
            transaction = None if block is None else block.course.needed("poll")
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
                isolation=isolation,
                snapshot=requests.snapshot_of(transaction),
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
        isolation: Isolation | None = None,
        direct: bool = False,
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
          isolation: ``"committed"``: only what the daemon's own transaction service knows as committed, in order:
            it stops at the first message whose transaction is undecided (``held`` says whose), and goes on by itself
            while following. In a block of ``transaction()`` the transaction's snapshot is read instead, the position
            is part of the transaction, and reading ends when 90 % of its time are over.
          direct: not as part of the transaction whose block this is in.
          page_messages: fetched at once.
          save_every, save_interval_s: the position is saved after so many messages or seconds, whichever is
            first, before waiting at the end, and at the end. What was read after the last save comes again
            after a crash; nothing is skipped.
        Raises:
          InvalidParameter, InvalidName, NoTransaction: at once. The iterator raises as ``poll`` does (while following only what
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
            isolation=isolation,
        )
        block = None if direct else current.block_of(self, TransactionContext)
        course = None if block is None else block.course
        return Reader(reading_in(course, self._operations, plan, position), self._shell)
