"""The guard of a daemon, from its settings: its files read, and what keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.security.guard import Guard
from broker.security.reload import SecurityFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.config import Config
    from broker.security.guard import Counters


@dataclass(frozen=True, slots=True)
class Security:
    """What decides who is let in, and what keeps it up to date."""

    guard: Guard
    files: SecurityFiles

    @property
    def stale(self) -> dict[str, str] | None:
        """Which tables are not those of their files, and why, as ``readyz`` shows it."""
        stale = self.files.stale
        if not stale:
            return None
        return {**dict.fromkeys(stale, "stale"), "why": "; ".join(f"{what}: {why}" for what, why in stale.items())}


def build_security(
    config: Config, counters: Counters | None = None, on_failure: Callable[[str], None] = lambda what: None
) -> Security:
    """Reads the files. Raises SecurityFileUnusable: one of them cannot be used."""
    guard = Guard(required=config.security.authentication == "required", counters=counters)
    files = SecurityFiles(config.security, guard, on_failure=on_failure)
    files.load()
    return Security(guard, files)
