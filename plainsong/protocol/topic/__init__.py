"""The synchronous core of a topic: it turns requests into rows to write and answers to send."""

from __future__ import annotations
