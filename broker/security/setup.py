"""Builds a daemon's guard from its settings: reads its files, and keeps them up to date."""

from __future__ import annotations

import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import trio

from broker.security.guard import Guard
from broker.security.peer_names import ConnectionNames
from broker.security.quotas import Quotas
from broker.security.reload import SecurityFiles
from storage.clock import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.config import Config
    from broker.security.guard import Counters
    from broker.security.oidc import OidcProvider
    from plainsong.protocol.answers.service import SecurityDigests


@dataclass(frozen=True, slots=True)
class Security:
    """The guard, and the parts that keep it up to date."""

    guard: Guard
    files: SecurityFiles
    provider: OidcProvider | None = None

    async def run(self) -> None:
        """Keep tables and keys up to date, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.files.run)
            nursery.start_soon(self.guard.watch_ends)
            if self.provider is not None:
                nursery.start_soon(self.provider.run)

    def digests(self) -> SecurityDigests | None:
        """Return digests of the grants file and of the ids of valid tokens, for comparison between instances.

        None: authentication is off.
        """
        if not self.guard.required:
            return None
        ids = "\n".join(self.guard.tokens.valid_ids(now_ms()))
        return {"grants": self.files.digests.get("grants"), "tokens": sha256(ids.encode()).hexdigest()[:12]}

    @property
    def stale(self) -> dict[str, str] | None:
        """The tables that differ from their files, and why, as ``readyz`` shows them; None if there are none."""
        stale = self.files.stale
        if not stale:
            return None
        return {**dict.fromkeys(stale, "stale"), "why": "; ".join(f"{what}: {why}" for what, why in stale.items())}


def build_security(
    config: Config,
    counters: Counters | None = None,
    on_failure: Callable[[str], None] = lambda what: None,
    on_quota: Callable[[str], None] = lambda limit: None,
) -> Security:
    """Read the files, and build the guard. Raises FileUnusable."""
    settings = config.security
    names = ConnectionNames(settings.certificate_name, unix=settings.unix_names)
    guard = Guard(
        required=settings.authentication == "required",
        open_metrics=config.metrics.open,
        peer_names=names,
        counters=counters,
        quotas=Quotas(time.monotonic, refused=on_quota),
    )
    files = SecurityFiles(settings, guard, on_failure=on_failure)
    files.load()
    provider = None
    if guard.required and settings.oidc.issuer:
        from broker.security.oidc import OidcProvider  # joserfc takes as long to load as the rest of the package

        provider = guard.provider = OidcProvider(settings.oidc, on_failure=on_failure, on_change=guard.expire)
    return Security(guard, files, provider)
