"""The synchronous core of a topic: requests in, rows to write and answers to give out."""

from __future__ import annotations
