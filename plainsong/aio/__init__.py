"""The client for event loops, asyncio and trio alike: its shells around ``plainsong.core``."""
