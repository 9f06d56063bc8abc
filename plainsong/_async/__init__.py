"""The client for event loops, and the source that the client for threads is generated from (``scripts/unasync.py``)."""
