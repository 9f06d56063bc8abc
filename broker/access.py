"""One line for every request answered, when ``log.access`` asks for it; and the id all its other lines carry."""

from __future__ import annotations

import logging

from broker.logs import request_id

log = logging.getLogger("plainsong.access")


class AccessLog:
    """Writes the line, or nothing; both doors and all routes tell it of the same things."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def begin(self, identity: str) -> None:
        """From here on, lines of this task are about the request of this id."""
        request_id.set(identity)

    def answered(self, route: str, target: str, status: int, seconds: float) -> None:
        """The request was answered; ``target`` is the topic or path it was about."""
        if self._enabled:
            fields = {"route": route, "target": target, "status": status, "ms": round(seconds * 1000, 3)}
            log.info("answered", extra=fields)
