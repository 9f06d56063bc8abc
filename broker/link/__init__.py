"""Links: connections with many concurrent calls, between instances and between the processes of one daemon."""

from __future__ import annotations
