"""The next volume, which the keeper makes while the newest one fills. This is the commit's half of that hand-over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from storage.base import StoreError

if TYPE_CHECKING:
    from storage.leveldb.volume import Volume

#: Pause before a retry after the next volume could not be made.
RETRY_S = 1.0


class MakesVolumes(Protocol):
    """The keeper's interface for this. Only ``spare`` blocks, if asked to."""

    def make_spare(self) -> None:
        """Make the next volume. ``spare`` returns it, or the error, once for each call."""

    def spare(self, *, wait: bool) -> Volume | StoreError | None:
        """Return the answer to ``make_spare``, None if there is none yet. The commit gets a lease of its database."""
        ...


class NextVolume:
    """The next volume: not requested, requested, made, or failed. For the commit thread."""

    def __init__(self, keeper: MakesVolumes) -> None:
        self._keeper = keeper
        self._volume: Volume | None = None
        self._is_requested = False
        self._retry_at_s = 0.0
        #: Why the last attempt failed; None once an attempt succeeded.
        self.error: StoreError | None = None

    @property
    def is_made(self) -> bool:
        """True if ``take`` returns a volume without waiting."""
        return self._volume is not None

    def request(self) -> None:
        """Have the keeper make the volume, unless it exists, is being made, or could not be made just now."""
        if self._volume is None and not self._is_requested and time.monotonic() >= self._retry_at_s:
            self._is_requested = True
            self._keeper.make_spare()

    def look(self, *, wait: bool = False) -> None:
        """Record the keeper's answer to a request, if there is one."""
        if not self._is_requested:
            return
        found = self._keeper.spare(wait=wait)
        if found is None:
            return
        self._is_requested = False
        if isinstance(found, StoreError):
            self.error, self._retry_at_s = found, time.monotonic() + RETRY_S
        else:
            self._volume, self.error = found, None

    def take(self) -> Volume | StoreError:
        """Return the volume with a lease of its database, or the error; wait until it exists. Each is returned once."""
        if self._volume is None:
            self._retry_at_s = 0.0
            self.request()
            self.look(wait=True)
        found, self._volume = self._volume, None
        return found or self.error or StoreError("the next volume is missing")
