"""Short garbage collections, however many topics are open.

A full collection visits every container of the process, and blocks all requests. With ten thousand open topics there
are 670 000 containers, which takes 0.4 s, and almost none are garbage: requests, connections and topics are freed by
reference counts (tests/broker/test_reference_cycles.py). So each full collection ends with ``gc.freeze``, which
excludes the survivors from later collections, and the next one begins after a bounded number of new containers. Frozen
containers are still freed by reference counts. A cycle that becomes garbage after it was frozen is not. If memory has
grown by more than open topics explain, one collection visits everything again.
"""

from __future__ import annotations

import gc
import logging
import sys
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)
#: For ``gc.set_threshold``: new containers between two young collections, young collections between two middle ones,
#: and middle ones between two full ones. A full one then visits about 30 000 containers, in 20 ms.
THRESHOLDS = (700, 10, 3)
_DEFAULT = gc.get_threshold()
#: Interval between checks of memory growth.
LOOK_S = 60.0
#: Growth, in the allocator's blocks of about 100 bytes, that is always accepted; and growth accepted for each open
#: topic.
UNEXPLAINED_BLOCKS = 4_000_000
TOPIC_BLOCKS = 500


@contextmanager
def short_collections() -> Iterator[None]:
    """Within the block, a full collection visits only containers made since the previous full collection. Reentrant."""
    gc.callbacks.append(_freeze_survivors)
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.callbacks.remove(_freeze_survivors)
        if _freeze_survivors not in gc.callbacks:
            gc.set_threshold(*_DEFAULT)


def freeze_loaded() -> None:
    """Exclude everything that is loaded from later collections."""
    gc.freeze()
    # CPython delays a full collection until new survivors are a quarter of the old ones; this leaves no old ones.
    gc.collect()


def _freeze_survivors(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


class Reclaim:
    """Collects frozen garbage if there is much of it.

    Args:
      count_topics: returns the number of open topics.
    """

    def __init__(self, count_topics: Callable[[], int]) -> None:
        self._count_topics = count_topics
        self._blocks = sys.getallocatedblocks()
        self._topics = count_topics()

    async def run(self) -> None:
        """Check at intervals, until cancelled."""
        while True:
            await trio.sleep(LOOK_S)
            self.look()

    def look(self) -> bool:
        """Collect everything if memory has grown by more than open topics explain. True if it did."""
        allowed = max(UNEXPLAINED_BLOCKS, self._blocks)
        allowed += TOPIC_BLOCKS * max(0, self._count_topics() - self._topics)
        if sys.getallocatedblocks() - self._blocks <= allowed:
            return False
        begun_s = perf_counter()
        gc.unfreeze()
        freed = gc.collect()
        gc.freeze()
        self._blocks, self._topics = sys.getallocatedblocks(), self._count_topics()
        log.info("garbage collected", extra={"objects": freed, "seconds": round(perf_counter() - begun_s, 3)})
        return True
