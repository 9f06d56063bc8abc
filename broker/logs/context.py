"""Which request a line belongs to: set by the doors, read when a line is made."""

from __future__ import annotations

from contextvars import ContextVar

#: The ``X-Request-Id`` of the request being served in this task; empty outside of one.
request_id: ContextVar[str] = ContextVar("request_id", default="")
