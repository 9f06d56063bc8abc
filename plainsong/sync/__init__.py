"""The client for threads: its shells around ``plainsong.core``."""
