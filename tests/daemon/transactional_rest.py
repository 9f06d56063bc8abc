"""The checks after a ring: everything is decided, every reader can read to the end, and there is no anomaly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.daemon.talk import Talk
from tests.daemon.transactional_checker import check
from tests.daemon.transactional_readers import Habit, log_of, read_to_the_end
from tests.daemon.transactional_writers import Plot, settle

#: This many messages at the end of a topic are read one by one, with a request each.
SINGLY = 200


async def check_all(
    talk: Talk, plot: Plot, topics: Sequence[str], *, singly: int | None = SINGLY
) -> tuple[Counter[str], int]:
    """Return how many transactions ended in each state, and how many pages were held.

    ``singly``: how many messages at the end of the first topic are read one by one; None: all.
    """
    await settle(talk, plot)
    seen = len(plot.pages)
    logs = [await log_of(talk, topic) for topic in topics]
    start = None if singly is None or singly >= len(logs[0].rows) else logs[0].rows[-singly][0]
    for topic in topics:
        for limit in (1, 7, None) if topic == topics[0] else (50, None):
            for committed in (True, False):
                await read_to_the_end(talk, topic, Habit(committed, limit), plot, start if limit == 1 else None)
                assert plot.pages[-1].end == "end", plot.pages[-1]
    states = Counter(each.state for each in plot.transactions)
    held = sum(page.end == "held" for page in plot.pages)
    print(f"{states}, {seen} pages, of which {held} held; {[len(log.rows) for log in logs]} messages")
    anomalies = check(plot.transactions, plot.requests, plot.pages, logs)
    assert not anomalies, "\n".join([f"{len(anomalies)} anomalies", *map(str, anomalies[:20])])
    return states, held
