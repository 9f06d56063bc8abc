"""The checks after a ring: every transaction is decided, every reader can read to the end, and there is no anomaly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import trio

from tests.daemon.talk import Talk
from tests.daemon.transactional_checker import check
from tests.daemon.transactional_history import Log
from tests.daemon.transactional_readers import Habit, log_of, read_to_the_end
from tests.daemon.transactional_writers import Plot, settle
from tests.patience import PATIENCE_S

#: Number of messages at the end of a topic that are read one by one, with a request each.
SINGLY = 200


async def check_all(
    talk: Talk,
    plot: Plot,
    topics: Sequence[str],
    *,
    singly: int | None = SINGLY,
    restored: bool = False,
    repeated: bool = False,
) -> tuple[Counter[str], int]:
    """Return the number of transactions that ended in each state, and the number of pages that were blocked.

    Args:
      singly: the number of messages at the end of the first topic that are read one by one; None for all.
      restored: True if the store was restored in between, which drops the messages of uncommitted transactions.
      repeated: True to wait until the janitor has rolled back all messages of invalid transactions, including those
        that a kill left half done. Needs a short ``retention.interval_s``.
    """
    await settle(talk, plot)
    seen = len(plot.pages)
    logs = await (rolled_back(talk, plot, topics) if repeated else logs_of(talk, topics))
    start = None if singly is None or singly >= len(logs[0].rows) else logs[0].rows[-singly][0]
    for topic in topics:
        for limit in (1, 7, None) if topic == topics[0] else (50, None):
            for committed in (True, False):
                await read_to_the_end(talk, topic, Habit(committed, limit), plot, start if limit == 1 else None)
                assert plot.pages[-1].end == "end", plot.pages[-1]
    states = Counter(each.state for each in plot.transactions)
    held = sum(page.end == "held" for page in plot.pages)
    if restored:
        logs = without_undone(plot, logs)
    print(f"{states}, {seen} pages, of which {held} held; {[len(log.rows) for log in logs]} messages")
    anomalies = check(plot.transactions, plot.requests, plot.pages, logs)
    assert not anomalies, "\n".join([f"{len(anomalies)} anomalies", *map(str, anomalies[:20])])
    return states, held


async def logs_of(talk: Talk, topics: Sequence[str]) -> list[Log]:
    """Return the log of each topic."""
    return [await log_of(talk, topic) for topic in topics]


async def rolled_back(talk: Talk, plot: Plot, topics: Sequence[str]) -> list[Log]:
    """Return the logs once every message of an invalid transaction has been rolled back."""
    invalid = {pointer for each in plot.transactions if each.state == "invalid" for pointer in each.pointers}
    with trio.fail_after(PATIENCE_S):
        while True:
            logs = await logs_of(talk, topics)
            if not any(pointer in invalid for log in logs for _, _, pointer in log.rows):
                return logs
            await trio.sleep(0.1)


def without_undone(plot: Plot, logs: Sequence[Log]) -> list[Log]:
    """Remove messages that a restore may have dropped from requests, logs and pages of uncommitted readers.

    Pages of transactional readers are unchanged: they must never have shown these messages.
    """
    undone = {
        payload
        for request in plot.requests
        for payload in request.payloads
        if request.transaction is not None and (request.transaction.state != "committed" or request.rolled_back != "no")
    }
    plot.requests = [each for each in plot.requests if not undone.intersection(each.payloads)]
    holders = {pointer for each in plot.transactions if each.state != "committed" for pointer in each.pointers}
    for at, page in enumerate(plot.pages):
        if page.end == "held" and page.held_by in holders:
            plot.pages[at] = replace(page, end="more")  # the row that blocked the reader is gone
        elif not page.transactional:
            plot.pages[at] = replace(page, messages=tuple(each for each in page.messages if each[1] not in undone))
    return [Log(log.topic, [row for row in log.rows if row[1] not in undone]) for log in logs]
