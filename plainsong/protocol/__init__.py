"""Messages, ids, requests, answers and the rules for them: no clock, disk, socket or event loop."""

from __future__ import annotations
