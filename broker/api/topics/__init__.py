"""Topics over HTTP: the topics themselves, their figures, producers and chains."""
