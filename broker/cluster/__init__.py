"""Several daemons as one service: who owns what, and how a request comes to the owner."""

from __future__ import annotations
