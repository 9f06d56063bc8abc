"""The job ``maintain``: what may be removed from a topic's tables, by the daemon's word and the rules of the core."""

from __future__ import annotations
