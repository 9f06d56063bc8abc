"""Explores the orders in which the store's threads may run."""
