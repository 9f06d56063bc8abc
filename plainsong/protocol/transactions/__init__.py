"""Transactions: snapshots and what readers see with them, the states of write pointers, the transaction manager."""

from __future__ import annotations
