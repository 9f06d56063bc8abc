"""Bounds of the transaction service; settings of the same names say what passing them means."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    """What the ``[transactions]`` section says, in milliseconds where that counts."""

    timeout_ms: int = 30_000
    """What a short transaction gets when it does not ask."""
    long_timeout_ms: int = 86_400_000
    max_timeout_ms: int = 3_600_000
    """The most a short transaction may ask for."""
    max_lifetime_ms: int = 90_000_000
    """Nothing is written under an older pointer. 0: no such end, and nothing is pruned by itself."""
    max_open: int = 20_000
    """Pointers in progress, those of checkpoints included."""
    max_checkpoints: int = 1_000
    """Checkpoints of one transaction."""
    max_topics: int = 10_000
    """Topics that one transaction may write to, where they are enlisted."""
    max_invalid: int = 100_000
    """Invalid pointers at which nothing begins any more."""
    max_outcomes: int = 200_000
    """Decisions remembered, however young they are."""
    outcome_retention_ms: int = 90_000_000
    max_changes: int = 100_000
    """Keys of one change set."""
    max_change_set_bytes: int = 16 << 20
    """Bytes of one change set's keys together."""
    max_prepared_bytes: int = 256 << 20
    """Bytes of all change sets of open transactions."""
    max_committed_bytes: int = 256 << 20
    """Bytes of all committed change sets that somebody may still conflict with."""
    max_client_id_bytes: int = 256
    abort_deadline_s: float = 15.0
    """How long topics may take to roll back before an abort becomes an invalidation."""
    commit_deadline_s: float = 15.0
    """How long topics may take to close a transaction's pointers before its commit gives up for this time."""
    prune: bool = True
    """Whether a complete pass takes pointers past their lifetime from the invalid list."""
    mailbox_requests: int = 20_000
    mailbox_bytes: int = 64 << 20
    commit_requests: int = 1_024
    """Requests one commit of the service may carry."""
