"""Transactions: what a snapshot shows, what becomes of a write pointer, and the rules of the transaction manager."""

from __future__ import annotations
