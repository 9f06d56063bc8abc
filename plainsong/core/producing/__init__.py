"""What a client decides about producers: sessions, numbers, what waits, and how an outcome is found out."""
