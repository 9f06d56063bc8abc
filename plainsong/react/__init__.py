"""Reactions: an effect for each message, one at a time, in order, retried until it succeeds or fails for good."""
