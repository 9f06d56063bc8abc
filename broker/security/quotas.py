"""Quotas: how much a name, or everybody together on a topic, may ask for in a while. Pure but for the time it is given.

Each limit is a token bucket of ``burst_s`` seconds. A request is let in while its bucket is not empty, and owes what it
takes beyond: so one that is larger than the bucket passes when the bucket is full, and the next ones wait for it. What a
request costs may only be known when it was read or answered; it is owed then.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from broker.security.rights import MAX_PART
from plainsong.protocol.errors import QuotaExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from broker.security.grants import GrantTable, Quota
    from broker.security.identity import Identity

#: Buckets that are kept; beyond, those that are full are forgotten.
MAX_BUCKETS = 100_000
#: Names whose quotas are kept ready; beyond, they are worked out again.
MAX_NAMES = 10_000
#: What a limit counts, as in ``RateLimit-Policy``.
_UNITS = {"publish_bytes_per_s": "content-bytes", "poll_bytes_per_s": "content-bytes"}
#: Limits of this version; ``connections`` and ``topics`` of a file are read and not counted yet.
ENFORCED = (
    "requests_per_s",
    "publish_requests_per_s",
    "publish_messages_per_s",
    "publish_bytes_per_s",
    "poll_bytes_per_s",
    "parked_polls",
    "open_transactions",
)
_PUBLISHES = frozenset(("publish", "store"))
_POLLS = frozenset(("poll", "poll_many", "get_messages", "get_message"))


class _Bucket:
    __slots__ = ("capacity", "level", "rate", "since_s")

    def __init__(self, rate: float, burst_s: float, now_s: float) -> None:
        self.rate = rate
        self.capacity = rate * burst_s
        self.level = self.capacity
        self.since_s = now_s

    def fill(self, now_s: float) -> None:
        self.level = min(self.capacity, self.level + max(0.0, now_s - self.since_s) * self.rate)
        self.since_s = now_s


class Quotas:
    """The quotas of a grants file, and how far each is used up.

    Args:
      now_s: a clock that does not go back.
      share: of each limit, where several processes count for one instance.
      refused: counts a refusal by the limit.
    """

    def __init__(
        self, now_s: Callable[[], float], *, share: float = 1.0, refused: Callable[[str], None] = lambda limit: None
    ) -> None:
        self._now_s = now_s
        self._share = share
        self._refused = refused
        self._table: GrantTable | None = None
        self._of_names: dict[tuple[str, tuple[str, ...]], tuple[Quota, ...]] = {}
        self._buckets: dict[tuple[int, str, str], _Bucket] = {}
        self._counts: dict[tuple[int, str, str], int] = {}

    def replace(self, table: GrantTable) -> None:
        """Puts the quotas of a file in force; buckets begin full."""
        self._table = table if table.quotas else None
        self._of_names.clear()
        self._buckets.clear()

    @property
    def buckets(self) -> int:
        """How many buckets are kept."""
        return len(self._buckets)

    def concern(self, who: Identity) -> bool:
        """Whether a name, or a topic that it may ask about, has a quota at all."""
        table = self._table
        return table is not None and bool(self._quotas_of(who) or any(quota.on for quota in table.quotas))

    def enter(self, who: Identity, route: str, namespace: str, topic: str, length: int) -> None:
        """Lets a request in, and takes what is known of its cost. Raises QuotaExceeded: it took nothing."""
        if self._table is None:
            return
        costs = {"requests_per_s": 1.0}
        if route in _PUBLISHES:
            costs |= {
                "publish_requests_per_s": 1.0,
                "publish_messages_per_s": 0.0,
                "publish_bytes_per_s": float(length),
            }
        elif route in _POLLS:
            costs["poll_bytes_per_s"] = 0.0
        taken: list[tuple[_Bucket, float]] = []
        for quota, key in self._applying(who, namespace, topic):
            for limit, cost in costs.items():
                if limit in quota.limits:
                    bucket = self._bucket(quota, key, limit)
                    if bucket.level <= 0 or (bucket.level < cost and bucket.level < bucket.capacity):
                        self._refused(limit)
                        raise _exceeded(limit, bucket, cost)
                    taken.append((bucket, cost))
        for bucket, cost in taken:
            bucket.level -= cost

    def owe(self, who: Identity, namespace: str, topic: str, limit: str, cost: float) -> None:
        """Takes what turned out to be the cost of a request that was let in."""
        if self._table is not None and cost:
            for quota, key in self._applying(who, namespace, topic):
                if limit in quota.limits:
                    self._bucket(quota, key, limit).level -= cost

    def pause_s(self, who: Identity, namespace: str, topic: str, size: int) -> float:
        """Takes the bytes of a stream's message, and says how long the next has to wait."""
        if self._table is None:
            return 0.0
        pause_s = 0.0
        for quota, key in self._applying(who, namespace, topic):
            for limit, cost in (("publish_bytes_per_s", float(size)), ("publish_requests_per_s", 1.0)):
                if limit in quota.limits:
                    bucket = self._bucket(quota, key, limit)
                    bucket.level -= cost
                    pause_s = max(pause_s, -bucket.level / bucket.rate)
        return pause_s

    # --- counts -----------------------------------------------------------------------------------

    def park(self, who: Identity, namespace: str, topic: str) -> Callable[[], None]:
        """Counts a poll that waits; the function that ends it. Raises QuotaExceeded."""
        held: list[tuple[int, str, str]] = []
        for quota, key in self._applying(who, namespace, topic):
            if "parked_polls" in quota.limits:
                place = quota.line, key, "parked_polls"
                if self._counts.get(place, 0) >= self._limit(quota, "parked_polls"):
                    self._end(held)
                    self._refused("parked_polls")
                    raise _too_many("parked_polls", self._limit(quota, "parked_polls"))
                self._counts[place] = self._counts.get(place, 0) + 1
                held.append(place)
        return lambda: self._end(held)

    def _end(self, held: list[tuple[int, str, str]]) -> None:
        while held:
            place = held.pop()
            self._counts[place] -= 1
            if not self._counts[place]:
                del self._counts[place]

    def check_open(self, who: Identity, count: Callable[[str], int]) -> None:
        """Raises QuotaExceeded for a transaction too many; ``count`` says how many a name has open."""
        for quota in self._quotas_of(who) if self._table is not None else ():
            limit = quota.limits.get("open_transactions")
            if limit is not None and count(who.name) >= limit:
                self._refused("open_transactions")
                raise _too_many("open_transactions", int(limit))

    # --- buckets ----------------------------------------------------------------------------------

    def _applying(self, who: Identity, namespace: str, topic: str) -> Iterator[tuple[Quota, str]]:
        """Each quota that a request comes under, and whose bucket it is: the name's, or the topic's."""
        table = self._table
        if table is None:
            return
        for quota in self._quotas_of(who):
            yield quota, who.name
        if topic and len(namespace) <= MAX_PART and len(topic) <= MAX_PART:  # else there is no such topic
            for quota in table.quotas:
                if quota.on and any(pattern.matches(namespace, topic) for pattern in quota.on):
                    yield quota, f"{namespace}:{topic}"

    def _quotas_of(self, who: Identity) -> tuple[Quota, ...]:
        table = self._table
        if table is None:
            return ()
        key = who.name, who.groups
        found = self._of_names.get(key)
        if found is None:
            if len(self._of_names) >= MAX_NAMES:
                self._of_names.clear()
            chosen = (quota for quota in table.quotas if quota.to and table.applies(quota.to, who.name, who.groups))
            found = self._of_names[key] = tuple(chosen)
        return found

    def _limit(self, quota: Quota, limit: str) -> int:
        return max(1, ceil(quota.limits[limit] * self._share))

    def _bucket(self, quota: Quota, key: str, limit: str) -> _Bucket:
        now_s = self._now_s()
        place = quota.line, key, limit
        bucket = self._buckets.get(place)
        if bucket is None:
            if len(self._buckets) >= MAX_BUCKETS:
                self._forget(now_s)
            bucket = self._buckets[place] = _Bucket(quota.limits[limit] * self._share, quota.burst_s, now_s)
        bucket.fill(now_s)
        return bucket

    def _forget(self, now_s: float) -> None:
        """Makes room: a bucket that is full says nothing."""
        for place, bucket in list(self._buckets.items()):
            bucket.fill(now_s)
            if bucket.level >= bucket.capacity:
                del self._buckets[place]
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets.clear()


def _exceeded(limit: str, bucket: _Bucket, cost: float) -> QuotaExceeded:
    wait_s = max(1, ceil((min(cost, bucket.capacity) - bucket.level) / bucket.rate))
    error = QuotaExceeded(f"{limit} is used up", hint=f"go slower, or wait {wait_s} s; an operator can raise it")
    unit = f';qu="{_UNITS[limit]}"' if limit in _UNITS else ""
    error.retry_after_s = wait_s
    error.policy = f'"{limit}";q={int(bucket.rate)};w=1{unit}'
    error.state = f'"{limit}";r={max(0, int(bucket.level))};t={wait_s}'
    return error


def _too_many(limit: str, most: int) -> QuotaExceeded:
    error = QuotaExceeded(f"{limit}: there are {most} already", hint="end one first; an operator can raise it")
    error.policy = f'"{limit}";q={most}'
    error.state = f'"{limit}";r=0;t=1'
    return error
