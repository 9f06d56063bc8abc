"""The state of the second copy: ``GET /v1/replication``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.api.answers import json_answer

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
        status = None if self.copy is None else self.copy.status
        if status is None:
            names = (
                "to mode epoch lastCommit countedCommit lagCommits lagBytes lagMs uploadedMs error baseCommit baseMs"
            )
            return json_answer({"role": "none", **dict.fromkeys(names.split())})
        return json_answer(
            {
                "role": "primary",
                "to": self.to,
                "mode": "async",
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
            }
        )
