"""Transactions: snapshots and what they show, the standing of write pointers, and the transaction manager."""

from __future__ import annotations
