"""Several daemons as one service: topic ownership, and the forwarding of requests to the owner."""

from __future__ import annotations
