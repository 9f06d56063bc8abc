"""Hand-over storms: topics that lost their owner are opened by the remaining instances.

death     the owner dies at 0; ``session_s`` later its session expires, and the others take over
asks      clients that were refused until then, or wait for messages, retry at once; others send their next request
opening   needs a slot of the new owner (it has ``slots``), an increment of the epoch counter for every block of
          epochs (a row of HBase, one increment after the other), the calls that claim and load, and processor time
          on the owner's single core
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.hbase.owners import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.scale_costs import Costs
    from bench.scale_model import Placement


@dataclass(frozen=True, slots=True)
class Storm:
    """Unavailability of the topics, in seconds."""

    topics: int
    median_s: float
    p99_s: float
    last_s: float
    counter_s: float
    """Total time for which the epoch counter was busy with these topics."""


def storm(
    placement: Placement,
    instances: int,
    dead: Sequence[int],
    costs: Costs,
    *,
    session_s: float = 10.0,
    slots: int = 16,
    busy: float = 0.5,
    seed: int = 1,
) -> Storm:
    """Simulate the death of the instances ``dead``; if none remains, the deployment restarts at ``session_s``.

    Args:
      busy: utilization of the other instances' cores by everything else.
    """
    dice = random.Random(seed)
    gone = set(dead)
    left = [number for number in range(instances) if number not in gone] or list(range(instances))
    queues: dict[int, deque[float]] = {number: deque() for number in left}
    for asked_s, owner in sorted(_asks(placement, instances, gone, left, session_s, dice)):
        queues[owner].append(asked_s)
    cores_s = dict.fromkeys(left, 0.0)
    counter_s, turns = 0.0, 0
    epochs = dict.fromkeys(left, 0)
    step_s = costs.round_trip_ms / 1e3
    opened: list[float] = []
    # Process slots in order of their start, so that no increment of the counter waits for a later one.
    begins = [(queues[owner].popleft(), owner) for owner in left for _ in range(min(slots, len(queues[owner])))]
    heapq.heapify(begins)
    while begins:
        begun_s, owner = heapq.heappop(begins)
        claims_s = begun_s
        if not epochs[owner]:
            claims_s = counter_s = max(begun_s, counter_s) + step_s
            epochs[owner], turns = BLOCK, turns + 1
        epochs[owner] -= 1
        cores_s[owner] = max(begun_s, cores_s[owner]) + costs.open_us / 1e6 / (1 - busy)
        done_s = max(claims_s + costs.open_ms / 1e3, cores_s[owner])
        opened.append(done_s)
        if queues[owner]:
            heapq.heappush(begins, (max(done_s, queues[owner].popleft()), owner))
    opened.sort()
    if not opened:
        return Storm(0, 0.0, 0.0, 0.0, 0.0)
    count = len(opened)
    return Storm(count, opened[count // 2], opened[int(count * 0.99)], opened[-1], turns * step_s)


def _asks(
    placement: Placement, instances: int, gone: set[int], left: list[int], session_s: float, dice: random.Random
) -> list[tuple[float, int]]:
    """Return, for each topic without an owner, the time of its first request and the new owner."""
    asks = []
    load = placement.load
    for owner, messages in zip(placement.owners(instances), placement.rates, strict=True):
        if owner not in gone:
            continue
        rate = messages / load.messages_per_request
        # Refused at least once while there was no owner, or waiting: retries at once.
        waits = load.readers_per_topic > 0 or dice.random() < -math.expm1(-rate * session_s)
        asked_s = session_s + (0.0 if waits else dice.expovariate(rate))
        asks.append((asked_s, dice.choice(left)))
    return asks
