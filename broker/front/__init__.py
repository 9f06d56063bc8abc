"""Front ends: processes that accept on the daemon's port and forward requests to the process that owns the store."""

from __future__ import annotations


class FrontEndFailed(Exception):
    """A front end did not start when the daemon did."""
