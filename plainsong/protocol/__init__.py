"""What messages, ids, requests and answers are, and the rules: no clock, disk, socket or event loop."""

from __future__ import annotations
