"""Which request a line belongs to, and which process: set by the doors, read when a line is made."""

from __future__ import annotations

from contextvars import ContextVar

#: The ``X-Request-Id`` of the request being served in this task; empty outside of one.
request_id: ContextVar[str] = ContextVar("request_id", default="")
#: What a front end's process is called, as ``front-1``; empty in the process that owns the topics.
process: ContextVar[str] = ContextVar("process", default="")
