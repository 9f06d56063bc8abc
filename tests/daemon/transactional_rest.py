"""When all is over: everything is decided, everybody can read to the end, and nobody saw what must not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.daemon.talk import Talk
from tests.daemon.transactional_checker import check
from tests.daemon.transactional_readers import Habit, log_of, read_to_the_end
from tests.daemon.transactional_writers import Plot, settle


async def check_all(talk: Talk, plot: Plot, topics: Sequence[str]) -> tuple[Counter[str], int]:
    """How many transactions came to each state, and how many pages were held."""
    await settle(talk, plot)
    seen = len(plot.pages)
    for topic in topics:
        for limit in (1, 7, None) if topic == topics[0] else (50, None):
            for committed in (True, False):
                await read_to_the_end(talk, topic, Habit(committed, limit), plot)
                assert plot.pages[-1].end == "end", plot.pages[-1]
    logs = [await log_of(talk, topic) for topic in topics]
    states = Counter(each.state for each in plot.transactions)
    held = sum(page.end == "held" for page in plot.pages)
    print(f"{states}, {seen} pages, of which {held} held; {[len(log.rows) for log in logs]} messages")
    anomalies = check(plot.transactions, plot.requests, plot.pages, logs)
    assert not anomalies, "\n".join([f"{len(anomalies)} anomalies", *map(str, anomalies[:20])])
    return states, held
