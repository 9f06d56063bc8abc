"""Front ends: processes that own nothing, accept on the daemon's port, and pass what they read to the one that owns."""


class FrontEndFailed(Exception):
    """A front end did not come up when the daemon started."""
