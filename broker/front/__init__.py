"""Front ends: processes that own nothing, accept on the daemon's port, and pass what they read to the one that owns."""

from __future__ import annotations


class FrontEndFailed(Exception):
    """A front end did not come up when the daemon started."""
