"""What the client decides, without a socket, a clock or a thread: shared by its sync and async halves."""
