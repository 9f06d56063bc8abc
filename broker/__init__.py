"""The daemon: configuration, wiring, HTTP front end, metrics and logs."""

from __future__ import annotations
