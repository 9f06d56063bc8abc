"""The state of the second copy: ``GET /v1/replication``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from broker.api.answers import json_answer
from plainsong.protocol.errors import Conflict, ReplicationUnavailable
from storage.replication.segment import mode_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.second_copy import SecondCopy
    from broker.http.messages import Answer, Request
    from plainsong.protocol.answers.service import HandedOver, ReplicationState


#: The answer without a second copy; the roles add what they know.
NO_COPY: ReplicationState = {
    "role": "none",
    "to": None,
    "mode": None,
    "epoch": None,
    "lastCommit": None,
    "countedCommit": None,
    "lagCommits": None,
    "lagBytes": None,
    "lagMs": None,
    "uploadedMs": None,
    "error": None,
    "baseCommit": None,
    "baseMs": None,
    "oldestMs": None,
    "givenUp": None,
    "puts": 0,
    "putP50Ms": None,
    "putP99Ms": None,
    "urls": [],
    "standbys": [],
    "automatic": None,
}


@dataclass(frozen=True, slots=True)
class Replication:
    """The route."""

    copy: SecondCopy | None
    to: str
    """``replication.to``."""
    switch: Callable[[], None] | None = None
    """Ends this primary so that a standby takes over at once; None if no standby is allowed."""
    lease_s: float = 0.0
    """``replication.lease_s``."""

    async def show(self, request: Request) -> Answer:
        """Return the current state; without a copy, all but ``role`` is null."""
        request.parameters()
        if self.copy is None:
            return json_answer(NO_COPY)
        status, puts = self.copy.status, self.copy.puts
        shown = NO_COPY | {
            "role": "primary",
            "to": self.to,
            "mode": mode_name(status.mode),
            "epoch": status.epoch,
            "lastCommit": status.last,
            "countedCommit": status.counted,
            "lagCommits": status.lag_commits,
            "lagBytes": status.lag_bytes,
            "lagMs": round(status.lag_s * 1000),
            "uploadedMs": status.uploaded_ms,
            "error": status.error or None,
            "baseCommit": status.base,
            "baseMs": None if status.base is None else status.base_ms,
            "oldestMs": status.oldest_ms,
            "givenUp": status.given_up,
            "puts": puts.count,
            "putP50Ms": _ms(puts.percentile_s(0.5)),
            "putP99Ms": _ms(puts.percentile_s(0.99)),
            "standbys": [{"holder": each.holder, "lastCommit": each.commit} for each in status.standbys],
            "automatic": status.automatic,
        }
        return json_answer(shown)

    async def take_over(self, request: Request) -> Answer:
        """Refuse: only a standby takes over."""
        request.parameters()
        await trio.lowlevel.checkpoint()
        raise Conflict("this daemon is not a standby", hint="send the request to the standby")

    async def hand_over(self, request: Request) -> Answer:
        """Stop serving once everything is in the object store, for a standby to take over."""
        request.parameters()
        await trio.lowlevel.checkpoint()
        if self.copy is None:
            raise Conflict("this daemon has no second copy", hint="plainsong replica status")
        if self.switch is None:
            raise Conflict(
                'replication.standby is "never", so no standby could take over', hint='set it to "allowed", and restart'
            )
        status = self.copy.status
        if status.given_up:
            raise Conflict("the second copy has a gap, and no complete base after it", hint="wait for the next base")
        if status.counted is None:
            raise Conflict("the second copy has no complete base yet, so no standby can take over")
        if status.has_lease and not status.standbys:
            raise Conflict(
                "no standby is registered, so no daemon would take over",
                hint="start one, and wait until GET /v1/replication of this daemon shows it in standbys",
            )
        if status.error or not self.copy.lease.is_current:
            # It would stop serving, and could not end the log.
            why = f": {status.error}" if status.error else ""
            raise ReplicationUnavailable(
                f"the object store does not take the commits of this daemon at the moment, so it cannot hand over{why}",
                hint="this daemon keeps serving; once the object store responds, run plainsong replica switch again",
            )
        self.switch()
        handed: HandedOver = {
            "epoch": status.epoch,
            "lastCommit": status.last,
            "automatic": status.has_lease and self.lease_s > 0,
        }
        return json_answer(handed, status=202)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


NOT_RENEWED = "this daemon could not renew its lease in the object store, so a standby may have taken over"


def not_leased() -> ReplicationUnavailable:
    """Return the error of a primary whose lease has not been renewed in time."""
    return ReplicationUnavailable(
        NOT_RENEWED,
        hint="retry, also at the standby's URL; the daemon's log says why the lease is not renewed",
    )
