"""Actors: the one writer of each topic and of the transaction service, and the tasks around them."""
