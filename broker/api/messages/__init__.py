"""Messages over HTTP: publishes, polls, streams, readers, and looking at messages."""
