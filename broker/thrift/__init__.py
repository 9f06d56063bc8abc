"""Tephra's clients: the transaction service over Thrift, as they expect it."""
