"""The client for threads: written by ``scripts/unasync.py`` from ``plainsong/_async``, but for ``_backend``, ``_futures`` and ``_hooks``."""
