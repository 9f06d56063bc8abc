"""The state of the second copy: ``GET /v1/replication``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.api.answers import json_answer
from plainsong.protocol.answers.service import ReplicationState
from storage.replication.segment import SYNC

if TYPE_CHECKING:
    from actors.second_copy import SecondCopy
    from broker.http.messages import Answer, Request


@dataclass(frozen=True, slots=True)
class Replication:
    """The route."""

    copy: SecondCopy | None
    to: str
    """``replication.to``."""

    async def show(self, request: Request) -> Answer:
        """Answer with the present state; without a copy, all but ``role`` is null."""
        request.parameters()
        if self.copy is None:
            return json_answer({"role": "none", **dict.fromkeys([*ReplicationState.__annotations__][1:]), "puts": 0})
        status, puts = self.copy.status, self.copy.puts
        shown: ReplicationState = {
            "role": "primary",
            "to": self.to,
            "mode": "sync" if status.mode == SYNC else "async",
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
        }
        return json_answer(shown)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)
