"""Several instances that share the topics: which of them owns which."""
