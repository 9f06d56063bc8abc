"""A history as clients knew it at some moment, to check what a store had by then."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from tests.cluster.history.records import History, Transaction, Write


def known_between(history: History, last_s: float, next_s: float) -> History:
    """Return the history without requests sent after ``last_s`` and responses received from ``next_s`` on.

    Between two changes of a disk, its content must agree with every response received before the later change, and
    contain nothing that was sent after the earlier one. For a copy, ``next_s`` is when its reading began, ``last_s``
    when it ended.
    """
    transactions = {
        each: replace(
            each,
            pointers=set(each.pointers),
            asked_s=each.asked_s if each.asked_s <= last_s else inf,
            committed_s=each.committed_s if each.committed_s < next_s else inf,
            undone_s=each.undone_s if each.undone_s < next_s else inf,
            state="",
        )
        for each in history.transactions
        if each.told_s < max(last_s, next_s)
    }
    known = History(transactions=list(transactions.values()))
    known.writes = [_write_at(each, transactions, next_s) for each in history.writes if each.began_s <= last_s]
    known.openings = [each for each in history.openings if each.ended_s < next_s]
    known.polls = [each for each in history.polls if each.ended_s < next_s]
    return known


def _write_at(write: Write, transactions: dict[Transaction, Transaction], next_s: float) -> Write:
    known = replace(write, transaction=transactions[write.transaction] if write.transaction else None)
    known.receipts = list(write.receipts)
    if write.ended_s >= next_s:
        known.ended_s, known.receipts = inf, []
    return known
