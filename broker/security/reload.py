"""Keeps the guard's tables equal to their files: each is read and checked as a whole, then put in force at once."""

from __future__ import annotations

import logging
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trio

from broker.security.files import FileUnusable, Stamp, read_guarded, reason_of, stamp_of, why_of
from broker.security.grants import MAX_FILE_BYTES as MAX_GRANTS_BYTES
from broker.security.grants import BadGrantsFile, GrantTable, parse_grants
from broker.security.tokens import MAX_FILE_BYTES as MAX_TOKENS_BYTES
from broker.security.tokens import BadTokensFile, TokenTable, parse_tokens
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.config.sections import SecurityConfig
    from broker.security.guard import Guard

log = logging.getLogger("plainsong.security")
_HINT = "plainsong token list and plainsong grants validate check these files"


class SecurityFiles:
    """The tokens file and the grants file of a guard.

    Args:
      on_reload: called with ``tokens`` or ``grants``, and the digests before and after, when a changed file is in
      force. on_failure: called when a changed file could not be used.
    """

    def __init__(
        self,
        config: SecurityConfig,
        guard: Guard,
        *,
        on_reload: Callable[[str, str, str], None] = lambda what, before, after: None,
        on_failure: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._guard = guard
        self._reload_s = config.reload_s
        self.on_reload = on_reload
        self.on_failure = on_failure
        self._paths = {
            what: Path(path)
            for what, path in (("tokens", config.tokens_file), ("grants", config.grants_file))
            if path and guard.required
        }
        self._stamps: dict[str, Stamp | None] = {}
        self._digests: dict[str, str] = {}
        #: By table: why it differs from its file; empty if none does.
        self.stale: dict[str, str] = {}
        #: The content of the files in force, for front ends.
        self.content: dict[str, bytes] = {}
        self._wanted = trio.Event()

    @property
    def digests(self) -> dict[str, str]:
        """The first 12 digits of the SHA-256 of each table in force."""
        return {what: digest[:12] for what, digest in self._digests.items()}

    def load(self) -> None:
        """Read the files at startup. Raises FileUnusable."""
        for what, path in self._paths.items():
            try:
                self._put(what, _read(what, path))
            except (OSError, BadTokensFile, BadGrantsFile) as error:
                raise FileUnusable(f"security.{what}_file", reason_of(error, path), _HINT) from None

    def look(self) -> None:
        """Check the files soon, whatever their stamps."""
        self._stamps.clear()
        self._wanted.set()

    async def run(self) -> None:
        """Check the files every ``reload_s`` (0: only when ``look`` is called), until cancelled."""
        while True:
            with trio.move_on_after(self._reload_s or inf):
                await self._wanted.wait()
            self._wanted = trio.Event()
            for what, path in self._paths.items():
                await self._look_at(what, path)

    async def _look_at(self, what: str, path: Path) -> None:
        stamp = await in_thread(stamp_of, path, max_wait_s=inf)
        if stamp is not None and stamp == self._stamps.get(what):
            return
        before = self._digests.get(what, "")
        try:
            # In a thread, since a long file would block the event loop.
            self._put(what, await in_thread(_read, what, path, max_wait_s=inf))
        except (OSError, BadTokensFile, BadGrantsFile) as error:
            why = why_of(error)
            if self.stale.get(what) != why:
                self.stale[what] = why
                line = getattr(error, "line", 0)
                about = {"file": str(path), "why": why, **({"line": line} if line else {})}
                log.error("config_reload_failed", extra=about)
                self.on_failure(what)
            self._stamps[what] = stamp
            return
        if self._digests[what] != before:
            log.info(
                "config_reloaded", extra={"file": str(path), "before": before[:12], "after": self._digests[what][:12]}
            )
            self.on_reload(what, before, self._digests[what])

    def _put(self, what: str, read: _Read) -> None:
        digest = sha256(read.data).hexdigest()
        self._stamps[what] = read.stamp
        self.stale.pop(what, None)
        if digest == self._digests.get(what):
            return
        self._digests[what] = digest
        self.content[what] = read.data
        if isinstance(read.table, TokenTable):
            self._guard.replace(tokens=read.table)
        else:
            self._guard.replace(grants=read.table)


class _Read(NamedTuple):
    """A file, read and checked."""

    data: bytes
    stamp: Stamp
    table: TokenTable | GrantTable


def _read(what: str, path: Path) -> _Read:
    """Raises OSError, BadTokensFile, BadGrantsFile."""
    if what == "tokens":
        data, stamp = read_guarded(path, MAX_TOKENS_BYTES, secret=True)
        return _Read(data, stamp, parse_tokens(data))
    data, stamp = read_guarded(path, MAX_GRANTS_BYTES)
    return _Read(data, stamp, parse_grants(data))
