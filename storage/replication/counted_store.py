"""The store in ``replication.mode = "sync"``: it completes calls only once their commits count in the object store.

A write completes once its commit counts, and not before: actors update their state then, so until then no poll,
producer, transaction or position shows it. Reads that do not go through an actor (the metadata, a view, a claim) may
see rows of commits that are durable here but do not count yet: such reads return once those commits count. Messages
and payloads are read only up to the watermark of an actor, so those reads do not wait.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from plainsong.protocol.effects import Table
from storage.base import StoreUnusable
from storage.leveldb.store import LevelDBStore
from storage.replication.answers import CopyUnavailable, NotCounted, PendingAnswers
from storage.replication.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plainsong.protocol.effects import Expect, Operation
    from plainsong.protocol.names import TopicName
    from storage.base import Claim, Row
    from storage.directory import DataDirectory
    from storage.leveldb.operations import PendingWrite
    from storage.leveldb.options import LevelDBOptions
    from storage.leveldb.shipping import Shipper
    from storage.leveldb.store import LevelDBView

NO_BASE = "the second copy has no complete base yet"
TORN = "the disk did not store a commit that had already been sent to the second copy"
TORN_HINT = "the next start takes the commit from the copy"


class CountingOutbox(Outbox):
    """An outbox that sends commits immediately, with the answers that wait for them."""

    def __init__(self, *, max_bytes: int, timeout_s: float, shift: int = 0, continues: int | None = None) -> None:
        """``timeout_s``: the maximum time that an answer waits."""
        super().__init__(max_bytes=max_bytes, full_bytes=1, shift=shift, continues=continues)
        self.timeout_s = timeout_s
        self.answers = PendingAnswers()
        #: Called whenever there is progress.
        self.on_progress: Callable[[], object] = lambda: None

    @property
    def is_early(self) -> bool:
        """See ``Shipper.is_early``."""
        return True

    def write_failed(self, number: int) -> None:
        """See ``Shipper.write_failed``."""
        if number + self.shift < self.last:
            self.is_torn = True
            self.on_full()
        else:
            self.newest = number + self.shift  # the batch that failed will not become visible

    def opened(self, number: int) -> None:
        """See ``Shipper.opened``.

        Raises:
          StoreUnusable: a commit that the disk did not store was sent; its number must not be used again.
        """
        if self.is_torn:
            raise StoreUnusable(TORN, hint=TORN_HINT)
        super().opened(number)

    def progressed(self, logged: int | None, counted: int | None) -> None:
        """See ``Outbox.progressed``."""
        super().progressed(logged, counted)
        self.answers.advance(counted, self.last)
        self.on_progress()

    def close(self, why: str) -> None:
        """See ``Outbox.close``."""
        self.answers.close(why)

    @property
    def unavailable(self) -> str:
        """The reason why writes are refused; empty if they are not."""
        answers = self.answers
        if not answers.has_begun or answers.counted is None:
            return NO_BASE
        if answers.oldest_s is not None and trio.current_time() - answers.oldest_s >= self.timeout_s:
            return f"the object store has not answered for {self.timeout_s:g} s"
        return ""

    def answer(self, number: int, completed: Callable[[Exception | None], object]) -> None:
        """Call ``completed`` once a commit and all earlier ones count."""
        self.answers.when(number, trio.current_time(), completed)
        if self.answers.oldest_s is not None:
            self.on_full()  # a commit may have become complete since it was handed over

    async def until_counted(self, number: int, *, for_read: bool = False) -> Exception | None:
        """Return None once a commit counts, or NotCounted after ``timeout_s``.

        Args:
          for_read: withdraw the answer after that time, and on cancellation: the commit that a read may have seen may
            never be made, and an answer that still waits for it would cause all changes to be refused.
        """
        found: list[Exception | None] = []
        over = trio.Event()

        def completed(failed: Exception | None) -> None:
            found.append(failed)
            over.set()

        self.answer(number, completed)
        try:
            with trio.move_on_after(self.timeout_s):
                await over.wait()
        finally:
            if for_read:
                self.answers.withdraw(completed, self.last)
        return found[0] if found else NotCounted(f"the object store has not answered for {self.timeout_s:g} s")


class CountedStore(LevelDBStore):
    """``storage.base.Store``."""

    traits = replace(
        LevelDBStore.traits,
        durability="acknowledged messages are synced to the disk and stored in the object store: they survive the loss of "
        "this machine",
        answers_late=True,
    )

    def __init__(self, home: DataDirectory, options: LevelDBOptions, shipper: Shipper | None = None) -> None:
        """Internal: call ``open`` instead, with a ``CountingOutbox``."""
        assert isinstance(shipper, CountingOutbox)
        self._outbox = shipper
        # A commit of the event loop would be completed before it can count.
        settings = replace(options.settings, inline_commit_s=0.0)
        super().__init__(home, replace(options, settings=settings), shipper)

    def begin(
        self,
        commit: Sequence[Operation],
        completed: Callable[[Exception | None], object],
        *,
        claim: Claim,
        while_syncing: Callable[[], object] | None = None,
    ) -> None:
        """See ``Store.begin``. ``while_syncing`` is not called."""
        super().begin(commit, partial(self._durable, completed), claim=claim)

    def _written(self, done: PendingWrite) -> None:
        super()._written(done)
        # A batch may have waited for its changes in sealed volumes; the keeper has made them now.
        self._outbox.on_full()

    def _durable(self, completed: Callable[[Exception | None], object], failed: Exception | None) -> None:
        if failed is None:
            self._outbox.answer(self._outbox.last, completed)
        else:
            completed(failed)

    @property
    def is_idle(self) -> bool:
        """See ``Store.is_idle``."""
        return super().is_idle and self._outbox.answers.oldest_s is None

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        """See ``Store.write``. Raises CopyUnavailable, NotCounted."""
        self._refuse_if_late()
        await super().write(commit, claim=claim, expect=expect)
        # As for the write itself, cancellation does not interrupt it: the caller's memory would lack a row that exists.
        with trio.CancelScope(shield=True):
            failed = await self._outbox.until_counted(self._outbox.last)
        if failed is not None:
            raise failed

    def _refuse_if_late(self) -> None:
        if self._outbox.answers.has_begun and (why := self._outbox.unavailable):
            raise CopyUnavailable(why, hint="nothing happened; retry")

    # --- reads that may see more than counts ------------------------------------------------------

    async def _seen(self) -> None:
        """Wait until everything that a read may have seen counts. Raises CopyUnavailable."""
        newest = self._outbox.newest
        if not self._outbox.answers.may_show(newest):
            self._refuse_if_late()
            failed = await self._outbox.until_counted(newest, for_read=True)
            if failed is not None:
                why = failed.detail if isinstance(failed, NotCounted) else str(failed)
                raise CopyUnavailable(why, hint="the answer would show a commit that may be lost; retry")

    async def claim(self, name: TopicName) -> Claim:
        """See ``Store.claim``. Raises CopyUnavailable: rows of the topic may not count yet."""
        claim = await super().claim(name)
        await self._seen()
        return claim

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """See ``Store.get``. Raises CopyUnavailable."""
        value = await super().get(table, key)
        if table is Table.METADATA:
            await self._seen()
        return value

    async def scan(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        feed: Callable[[Sequence[Row]], bool],
        *,
        reverse: bool = False,
        first_chunk: int = 64,
        values: bool = True,
    ) -> None:
        """See ``Store.scan``. Raises CopyUnavailable: the rows that were fed may not count."""
        await super().scan(table, start, stop, feed, reverse=reverse, first_chunk=first_chunk, values=values)
        if table is Table.METADATA:
            await self._seen()

    async def pin(self, max_s: float) -> LevelDBView:
        """See ``Store.pin``. Raises CopyUnavailable."""
        view = await self.pin_now(max_s)
        try:
            await self._seen()
        except BaseException:
            await view.aclose()
            raise
        return view
