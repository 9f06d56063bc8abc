"""One line for every request answered, when ``log.access`` asks for it; and the id all its other lines carry."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from broker.http.exchange import OWNER_HEADER
from broker.logs import request_id

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("plainsong.access")


class AccessLog:
    """Writes the line, or nothing; both doors and all routes tell it of the same things."""

    def __init__(self, *, enabled: bool) -> None:
        #: Whether there are lines at all.
        self.enabled = enabled

    def begin(self, identity: str) -> None:
        """From here on, lines of this task are about the request of this id."""
        request_id.set(identity)

    def answered(
        self, route: str, target: str, status: int, seconds: float, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        """The request was answered; ``target`` is the topic or path it was about. ``headers`` name the owner, if any."""
        if self.enabled:
            fields: dict[str, object] = {
                "route": route,
                "target": target,
                "status": status,
                "ms": round(seconds * 1000, 3),
            }
            for name, value in headers:
                if name == OWNER_HEADER:
                    fields["owner"] = value
            log.info("answered", extra=fields)
