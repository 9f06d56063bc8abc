"""Front ends: processes that own nothing, accept on the daemon's port, and pass what they read to the one that owns."""
