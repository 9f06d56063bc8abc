"""Short garbage collections, however many topics are open.

A full collection visits every container of the process and stops every request meanwhile. With ten thousand open topics
there are 670 000 of them, which takes 0.4 s, and nearly none of them is garbage: requests, connections and topics free
what they are made of by reference counts (tests/broker/test_freed_at_once.py). So each full collection ends with
``gc.freeze``, which removes the survivors from later collections, and the next one begins after a bounded number of new
containers. What is frozen is still freed by reference counts. A cycle that dies after it was frozen is not; if memory has
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
#: For ``gc.set_threshold``: new containers between two young collections, young ones between two middle ones, and middle
#: ones between two full ones, which so visit some 30 000 containers, in 20 ms.
THRESHOLDS = (700, 10, 3)
_DEFAULT = gc.get_threshold()
#: How often the memory is compared with what it was.
LOOK_S = 60.0
#: Growth in the allocator's blocks, of 100 bytes or so, that needs no explanation; and what an open topic explains.
UNEXPLAINED_BLOCKS = 4_000_000
TOPIC_BLOCKS = 500


@contextmanager
def short_collections() -> Iterator[None]:
    """While this is entered, a collection visits only the containers that were made since the full collection before.

    It may be entered several times.
    """
    gc.callbacks.append(_freeze_survivors)
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.callbacks.remove(_freeze_survivors)
        if _freeze_survivors not in gc.callbacks:
            gc.set_threshold(*_DEFAULT)


def freeze_loaded() -> None:
    """Remove everything that is loaded from later collections."""
    gc.freeze()
    # CPython delays a full collection until a quarter of those that survived the one before are new: now they are none.
    gc.collect()


def _freeze_survivors(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


class Reclaim:
    """Collects frozen garbage when there is much of it.

    Args:
      count_topics: how many topics are open.
    """

    def __init__(self, count_topics: Callable[[], int]) -> None:
        self._count_topics = count_topics
        self._blocks = sys.getallocatedblocks()
        self._topics = count_topics()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
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
