"""Patch: hypercorn keeps a tree of priorities, which a client can fill: then the connection fails."""

from __future__ import annotations

from typing import Any

from broker.http.http2.patch import Patch


class Priorities(Patch):
    """Ignores priorities, as RFC 9113 allows."""

    async def _priority_updated(self, event: Any) -> None: ...
