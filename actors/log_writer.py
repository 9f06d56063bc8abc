"""Writes the log of one primary: takes the batches in the outbox as segments, and stores them.

A segment is begun every ``interval_ms`` or, with the mode ``sync``, at once. Up to ``uploads`` segments are under way; one
counts once it and all before it are stored.
"""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

import trio

from storage.base import StoreError
from storage.replication.counted_store import TORN, TORN_HINT
from storage.replication.notices import log_name
from storage.replication.outbox import commit_of
from storage.replication.protocol import Reign, ReignOver, Upload, check_place, store
from storage.replication.segment import MODES, SYNC, encode_segment
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from actors.copy_calls import CopyCalls
    from actors.copy_start import Begun, CopyStart
    from actors.settings import ReplicationConfig
    from storage.replication.outbox import Outbox, Taken
    from storage.replication.segment import Segment

#: How often an idle primary checks that no other process has ended its epoch.
LOOK_EVERY_S = 10.0
#: How long to store no segment while another process tries to take over, so that its seal gets the next number.
YIELD_S = 2.0
#: During a clean end, how often to check if the last batch is complete.
FINISHING_S = 0.1


class LogWriter:
    """The log of one primary. ``begin`` for each epoch, then ``ship``."""

    def __init__(
        self, calls: CopyCalls, outbox: Outbox, settings: ReplicationConfig, now_ms: Callable[[], int]
    ) -> None:
        self._calls = calls
        self._outbox = outbox
        self._settings = settings
        self._interval_s = settings.interval_ms / 1000
        self._now_ms = now_ms
        self.mode = MODES[settings.mode]
        self._reign: Reign | None = None
        #: Batches of the segments that are not stored yet, by number.
        self._under_way: dict[int, Taken] = {}
        #: Set when ``ship`` has something to do.
        self._woken = trio.Event()
        self._progress = trio.Event()
        self.is_finishing = False
        self.uploaded_ms: int | None = None
        """When the last segment was stored."""
        self._yields_until_s = 0.0
        #: Segments up to this number must be begun, though there may be no commits for them.
        self._least_number = 0
        self._look_at_s = 0.0
        self._loop = trio.lowlevel.current_trio_token()
        outbox.on_full = self._wake_from_thread

    @property
    def has_begun(self) -> bool:
        """True once the first epoch has begun."""
        return self._reign is not None

    @property
    def reign(self) -> Reign:
        """The current epoch."""
        assert self._reign is not None  # the copy has begun
        return self._reign

    @property
    def under_way(self) -> list[Taken]:
        """The batches of the segments that are not stored yet."""
        return list(self._under_way.values())

    # --- an epoch ----------------------------------------------------------------------------------

    async def begin(self, start: CopyStart, begun: Begun, mode: int) -> None:
        """Send everything that the directory has and the log lacks. Raises as ``SecondCopy.begin``."""
        place, restarted = begun.place, begun.restarted
        reign = self._reign = Reign(place, start.run, mode, has_base=begun.has_base)
        self._least_number = 0
        self._outbox.progressed(reign.logged, None)
        if place.commit is None:
            await self._upload(reign.open(restarted.last, self._now_ms()))
        elif place.commit < restarted.last:
            await self._upload(reign.cut(place.commit + 1, await start.lacking(place.commit, self._now_ms())))
        if not reign.says_mode:
            # A process that takes over goes by the mode in the log, so the log must have it before the first answer.
            await self._upload(reign.announce(self._now_ms()))
        self.progressed()

    async def ship(self, note: Callable[[], Awaitable[object]]) -> None:
        """Ship until the outbox has lost commits, or until the end.

        Args:
          note: notes the place up to which the log is stored, if it is time to.
        """
        self._look_at_s = trio.current_time() + LOOK_EVERY_S
        async with trio.open_nursery() as uploads:
            while True:
                if self._outbox.is_torn:
                    raise StoreError(TORN, hint=TORN_HINT)
                await self._close_segments(uploads)
                if not self._under_way:
                    if self._outbox.lost:
                        return
                    if self.is_finishing and self._outbox.oldest_ms is None:
                        return
                if trio.current_time() >= self._look_at_s:
                    await self.look()
                await note()
                due_s = self._due_in_s()
                idle_s = min(self._interval_s, FINISHING_S) if self.is_finishing else self._interval_s
                with trio.move_on_after(due_s if due_s > 0 else idle_s):
                    await self._woken.wait()
                self._woken = trio.Event()

    def finish(self) -> None:
        """Let ``ship`` end once it has stored everything that waits."""
        self.is_finishing = True
        self._woken.set()

    async def _close_segments(self, uploads: trio.Nursery) -> None:
        """Begin the uploads that are due."""
        while len(self._under_way) < self._settings.uploads and self._due_in_s() <= 0 and not self.yields:
            taken = self._outbox.take(self._settings.segment_bytes)
            if taken is None:
                break
            reign = self.reign
            self._under_way[reign.place.number] = taken
            segment, data = await in_thread(_encoded, reign, taken, max_wait_s=inf)
            uploads.start_soon(self._upload, reign.drafted(segment, data))
        if self.reign.place.number <= self._least_number:
            uploads.start_soon(self._upload, self.reign.announce(self._now_ms()))

    def _due_in_s(self) -> float:
        """Return how long the oldest batch may wait for others; ``interval_s`` if there is none."""
        oldest_ms = self._outbox.oldest_ms
        if oldest_ms is None:
            return self._interval_s
        if self.mode == SYNC or self.is_finishing or self._outbox.lost:
            return 0.0
        age_s = (self._now_ms() - oldest_ms) / 1000
        is_full = self._outbox.waiting_bytes >= self._settings.segment_bytes
        # A clock that was set back makes no batch wait for longer.
        return 0.0 if is_full or age_s < 0 else self._interval_s - age_s

    async def _upload(self, upload: Upload) -> None:
        """Store an object of the log."""
        await self.put(upload)
        self.reign.stored(upload.number)
        self._under_way.pop(upload.number, None)
        self.uploaded_ms = self._now_ms()
        self._look_at_s = trio.current_time() + LOOK_EVERY_S
        progress, self._progress = self._progress, trio.Event()
        progress.set()
        self._woken.set()
        self.progressed()

    async def put(self, upload: Upload) -> None:
        """Store an object, however long the object store is away."""
        await self._calls.patiently(lambda: self._calls.do(store(upload)))

    def progressed(self) -> None:
        """Report to the outbox which commits are in the log, and which count."""
        self._outbox.progressed(self.reign.logged, self.reign.counted)

    def _wake_from_thread(self) -> None:
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(self._wake, idempotent=True)

    def _wake(self) -> None:
        self._woken.set()

    # --- waits for it ------------------------------------------------------------------------------

    async def until_logged(self, commit: int) -> None:
        """Return once a commit is in the log, with all before it."""
        while (self.reign.logged or 0) < commit:
            await self._progress.wait()

    async def until_room(self) -> None:
        """Return once at most half of ``backlog_bytes`` waits, or commits are given up already."""
        while self._outbox.waiting_bytes > self._settings.backlog_bytes // 2 and not self._outbox.lost:
            await self._progress.wait()

    # --- other processes ---------------------------------------------------------------------------

    def yield_to_rival(self) -> None:
        """Begin no segment for a moment. Otherwise a busy primary's next segment would take each number first."""
        self._yields_until_s = trio.current_time() + YIELD_S

    @property
    def yields(self) -> bool:
        """True while another process may seal the log."""
        return trio.current_time() < self._yields_until_s

    async def secure(self) -> None:
        """Return once a segment is stored, with all before it, that begins no earlier than this call."""
        number = self._least_number = self.reign.place.number
        self._woken.set()
        while self.reign.logged_place.number <= number:
            await self._progress.wait()

    async def look(self) -> None:
        """Check that no other process has ended the epoch, if the object store answers. Raises ReignOver."""
        self._look_at_s = trio.current_time() + LOOK_EVERY_S
        try:
            await self._check_next()
        except StoreError as error:
            self._calls.error.failed(error.detail)
        else:
            self._calls.error.clear()

    async def check(self) -> None:
        """Check that the log has the last object that was stored, and none of another process after that.

        Raises:
          BucketWentBack, ReignOver: it does not.
          StoreError: the object store does not answer.
        """
        await self._calls.do(check_place(self.reign.logged_place))
        await self._check_next()

    async def _check_next(self) -> None:
        """Check that no other process has written at the next number. Raises ReignOver, StoreError."""
        place = self.reign.place
        found = await self._calls.objects.get(log_name(place.epoch, place.number))
        # Otherwise this process may have begun a segment with the number since the request.
        if found is not None and self.reign.place == place:
            raise self._calls.ended(ReignOver(f"another process has ended epoch {place.epoch}"))


def _encoded(reign: Reign, taken: Taken) -> tuple[Segment, bytes]:
    """Return the next segment. For a thread; the reign must not change before ``drafted``."""
    segment = reign.draft(taken.first, [commit_of(batch) for batch in taken.batches])
    return segment, encode_segment(segment)
