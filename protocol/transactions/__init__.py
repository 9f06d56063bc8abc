"""Transactions: what a snapshot shows, what an authority knows, and the rules of the transaction manager."""
